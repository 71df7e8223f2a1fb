"""How a deployment speculates: K, and K by batch size where that is to be. Chosen here and nowhere else. Pure."""

from __future__ import annotations

import re

from pydantic import Field

from drafter.records import BatchSizeSchedule, Record, ServingAdvice
from drafter.serving_advice import advise_for, schedule_problem
from tasks.catalogue import CatalogueEntry
from tasks.endpoint_settings import DeploySettings, EndpointError
from tasks.version_record import VersionRecord

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Speculation(Record):
    """What the server is told of its drafter."""

    num_speculative_tokens: int
    schedule: BatchSizeSchedule = Field(default=(), description="K by batch size; empty: always K.")
    advice: str | None = Field(
        description="What the version's evaluation advises; None: nothing was measured."
    )
    note: str | None = Field(default=None, description="Why the advised schedule is left out.")


def choose_speculation(
    settings: DeploySettings, version: VersionRecord | None, entry: CatalogueEntry
) -> Speculation:
    """The settings' K and schedule, else what the version's evaluation advises, else the catalogue's K alone.

    Args:
        version: None: a target without a drafter of ours.

    Raises:
        EndpointError: a schedule that vLLM would refuse, or serve wrong, with this K.
    """
    advice = _advice(settings, version)
    k = settings.chosen_num_speculative_tokens
    if k is None:
        advised = advice and advice.num_speculative_tokens
        k = advised or (version and version.num_speculative_tokens) or entry.num_speculative_tokens
    schedule, note = settings.num_speculative_tokens_per_batch_size, None
    if schedule is None:
        schedule, note = _advised_schedule(settings, advice, entry, k)
    problem = schedule_problem(schedule, k)
    if problem is not None:
        raise EndpointError(
            f"num_speculative_tokens_per_batch_size is {[list(one) for one in schedule]}: {problem}",
            f"ranges of batch sizes from 1 up, each with K={k} or 0, such as [[1, 4, {k}], [5, 16, 0]]",
            "correct it, give [] for no schedule, or leave it out to take what the evaluation measured as better",
        )
    return Speculation(
        num_speculative_tokens=k, schedule=schedule, advice=advice and advice.sentence, note=note
    )


def _advice(settings: DeploySettings, version: VersionRecord | None) -> ServingAdvice | None:
    """The version's advice, for the load that the settings expect."""
    advice = None if version is None else version.advice
    expected = settings.expected_concurrency
    return advice if advice is None or expected is None else advise_for(advice, expected)


def _advised_schedule(
    settings: DeploySettings, advice: ServingAdvice | None, entry: CatalogueEntry, k: int
) -> tuple[BatchSizeSchedule, str | None]:
    """The advice's schedule, if it is one of this K and the image's vLLM is known to be as new as that which measured."""
    if advice is None or not advice.schedule:
        return (), None
    if k != advice.num_speculative_tokens:
        return (
            (),
            f"the schedule by batch size is left out: it was measured with K={advice.num_speculative_tokens}",
        )
    # An older vLLM may not know the setting, and would not start.
    serves, measured = (
        _vllm_of(settings.image or entry.image or entry.vllm_version),
        _vllm_of(advice.vllm_version),
    )
    if serves is None or measured is None or serves < measured:
        known = "unknown" if serves is None else ".".join(map(str, serves))
        return (), (
            f"the schedule by batch size is left out: it was measured with vLLM {advice.vllm_version or 'unknown'}, "
            f"the image's is {known}"
        )
    return advice.schedule, None


def _vllm_of(text: str | None) -> tuple[int, ...] | None:
    """The version in an image's tag, or in a version's text; None: it names none."""
    found = _VERSION.search((text or "").rpartition("/")[2])
    return tuple(map(int, found.groups())) if found else None
