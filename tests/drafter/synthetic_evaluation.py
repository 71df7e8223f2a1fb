"""An evaluation with numbers of our choice, for tests of what is decided and shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafter.records import Cell, EvaluationReport, PromptAcceptance
from drafter.statistics import length_bucket, summarise

DOMAIN, UNSEEN = "python-stdlib", "humaneval"
PLAIN_SPEED = {1: 58.0, 4: 176.0, 16: 357.0}


def make_prompts(
    drafter: str,
    k: int,
    acceptance_lengths: Sequence[float],
    domain: str = DOMAIN,
    context_tokens: int = 200,
    num_drafts: int = 100,
    first_id: int = 0,
) -> list[PromptAcceptance]:
    """One prompt per acceptance length, ids counting from `first_id`."""
    return [
        PromptAcceptance(
            conversation_id=f"{domain}-{first_id + number}",
            domain=domain,
            drafter=drafter,
            num_speculative_tokens=k,
            context_tokens=context_tokens,
            length_bucket=length_bucket(context_tokens, (256, 1024, 4096)),
            num_drafts=num_drafts,
            num_accepted_tokens=round((length - 1) * num_drafts),
        )
        for number, length in enumerate(acceptance_lengths)
    ]


def make_cell(drafter: str | None, k: int, concurrency: int, speed: float, domain: str = DOMAIN) -> Cell:
    """A cell with this many output tokens/s."""
    rates = tuple(0.57 * 0.5**position for position in range(k))
    return Cell(
        speculation="none" if drafter is None else "peagle",
        drafter=drafter,
        num_speculative_tokens=k,
        concurrency=concurrency,
        domain=domain,
        num_requests=8,
        output_tokens=1024,
        acceptance_length=None if drafter is None else 1 + sum(rates),
        acceptance_rate_per_position=rates,
        output_tokens_per_second=speed,
        ttft_ms=31.0,
        tpot_ms=1000 / speed * concurrency,
    )


def make_report(
    cells: Sequence[Cell],
    prompts: Sequence[PromptAcceptance],
    identical: Mapping[str, Mapping[str, float]] | None = None,
    train_domains: tuple[str, ...] = (DOMAIN,),
) -> EvaluationReport:
    """A report around cells and prompts; float32 output is identical unless told otherwise."""
    names = sorted({prompt.drafter for prompt in prompts} | {cell.drafter for cell in cells if cell.drafter})
    if identical is None:
        identical = {name: {"bfloat16": 0.25, "float32": 1.0} for name in names}
    return EvaluationReport(
        path="evaluation",
        digest="0123456789abcdef",
        target_fingerprint="fedcba9876543210",
        dataset_digest="00112233445566aa",
        drafters={name: f"digest-of-{name}" for name in names},
        cells=tuple(cells),
        prompts=tuple(prompts),
        acceptance=summarise(prompts),
        greedy_identical_share={name: dict(shares) for name, shares in identical.items()},
        train_domains=train_domains,
        machine="a processor, 2 cores, 24 GiB memory",
        versions={"python": "3.11.7", "vllm": "0.32.0"},
        elapsed_s=311.0,
    )


def make_good_report() -> EvaluationReport:
    """A challenger that gains on its own domain at low load and loses elsewhere, as measured drafters do."""
    cells = [make_cell(None, 0, level, speed) for level, speed in PLAIN_SPEED.items()]
    cells += [
        make_cell("challenger", 3, level, speed) for level, speed in {1: 82.0, 4: 180.0, 16: 262.0}.items()
    ]
    cells += [
        make_cell("challenger", 5, level, speed) for level, speed in {1: 75.0, 4: 158.0, 16: 214.0}.items()
    ]
    cells += [make_cell(None, 0, 1, 57.0, UNSEEN), make_cell("challenger", 3, 1, 66.0, UNSEEN)]
    cells += [make_cell("challenger", 5, 1, 54.0, UNSEEN)]
    prompts = []
    for k, bonus in ((3, 0.0), (5, 0.08)):
        lengths = [1.86 + bonus + 0.02 * (number % 9 - 4) for number in range(24)]
        prompts += make_prompts("challenger", k, lengths[:14])
        prompts += make_prompts("challenger", k, lengths[14:], context_tokens=300, first_id=14)
        prompts += make_prompts("challenger", k, [one - 0.3 for one in lengths], UNSEEN)
    return make_report(cells, prompts)
