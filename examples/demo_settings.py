"""The demo's values: what fits two cores and 25 minutes, set-up included. Everything else keeps its default."""

from __future__ import annotations

from pathlib import Path

from drafter.config import DrafterSettings, GateThresholds, SourceSettings
from drafter.machine import native_number_format
from tasks.retrain_settings import RetrainSettings

# A CPU that multiplies bfloat16 answers three times as fast and trains twice as fast as one that does not.
_IS_FAST = native_number_format() == "bfloat16"
# Prompts that are used, chosen by hash. HumanEval is only measured with, never trained on.
MAX_PROMPTS = {"python-stdlib": 1250 if _IS_FAST else 840, "humaneval": 24}
_TRAINING_S = 510 if _IS_FAST else 360
# As long as the answers that are measured. What limits so short a training is the number of conversations, so they
# are many and short.
_ANSWER_TOKENS = 96


def demo_settings(target: Path, conversations: dict[str, Path]) -> RetrainSettings:
    """Train on the standard library's prompts; measure on held-out ones and on HumanEval, never trained on."""
    return RetrainSettings(
        sources=(
            SourceSettings(uri=str(conversations["python-stdlib"]), domain="python-stdlib", use="split"),
            SourceSettings(uri=str(conversations["humaneval"]), domain="humaneval", use="evaluation"),
        ),
        target=target,
        # Also of a training step: twice as many steps as with 1024 in nearly the same time, and a better drafter.
        max_length_tokens=512,
        dataset={"evaluation_share": 0.04, "max_evaluation_conversations": 48},
        # Two servers with a core each: what a server does besides matrix products uses one core at a time.
        states={"max_answer_tokens": _ANSWER_TOKENS, "num_servers": 2},
        drafter=DrafterSettings(num_layers=2, draft_vocab_size=4096),
        # In minutes of training, depths that are not served cost more than they give, and what is seen three
        # times is learned by heart unless weights decay. Acceptance length of held-out prompts after the same
        # 3.5 epochs: 1.78 with 5 depths, 1.81 with these 3, 1.83 with weight decay as well. Fewer chains are faster and
        # leave more of each step to the first guess.
        training={
            "num_depths": 3,
            "retention": 0.5,
            "weight_decay": 1.0,
            "num_epochs": 4,
            "time_budget_s": _TRAINING_S,
            "decay": "cosine",
        },
        evaluation={
            "num_speculative_tokens": (3,),  # every further K costs two to three minutes
            "concurrency": (1, 4, 16),
            "max_answer_tokens": _ANSWER_TOKENS,
            "prompts_per_domain": 16,
            "requests_per_concurrency": 4,
            "servers_at_once": 2,
            "measure_schedule": False,  # one more server, two minutes
        },
        gate=GateThresholds(min_acceptance_length=1.5, min_speedup=1.05),
    )
