"""A measured drafter into MLflow's registry, exactly once, wherever a run before was killed.

Each step looks for what it would make: the logged model and the version by fingerprint and attempt.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from drafter.records import DrafterRecord, EvaluationReport, Record, ReleaseDecision
from drafter.serving_advice import ratio_to_plain
from tasks.find_drafters import (
    ADVICE_TAG,
    ATTEMPT_TAG,
    DIGEST_TAG,
    FINGERPRINT_TAG,
    TARGET_TAG,
    RegisteredDrafter,
    version_of_alias,
)
from tasks.logs import flow_logger
from tasks.settings import Places
from tasks.track_runs import connect, experiment_id

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

MAX_TAG_LENGTH = 4000


class Candidate(Record):
    """What is registered: the drafter, what it was made from, and what was found out about it."""

    drafter: DrafterRecord
    fingerprint: str
    attempt: str
    run_id: str
    evaluation: EvaluationReport
    decision: ReleaseDecision


@task(name="register", cache_policy=NO_CACHE, retries=3, retry_delay_seconds=5, timeout_seconds=1800)
def register_drafter(candidate: Candidate) -> RegisteredDrafter:
    """Register the drafter, or find it registered; alias it `challenger` only if it was approved."""
    places = Places()
    client = connect(places)
    with one_registration_at_a_time(places):
        model = _logged_model(client, places, candidate)
        version = _version(client, places, model, candidate)
        for name, value in _tags(candidate).items():
            client.set_model_version_tag(places.model_name, version.version, name, value)
        _set_alias(client, places, int(version.version), candidate.decision.approved)
    return RegisteredDrafter(
        name=places.model_name,
        version=str(version.version),
        fingerprint=candidate.fingerprint,
        attempt=candidate.attempt,
        drafter=candidate.drafter,
    )


def _logged_model(client: MlflowClient, places: Places, candidate: Candidate) -> LoggedModel:
    """The logged model with its files complete."""
    experiment = experiment_id(client, places)
    identity = {**_identity(candidate), DIGEST_TAG: candidate.drafter.digest}
    found = client.search_logged_models([experiment], _filter(identity))
    if found:
        model = found[0]
    else:
        model = client.create_logged_model(
            experiment,
            name="drafter",
            source_run_id=candidate.run_id,
            tags=identity,
            model_type="p-eagle",
        )
    if str(model.status) != "READY":
        client.log_model_artifacts(model.model_id, candidate.drafter.path)
        model = client.finalize_logged_model(model.model_id, "READY")
    return model


def _version(client: MlflowClient, places: Places, model: LoggedModel, candidate: Candidate) -> ModelVersion:
    """The registered version of a logged model."""
    _ensure_registered_model(client, places)
    identity = _identity(candidate)
    found = client.search_model_versions(f"name = '{places.model_name}' and {_filter(identity)}")
    if found:
        return max(found, key=lambda version: int(version.version))
    return client.create_model_version(
        places.model_name,
        source=f"models:/{model.model_id}",
        run_id=model.source_run_id,
        model_id=model.model_id,
        # The tags that make it findable come with the version itself, so it is never there without them.
        tags={
            **identity,
            DIGEST_TAG: candidate.drafter.digest,
            TARGET_TAG: candidate.evaluation.target_fingerprint,
        },
    )


def _ensure_registered_model(client: MlflowClient, places: Places) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(
            places.model_name, description="P-EAGLE drafters of one target, raised by Fledge."
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _set_alias(client: MlflowClient, places: Places, version: int, approved: bool) -> None:
    """Point `challenger` at an approved version; never back at an older one, never at the champion."""
    challenger = version_of_alias(client, places, "challenger")
    current = int(challenger.version) if challenger else 0
    if not approved:
        if current == version:
            client.delete_registered_model_alias(places.model_name, "challenger")
        return
    champion = version_of_alias(client, places, "champion")
    if champion is not None and int(champion.version) >= version:
        flow_logger().info("version %d is or precedes the champion; no challenger is named", version)
    elif current > version:
        flow_logger().info("version %d is newer than %d and stays challenger", current, version)
    else:
        client.set_registered_model_alias(places.model_name, "challenger", str(version))


def _identity(candidate: Candidate) -> dict[str, str]:
    return {FINGERPRINT_TAG: candidate.fingerprint, ATTEMPT_TAG: candidate.attempt}


def _filter(tags: dict[str, str]) -> str:
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def _tags(candidate: Candidate) -> dict[str, str]:
    """What a person or a deployment reads off a version."""
    evaluation, decision = candidate.evaluation, candidate.decision
    tags: dict[str, Any] = {
        "fledge.dataset_digest": evaluation.dataset_digest,
        "fledge.evaluation_digest": evaluation.digest,
        "fledge.decision": decision.outcome,
        "fledge.reasons": "\n".join(decision.reasons),
        "fledge.num_speculative_tokens": decision.num_speculative_tokens or "",
    }
    tags["fledge.train_domains"] = ",".join(evaluation.train_domains)
    tags["fledge.report"] = Path(evaluation.path).resolve() / "report.html"
    tags |= _measured_acceptance(evaluation) | _measured_speed(evaluation)
    short = {name: str(value)[:MAX_TAG_LENGTH] for name, value in tags.items()}
    # Whole: cut off, it could not be read back.
    return short | ({ADVICE_TAG: decision.advice.model_dump_json()} if decision.advice else {})


# How a figure's tag begins, by the drafter it is of: the version itself, and the champion beside it.
_PREFIXES = {"challenger": "fledge.", "champion": "fledge.champion_"}


def _measured_acceptance(evaluation: EvaluationReport) -> dict[str, str]:
    return {
        f"{_PREFIXES[one.drafter]}acceptance_length.k{one.num_speculative_tokens}.{one.domain}": (
            f"{one.acceptance_length:.3f} [{one.lower:.3f}, {one.upper:.3f}]"
        )
        for one in evaluation.acceptance
        if one.drafter in _PREFIXES and one.length_bucket == "all"
    }


def _measured_speed(evaluation: EvaluationReport) -> dict[str, str]:
    """Output tokens/s of every cell, with the figure of the same requests without a drafter."""
    tags = {}
    for cell in evaluation.cells:
        if cell.drafter not in _PREFIXES or cell.speculation != "peagle":
            continue
        where = f"k{cell.num_speculative_tokens}.c{cell.concurrency}.{cell.domain}"
        ratio = ratio_to_plain(evaluation, cell)
        speed = cell.output_tokens_per_second
        plain = f" (no speculation {speed / ratio:.1f})" if ratio else ""
        tags[f"{_PREFIXES[cell.drafter]}output_tokens_per_second.{where}"] = f"{speed:.1f}{plain}"
    return tags


@contextmanager
def one_registration_at_a_time(places: Places) -> Iterator[None]:
    """Runs of one home register after each other; the look-ups then see what the other has made."""
    places.home.mkdir(parents=True, exist_ok=True)
    with open(Path(places.home) / "registry.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
