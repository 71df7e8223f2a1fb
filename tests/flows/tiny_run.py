"""A run of the flow that is real in every stage and small in every number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRAIN_SUBJECTS = ("rain", "bread", "clocks", "bees", "maps", "glass", "tides", "salt", "wool", "ink")
HELD_OUT_SUBJECTS = ("snow", "cheese", "keys", "ants")


def write_conversations(directory: Path) -> None:
    """Prompts for the target to answer: some to train on, others held out."""
    for name, subjects in (("train", TRAIN_SUBJECTS), ("held-out", HELD_OUT_SUBJECTS)):
        lines = [
            json.dumps({"messages": [{"role": "user", "content": f"Write one sentence about {subject}."}]})
            for subject in subjects
        ]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def tiny_settings(conversations: Path, target: Path) -> dict[str, Any]:
    """Values of a run whose stages take seconds, and which can be killed in the middle of each."""
    return {
        "sources": [
            {"uri": str(conversations / "train.jsonl"), "domain": "subjects", "use": "train"},
            {"uri": str(conversations / "held-out.jsonl"), "domain": "subjects", "use": "evaluation"},
        ],
        "target": str(target),
        "max_length_tokens": 256,
        "states": {"max_answer_tokens": 32, "conversations_per_shard": 2, "concurrency": 2},
        "drafter": {"num_layers": 1, "draft_vocab_size": 256},
        "training": {
            "num_depths": 3,
            "num_epochs": 30,
            "checkpoint_interval_s": 1,
            "peak_learning_rate": 1e-3,
        },
        "evaluation": {
            "num_speculative_tokens": [2],
            "concurrency": [1],
            "max_answer_tokens": 16,
            "prompts_per_domain": 4,
            "requests_per_concurrency": 2,
            "identity_dtypes": ["auto"],
            "servers_at_once": 2,
        },
        "gate": {
            "min_acceptance_length": 1,
            "min_speedup": 0.01,
            "min_prompts": 2,
            "require_identical_float32": False,
        },
        "server": {"max_model_len_tokens": 256, "max_num_seqs": 4, "kv_cache_gb": 0.5},
    }
