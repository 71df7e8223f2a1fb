"""Measure drafters inside vLLM, against serving without one. No torch here.

Order of work: for each variant one server; its answers, then its speeds, while nothing else works. Servers that
are up together take turns. After that two servers in each further number format (usually float32) say whether
greedy output is identical. Where that shows that speculation pays under little load only, a server that changes
over by itself is measured last.
Everything finished is kept in `cells/`; `evaluation.json` is written last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from drafter.answers import Answer
from drafter.benchmark_client import BenchmarkClient
from drafter.config import EvaluateSettings
from drafter.errors import CheckpointError, DataError
from drafter.files import digest_of
from drafter.held_out import HeldOutPrompt, choose_prompts
from drafter.machine import describe_machine
from drafter.measurement import (
    Bench,
    SpeedTask,
    Variant,
    full_grid_domains,
    identity_name,
    served_name,
    server_for,
    speed_tasks,
    variants,
)
from drafter.preflight import require_fit
from drafter.progress import Progress, track
from drafter.provenance import digest_of_drafter, digests_of, read_provenance, versions
from drafter.records import Cell, DatasetRecord, EvaluationReport, PromptAcceptance, ScheduledServing
from drafter.report import default_candidate
from drafter.serving import VllmServer, require_vllm_environment
from drafter.serving_advice import schedules_to_measure
from drafter.statistics import length_bucket, summarise
from drafter.target import Target, load_target

logger = logging.getLogger(__name__)

FILE_NAME = "evaluation.json"
_NO_INFLUENCE = {"dataset", "target", "output", "servers_at_once"}


def evaluate(settings: EvaluateSettings) -> EvaluationReport:
    """Measure every candidate at every K, or return what was measured before with the same inputs.

    Raises:
        DataError: no held-out prompt.
        CheckpointError: a candidate that does not fit the target, or was trained to guess another way.
        ServerError: no vLLM environment, or a server that does not start or dies.
    """
    started_at = time.monotonic()
    target = load_target(settings.target)
    dataset = DatasetRecord.load(settings.dataset / "dataset.json")
    drafters = _check_candidates(settings, target)
    base = _base(settings, target, dataset)
    digest = digest_of([base, drafters, settings.model_dump(mode="json", exclude=_NO_INFLUENCE)])
    finished = _finished(settings.output / FILE_NAME, digest)
    if finished is not None:
        return finished
    require_vllm_environment(settings.server)
    window = settings.server.max_model_len_tokens or target.max_position_embeddings
    prompts = choose_prompts(settings, window)
    bench = Bench(settings, prompts, base, drafters)
    tasks = speed_tasks(settings, list(prompts), dataset.train_domains)
    total = len(variants(settings)) * (len(tasks) + 1) + len(_identity_passes(bench))
    _measure(bench, _passes_left(bench, tasks), total, target.path)
    report = _assemble(bench, tasks, target, dataset, digest)
    report = report.model_copy(
        update={
            "scheduled": _measure_schedules(bench, tasks, report, target.path),
            "elapsed_s": round(time.monotonic() - started_at, 1),
        }
    )
    report.save(settings.output / FILE_NAME)
    return report


def _check_candidates(settings: EvaluateSettings, target: Target) -> dict[str, str]:
    """Preflight each candidate; return the digests of their files by name."""
    names = [candidate.name for candidate in settings.candidates]
    if len(set(names)) != len(names) or "none" in names:
        raise ValueError(f"candidate names must differ, and none may be called `none`: {names}")
    for candidate in settings.candidates:
        require_fit(candidate.path, target)
        trained = read_provenance(candidate.path).algorithm
        if candidate.speculation != trained:
            raise CheckpointError(
                f"candidate {candidate.name}: speculation is {candidate.speculation}",
                f"{trained}, which {candidate.path} was trained for: else its guesses are never right",
                f"set the candidate's speculation to {trained}",
            )
    return {one.name: digest_of_drafter(digests_of(one.path)) for one in settings.candidates}


def _base(settings: EvaluateSettings, target: Target, dataset: DatasetRecord) -> dict[str, object]:
    """What every unit depends on. Paths, ports and time limits change no number."""
    server = settings.server.model_dump(mode="json", exclude={"python", "port", "start_timeout_s"})
    return {
        "target": target.fingerprint,
        "dataset": dataset.digest,
        "server": server,
        "max_answer_tokens": settings.max_answer_tokens,
        "prompts_per_domain": settings.prompts_per_domain,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "vllm": versions(settings.server.python).get("vllm"),
    }


def _finished(path: Path, digest: str) -> EvaluationReport | None:
    if not path.exists():
        return None
    try:
        report: EvaluationReport = EvaluationReport.load(path)
    except DataError:
        return None
    return report if report.digest == digest else None


# --- measuring --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pass:
    """What is left to measure on one server.

    Attributes:
        tasks: speeds.
        answers: name of the pass over `prompts`, which comes first; None when it is finished.
        greedy: whatever temperature the settings say.
    """

    variant: Variant
    dtype: str
    tasks: tuple[SpeedTask, ...]
    answers: str | None
    prompts: tuple[HeldOutPrompt, ...]
    greedy: bool

    @property
    def num_units(self) -> int:
        return len(self.tasks) + (self.answers is not None)


def _passes_left(bench: Bench, tasks: Sequence[SpeedTask]) -> list[_Pass]:
    """One pass for each server that is still needed."""
    settings = bench.settings
    everything = tuple(prompt for prompts in bench.prompts.values() for prompt in prompts)
    passes = []
    for variant in variants(settings):
        missing = tuple(task for task in tasks if bench.speed(variant, task) is None)
        name = served_name(settings)
        answers = name if bench.answers(variant, name) is None else None
        passes.append(_Pass(variant, settings.server.dtype, missing, answers, everything, greedy=False))
    for variant, dtype in _identity_passes(bench):
        name = identity_name(settings, dtype)
        if bench.answers(variant, name) is None:
            passes.append(_Pass(variant, dtype, (), name, _identity_prompts(bench), greedy=True))
    return [one for one in passes if one.num_units]


def _measure(bench: Bench, passes: list[_Pass], total: int, target: Path) -> None:
    """Run what is not finished yet: one server per pass, `servers_at_once` of them started together.

    Starting is the work of one core; nothing is measured before all that start together are ready.

    Args:
        passes: what is left.
        total: units in all, the finished ones included.
    """
    settings = bench.settings
    with (
        track(total, "measuring in vLLM", "units") as progress,
        BenchmarkClient(settings.server, settings.output / "benchmarks") as client,
    ):
        progress.advance(total - sum(one.num_units for one in passes))
        while passes:
            together, passes = passes[: settings.servers_at_once], passes[settings.servers_at_once :]
            progress.note("starting " + ", ".join(f"{one.variant.label} in {one.dtype}" for one in together))
            with ExitStack() as stack:
                servers = [server_for(bench, one.variant, one.dtype, target) for one in together]
                for server in servers:
                    stack.callback(server.stop)
                    server.start()
                for server in servers:
                    server.wait_until_ready()
                _measure_in_turns(list(zip(together, servers, strict=True)), client, bench, progress)


def _measure_in_turns(
    running: Sequence[tuple[_Pass, VllmServer]], client: BenchmarkClient, bench: Bench, progress: Progress
) -> None:
    """All units of servers that run side by side, one unit at a time.

    The answers come first: they also warm a server up for every concurrency. A speed is then measured on one server
    after the other before the next speed is: a machine that gets slower in these minutes does so for all of them,
    and each is measured with the others idle beside it.
    """
    for one, server in running:
        if one.answers is not None:
            what = "identity" if one.greedy else "acceptance per prompt"
            progress.note(f"{one.variant.label}, {what} in {one.dtype}")
            bench.measure_answers(server, one.variant, one.answers, one.prompts, one.greedy)
            progress.advance()
    is_warm = [one.answers is not None for one, _ in running]
    for task in dict.fromkeys(task for one, _ in running for task in one.tasks):
        for index, (one, server) in enumerate(running):
            if task in one.tasks:
                progress.note(f"{one.variant.label}, {task.domain}, concurrency {task.concurrency}")
                bench.measure_speed(server, client, one.variant, task, is_warm[index])
                is_warm[index] = True
                progress.advance()


def _measure_schedules(
    bench: Bench, tasks: Sequence[SpeedTask], report: EvaluationReport, target: Path
) -> tuple[ScheduledServing, ...]:
    """Speed of the candidate with each schedule that follows from the cells, on the domains of the full grid."""
    settings, name = bench.settings, default_candidate(report)
    candidate = next((one for one in settings.candidates if one.name == name), None)
    if candidate is None or not settings.measure_schedule:
        return ()
    domains = full_grid_domains(settings, list(bench.prompts), report.train_domains)
    wanted = tuple(task for task in tasks if task.domain in domains)
    scheduled = [
        Variant(candidate, schedule[0][2], schedule)
        for schedule in schedules_to_measure(report, candidate.name, domains)
    ]
    passes = []
    for variant in scheduled:
        missing = tuple(task for task in wanted if bench.speed(variant, task) is None)
        if missing:
            passes.append(_Pass(variant, settings.server.dtype, missing, None, (), greedy=False))
    if passes:
        _measure(bench, passes, len(scheduled) * len(wanted), target)
    return tuple(
        ScheduledServing(
            drafter=candidate.name,
            schedule=variant.schedule,
            cells=tuple(_cells_of(bench, variant, wanted)),
        )
        for variant in scheduled
    )


def _identity_variants(settings: EvaluateSettings) -> tuple[Variant, ...]:
    """Each candidate at the largest K: the most drafted tokens, the most chances to differ."""
    largest = max(settings.num_speculative_tokens)
    return tuple(Variant(candidate, largest) for candidate in settings.candidates)


def _identity_passes(bench: Bench) -> tuple[tuple[Variant, str], ...]:
    """Passes that identity needs beyond the served one."""
    settings = bench.settings
    if not settings.candidates:
        return ()
    extra = [one for one in settings.identity_dtypes if identity_name(settings, one) != served_name(settings)]
    return tuple(
        (variant, one) for one in extra for variant in (Variant(None, 0), *_identity_variants(settings))
    )


def _identity_prompts(bench: Bench) -> tuple[HeldOutPrompt, ...]:
    """`identity_prompts` prompts, taken from the domains in turn."""
    rounds = max(len(prompts) for prompts in bench.prompts.values())
    mixed = [prompts[i] for i in range(rounds) for prompts in bench.prompts.values() if i < len(prompts)]
    return tuple(mixed[: bench.settings.identity_prompts])


# --- the report -------------------------------------------------------------------------------------


def _assemble(
    bench: Bench,
    tasks: Sequence[SpeedTask],
    target: Target,
    dataset: DatasetRecord,
    digest: str,
) -> EvaluationReport:
    """Put the finished units together; schedules and the time it took are filled in by whoever asks."""
    settings = bench.settings
    prompts = tuple(_prompt_acceptance(bench))
    return EvaluationReport(
        path=str(settings.output.absolute()),
        digest=digest,
        target_fingerprint=target.fingerprint,
        dataset_digest=dataset.digest,
        drafters=bench.drafter_digests,
        cells=tuple(_cells(bench, tasks)),
        prompts=prompts,
        acceptance=summarise(prompts, seed=settings.seed),
        greedy_identical_share=_identical_shares(bench),
        train_domains=dataset.train_domains,
        machine=describe_machine(),
        versions=versions(settings.server.python),
        elapsed_s=0.0,
    )


def _cells(bench: Bench, tasks: Sequence[SpeedTask]) -> Iterator[Cell]:
    for variant in variants(bench.settings):
        yield from _cells_of(bench, variant, tasks)


def _cells_of(bench: Bench, variant: Variant, tasks: Sequence[SpeedTask]) -> Iterator[Cell]:
    for task in tasks:
        unit = bench.speed(variant, task)
        assert unit is not None, f"{variant.label} {task} was just measured"
        yield unit.cell


def _prompt_acceptance(bench: Bench) -> Iterator[PromptAcceptance]:
    settings = bench.settings
    for variant in variants(settings):
        if variant.candidate is None:
            continue
        unit = bench.answers(variant, served_name(settings))
        assert unit is not None, f"{variant.label} was just measured"
        for answer in unit.answers:
            context_tokens = answer.prompt_tokens + len(answer.token_ids)
            yield PromptAcceptance(
                conversation_id=answer.conversation_id,
                domain=answer.domain,
                drafter=variant.candidate.name,
                num_speculative_tokens=variant.num_speculative_tokens,
                context_tokens=context_tokens,
                length_bucket=length_bucket(context_tokens, sorted(settings.length_buckets_tokens)),
                num_drafts=answer.num_drafts,
                num_accepted_tokens=answer.num_accepted_tokens,
            )


def _identical_shares(bench: Bench) -> dict[str, dict[str, float]]:
    """Candidate -> number format -> share of greedy answers that are the same tokens as without a drafter."""
    settings = bench.settings
    shares: dict[str, dict[str, float]] = {}
    for variant in _identity_variants(settings):
        assert variant.candidate is not None
        for dtype in settings.identity_dtypes:
            name = identity_name(settings, dtype)
            plain, drafted = bench.answers(Variant(None, 0), name), bench.answers(variant, name)
            assert plain is not None
            assert drafted is not None
            shares.setdefault(variant.candidate.name, {})[dtype] = identical_share(
                plain.answers, drafted.answers
            )
    return shares


def identical_share(plain: Sequence[Answer], drafted: Sequence[Answer]) -> float:
    """Share of answers with exactly the same tokens, prompt by prompt."""
    expected = {answer.conversation_id: answer.token_ids for answer in plain}
    return sum(expected[one.conversation_id] == one.token_ids for one in drafted) / len(drafted)
