"""Sampling with a drafter draws from the same distribution as without (vLLM's CPU build alone does not).

For a few prompts the first tokens of many answers are drawn from both servers. Token counts are compared
by a chi-square statistic whose null distribution comes from permuting the answers between the servers, so
that tokens of one answer may depend on each other. Seeds are fixed, but what shares a batch is not,
and sums round otherwise then. One draw gives a false alarm with a probability of 1e-3; an alarm is believed
when a second draw, with other seeds, gives it too: 1e-6.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from drafter.serving import VllmServer
from drafter.shards import Document
from tests.drafter.tiny import PROMPT_TOKENS, VOCAB_SIZE
from tests.served.completions import complete_all, token_ids

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 4
SAMPLES_PER_REQUEST = 64
REQUESTS_PER_PROMPT = 12
NUM_TOKENS = 4  # the first comes from the prefill, the others from verified drafts
NUM_PERMUTATIONS = 2000
MAX_FALSE_ALARMS = 1e-3

Samples = npt.NDArray[np.int64]  # [prompts, samples, tokens]


def sample(server: VllmServer, prompts: list[list[int]], first_seed: int, **sampling: float) -> Samples:
    """Draw `REQUESTS_PER_PROMPT * SAMPLES_PER_REQUEST` answers for each prompt."""
    drawn = []
    for prompt in prompts:
        tokens: list[list[int]] = []
        for request in range(0, REQUESTS_PER_PROMPT, 4):
            answers = [
                complete_all(
                    server,
                    [prompt],
                    NUM_TOKENS,
                    n=SAMPLES_PER_REQUEST,
                    seed=first_seed + 1000 * (request + i),
                    **sampling,
                )[0]
                for i in range(4)
            ]
            tokens += [ids for answer in answers for ids in token_ids(answer)]
        drawn.append(tokens)
    return np.array(drawn)


def difference(first: Samples, second: Samples) -> float:
    """Chi-square statistic over prompts, positions and tokens for equally many samples on both sides."""
    total = 0.0
    for one, other in zip(first, second, strict=True):
        for position in range(NUM_TOKENS):
            a = np.bincount(one[:, position], minlength=VOCAB_SIZE)
            b = np.bincount(other[:, position], minlength=VOCAB_SIZE)
            both = a + b
            total += float((np.square(a - b)[both > 0] / both[both > 0]).sum())
    return total


def p_value(first: Samples, second: Samples) -> float:
    """Share of permutations of the answers, within each prompt, that differ at least as much."""
    rng = np.random.default_rng(0)
    observed = difference(first, second)
    pooled = np.concatenate([first, second], axis=1)
    half = first.shape[1]
    as_extreme = 0
    for _ in range(NUM_PERMUTATIONS):
        mixed = rng.permuted(np.arange(2 * half)[None].repeat(len(pooled), 0), axis=1)
        shuffled = np.take_along_axis(pooled, mixed[:, :, None], axis=1)
        as_extreme += difference(shuffled[:, :half], shuffled[:, half:]) >= observed
    return (1 + as_extreme) / (1 + NUM_PERMUTATIONS)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.7}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}],
    ids=["temperature", "top_k and top_p"],
)
def test_first_tokens_are_distributed_as_without_a_drafter(
    plain_server: VllmServer,
    drafting_server: VllmServer,
    evaluation_documents: list[Document],
    sampling: dict[str, float],
) -> None:
    # Prompts end within an answer: there the drafter guesses well and its guesses are really verified.
    prompts = [
        document.input_ids[: 3 * PROMPT_TOKENS].tolist() for document in evaluation_documents[:NUM_PROMPTS]
    ]

    def alarms(first_seed: int) -> bool:
        plain = sample(plain_server, prompts, first_seed, **sampling)
        drafted = sample(drafting_server, prompts, first_seed + 499, **sampling)
        return p_value(plain, drafted) <= MAX_FALSE_ALARMS

    assert not (alarms(1) and alarms(251))


def test_the_comparison_notices_another_temperature() -> None:
    """The test itself: temperature 0.7 against 1.0 on a made-up distribution has to be told apart."""
    rng = np.random.default_rng(0)
    logits = 2.0 * rng.standard_normal((NUM_PROMPTS, VOCAB_SIZE))

    def draw(temperature: float) -> Samples:
        weights = np.exp(logits / temperature)
        count = REQUESTS_PER_PROMPT * SAMPLES_PER_REQUEST
        return np.stack([rng.choice(VOCAB_SIZE, (count, NUM_TOKENS), p=one / one.sum()) for one in weights])

    assert p_value(draw(0.7), draw(0.7)) > MAX_FALSE_ALARMS
    assert p_value(draw(0.7), draw(1.0)) <= MAX_FALSE_ALARMS
