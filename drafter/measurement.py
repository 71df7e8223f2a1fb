"""What one evaluation measures, unit by unit, and how a finished unit is found again. No torch here.

A *variant* is one way of serving: without speculation, or a drafter at one K. Its server is started once
and gives two kinds of units, each saved as soon as it is measured: `speed` (one domain at one concurrency)
and `answers` (every held-out prompt once). A unit carries the digest of all it depends on, so a killed
evaluation repeats one unit, and changed settings repeat those that they touch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drafter.answers import PER_REQUEST_ACCEPTANCE, Answer, Sampling, ask
from drafter.benchmark_client import BenchmarkClient, Load
from drafter.config import CandidateSettings, EvaluateSettings, ServerSettings
from drafter.errors import DataError
from drafter.files import digest_of
from drafter.held_out import HeldOutPrompt
from drafter.records import BatchSizeSchedule, Cell, Record
from drafter.serving import VllmServer, speculative_arguments

UnitType = TypeVar("UnitType", "SpeedUnit", "AnswersUnit")

# Prompts recur between measurements; a cached prefix would make the later ones look faster.
_SERVER_ARGUMENTS = ("--no-enable-prefix-caching",)


@dataclass(frozen=True)
class Variant:
    """No speculation (no candidate, K=0), or a drafter at one K, or at that K and none by batch size."""

    candidate: CandidateSettings | None
    num_speculative_tokens: int
    schedule: BatchSizeSchedule = ()

    @property
    def label(self) -> str:
        """Part of file names: `none`, `challenger-k3`, `challenger-k3-scheduled`."""
        if self.candidate is None:
            return "none"
        scheduled = "-scheduled" if self.schedule else ""
        return f"{self.candidate.name}-k{self.num_speculative_tokens}{scheduled}"

    def server_arguments(self) -> tuple[str, ...]:
        """vLLM's arguments for this variant."""
        if self.candidate is None:
            return _SERVER_ARGUMENTS
        candidate = self.candidate
        drafting = speculative_arguments(
            candidate.path, self.num_speculative_tokens, candidate.speculation, self.schedule
        )
        return (*_SERVER_ARGUMENTS, *drafting, *PER_REQUEST_ACCEPTANCE)


class SpeedUnit(Record):
    """One `vllm bench serve` run."""

    key: str
    cell: Cell


class AnswersUnit(Record):
    """One pass over the held-out prompts."""

    key: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class SpeedTask:
    """A domain at a concurrency."""

    domain: str
    concurrency: int


def variants(settings: EvaluateSettings) -> tuple[Variant, ...]:
    """No speculation first, then each candidate at each K."""
    drafting = [
        Variant(one, k) for one in settings.candidates for k in sorted(set(settings.num_speculative_tokens))
    ]
    return (Variant(None, 0), *drafting)


def speed_tasks(
    settings: EvaluateSettings, domains: Sequence[str], train_domains: Sequence[str]
) -> tuple[SpeedTask, ...]:
    """Every concurrency for the domains that get the full grid, the lowest one for the others."""
    levels = sorted(set(settings.concurrency))
    full = full_grid_domains(settings, domains, train_domains)
    return tuple(
        SpeedTask(one, level) for one in domains for level in (levels if one in full else levels[:1])
    )


def full_grid_domains(
    settings: EvaluateSettings, domains: Sequence[str], train_domains: Sequence[str]
) -> tuple[str, ...]:
    """Domains that are measured at every concurrency: those asked for, else those that trained, else all."""
    wanted = settings.full_grid_domains or train_domains
    return tuple(one for one in domains if one in wanted) or tuple(domains)


def num_requests(settings: EvaluateSettings, concurrency: int) -> int:
    """Requests of one speed measurement: growing with sqrt(concurrency) keeps measurements about equally long."""
    return max(concurrency, round(settings.requests_per_concurrency * math.sqrt(concurrency)))


@dataclass(frozen=True)
class Bench:
    """Where units are kept, and what they all depend on.

    Attributes:
        base: target fingerprint, dataset digest and whatever else changes every number.
        drafter_digests: candidate's name -> digest of its files.
    """

    settings: EvaluateSettings
    prompts: dict[str, tuple[HeldOutPrompt, ...]]
    base: dict[str, Any]
    drafter_digests: dict[str, str]

    @property
    def directory(self) -> Path:
        """Folder of the finished units."""
        return self.settings.output / "cells"

    def key(self, variant: Variant, *extra: object) -> str:
        """Digest of everything a unit of this variant depends on."""
        candidate = variant.candidate
        drafter = None
        if candidate is not None:
            kind, k = candidate.speculation, variant.num_speculative_tokens
            drafter = [candidate.name, self.drafter_digests[candidate.name], kind, k]
            drafter += [variant.schedule] if variant.schedule else []
        return digest_of([self.base, drafter, list(extra)])

    def find(self, kind: type[UnitType], name: str, key: str) -> UnitType | None:
        """A unit that is finished and still fits the settings."""
        path = self.directory / f"{name}.json"
        if not path.exists():
            return None
        try:
            unit: UnitType = kind.load(path)
        except DataError:  # of an older version: measured again
            return None
        return unit if unit.key == key else None

    # --- speed -------------------------------------------------------------------------------------

    def speed(self, variant: Variant, task: SpeedTask) -> SpeedUnit | None:
        """The finished measurement, if there is one."""
        return self.find(SpeedUnit, self._speed_name(variant, task), self._speed_key(variant, task))

    def measure_speed(
        self, server: VllmServer, client: BenchmarkClient, variant: Variant, task: SpeedTask, is_warm: bool
    ) -> None:
        """Run `vllm bench serve` and save the cell.

        Args:
            is_warm: the server has answered before. What a first request pays for must not count.
        """
        settings = self.settings
        load = Load(
            prompts=tuple(prompt.text for prompt in self.prompts[task.domain]),
            num_warmups=0 if is_warm else 1,
            num_requests=num_requests(settings, task.concurrency),
            concurrency=task.concurrency,
            max_answer_tokens=settings.max_answer_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
        )
        name = self._speed_name(variant, task)
        result = client.measure(server, load, name)
        unit = SpeedUnit(key=self._speed_key(variant, task), cell=to_cell(result, variant, task))
        unit.save(self.directory / f"{name}.json")

    def _speed_name(self, variant: Variant, task: SpeedTask) -> str:
        return f"speed-{variant.label}-{task.domain}-c{task.concurrency}"

    def _speed_key(self, variant: Variant, task: SpeedTask) -> str:
        return self.key(
            variant, "speed", task.domain, task.concurrency, self.settings.requests_per_concurrency
        )

    # --- answers -----------------------------------------------------------------------------------

    def answers(self, variant: Variant, dtype: str) -> AnswersUnit | None:
        """The finished pass, if there is one."""
        return self.find(AnswersUnit, f"answers-{variant.label}-{dtype}", self._answers_key(variant, dtype))

    def measure_answers(
        self, server: VllmServer, variant: Variant, dtype: str, prompts: Sequence[HeldOutPrompt], greedy: bool
    ) -> None:
        """Ask every prompt once and save answers and acceptance."""
        settings = self.settings
        temperature = 0.0 if greedy else settings.temperature
        sampling = Sampling(settings.max_answer_tokens, temperature, settings.seed)
        answers = ask(server, prompts, sampling, concurrency=max(settings.concurrency))
        unit = AnswersUnit(key=self._answers_key(variant, dtype), answers=answers)
        unit.save(self.directory / f"answers-{variant.label}-{dtype}.json")

    def _answers_key(self, variant: Variant, dtype: str) -> str:
        settings = self.settings
        of_identity = settings.identity_prompts if dtype != served_name(settings) else None
        return self.key(variant, "answers", dtype, of_identity, max(settings.concurrency))


def served_name(settings: EvaluateSettings) -> str:
    """Name of the pass whose acceptance counts, in file names."""
    return settings.server.dtype


def identity_name(settings: EvaluateSettings, dtype: str) -> str:
    """Name of the pass that identity in this number format is read from: the served one when that is greedy."""
    return dtype if dtype != settings.server.dtype or settings.temperature == 0 else f"{dtype}-greedy"


def server_for(bench: Bench, variant: Variant, dtype: str, target: Path) -> VllmServer:
    """The variant's server in a number format."""
    settings: ServerSettings = bench.settings.server.model_copy(update={"dtype": dtype})
    log_path = bench.settings.output / "logs" / f"server-{variant.label}-{dtype}.log"
    return VllmServer(target, settings, log_path, extra_args=variant.server_arguments())


def to_cell(result: dict[str, Any], variant: Variant, task: SpeedTask) -> Cell:
    """A result of `vllm bench serve` as a cell; its acceptance is the difference of vLLM's own counters."""
    candidate = variant.candidate
    return Cell(
        speculation="none" if candidate is None else candidate.speculation,
        drafter=None if candidate is None else candidate.name,
        num_speculative_tokens=variant.num_speculative_tokens,
        concurrency=task.concurrency,
        domain=task.domain,
        num_requests=result["completed"],
        output_tokens=result["total_output_tokens"],
        acceptance_length=result.get("spec_decode_acceptance_length"),
        acceptance_rate_per_position=tuple(result.get("spec_decode_per_position_acceptance_rates") or ()),
        output_tokens_per_second=result["output_throughput"],
        ttft_ms=result["median_ttft_ms"],
        tpot_ms=result["median_tpot_ms"],
    )
