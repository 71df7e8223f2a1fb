"""MLflow runs: parameters, metrics and pages of one flow run. Safe to repeat for the same flow run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from drafter import metrics
from drafter.records import AcceptanceEstimate, EvaluationReport, ReleaseDecision, TrainingRecord
from tasks.retrain_settings import RetrainSettings
from tasks.settings import Places
from tasks.validate_data import ValidationRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_TAG = "fledge.flow_run_id"
MAX_METRICS_PER_BATCH = 1000  # MLflow's limit
MAX_PARAMS_PER_BATCH = 100
MAX_PARAM_LENGTH = 6000


def connect(places: Places) -> MlflowClient:
    """A client of the installation's MLflow.

    The process-wide address is set too: the SQLite registry looks models up through it.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow  # here, because it takes 7 s that no other task should pay

    places.home.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(places.tracking_uri)
    mlflow.set_registry_uri(places.tracking_uri)
    return mlflow.MlflowClient(tracking_uri=places.tracking_uri, registry_uri=places.tracking_uri)


def experiment_id(client: MlflowClient, places: Places) -> str:
    """Id of the experiment, made if it is missing."""
    found = client.get_experiment_by_name(places.mlflow_experiment)
    if found is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(places.mlflow_experiment, artifact_location=places.artifact_location))


@task(name="open-mlflow-run", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5, timeout_seconds=300)
def open_run(flow_run_id: str, name: str, fingerprint: str, settings: RetrainSettings) -> str:
    """The MLflow run of this flow run: found if it was opened before, else new. Returns its id."""
    places = Places()
    client = connect(places)
    experiment = experiment_id(client, places)
    found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{flow_run_id}'", max_results=1)
    if found:
        client.update_run(found[0].info.run_id, status="RUNNING")
        return str(found[0].info.run_id)
    tags = {RUN_TAG: flow_run_id, "fledge.fingerprint": fingerprint}
    run_id = client.create_run(experiment, tags=tags, run_name=name).info.run_id
    _log_params(client, run_id, dict(_flat(settings.model_dump(mode="json"))))
    return str(run_id)


@task(name="log-validation", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5, timeout_seconds=300)
def log_validation(run_id: str, validation: ValidationRecord) -> None:
    """The page of Great Expectations, and its outcome as a tag."""
    client = connect(Places())
    client.set_tag(run_id, "fledge.validation", validation.outcome)
    client.log_artifact(run_id, validation.page, "validation")
    client.log_artifact(run_id, str(Path(validation.path) / "validation.json"), "validation")


@task(name="log-training", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5, timeout_seconds=1800)
def log_training(run_id: str, training: TrainingRecord, estimate: AcceptanceEstimate) -> None:
    """Each step's metrics, and the figures of the whole training."""
    client = connect(Places())
    values: dict[str, float] = {
        "training.elapsed_s": training.elapsed_s,
        "training.tokens_per_s": training.tokens_per_s,
        "training.peak_memory_gb": training.peak_memory_gb,
        "estimate.acceptance_length": estimate.acceptance_length,
    }
    started_ms = int(client.get_run(run_id).info.start_time)
    steps = metrics.read_metrics(Path(training.path) / metrics.FILE_NAME)
    _log_metrics(client, run_id, values, started_ms, steps)


@task(name="log-evaluation", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5, timeout_seconds=600)
def log_evaluation(run_id: str, report: EvaluationReport, decision: ReleaseDecision, page: Path) -> None:
    """What was measured and decided, with the report's page."""
    client = connect(Places())
    started_ms = int(client.get_run(run_id).info.start_time)
    _log_metrics(client, run_id, dict(evaluation_metrics(report)), started_ms, iter(()))
    client.set_tag(run_id, "fledge.decision", decision.outcome)
    client.log_artifact(run_id, str(page), "report")
    client.log_artifact(run_id, str(Path(report.path) / "evaluation.json"), "report")


def close_run(run_id: str, succeeded: bool) -> None:
    """Mark the run as ended."""
    connect(Places()).set_terminated(run_id, "FINISHED" if succeeded else "FAILED")


def evaluation_metrics(report: EvaluationReport) -> Iterator[tuple[str, float]]:
    """Acceptance and speed of every cell under a name that says which, e.g. `challenger.k3.c1.code.otps`."""
    for cell in report.cells:
        who = cell.drafter or "no_speculation"
        name = f"{who}.k{cell.num_speculative_tokens}.c{cell.concurrency}.{cell.domain}"
        yield f"{name}.output_tokens_per_second", cell.output_tokens_per_second
        if cell.acceptance_length is not None:
            yield f"{name}.acceptance_length", cell.acceptance_length
    for candidate, shares in report.greedy_identical_share.items():
        for dtype, share in shares.items():
            yield f"{candidate}.greedy_identical_share.{dtype}", share


def _log_metrics(
    client: MlflowClient,
    run_id: str,
    values: Mapping[str, float],
    started_ms: int,
    steps: Iterator[metrics.StepMetrics],
) -> None:
    """Log in batches. Times are derived from the run's start, so that a repetition adds nothing."""
    from mlflow.entities import Metric

    rows = [Metric(name, value, started_ms, 0) for name, value in values.items()]
    for step in steps:
        at_ms = started_ms + int(step.elapsed_s * 1000)
        rows += [Metric(name, value, at_ms, step.step) for name, value in _step_values(step)]
    for start in range(0, len(rows), MAX_METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=rows[start : start + MAX_METRICS_PER_BATCH])


def _step_values(step: metrics.StepMetrics) -> Iterator[tuple[str, float]]:
    for name in ("epoch", "loss", "gradient_norm", "learning_rate", "tokens_per_s", "memory_gb"):
        yield f"training.{name}", getattr(step, name)
    for depth, accuracy in enumerate(step.accuracy):
        yield f"training.accuracy_depth_{depth}", accuracy


def _log_params(client: MlflowClient, run_id: str, values: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    rows = [Param(name, value[:MAX_PARAM_LENGTH]) for name, value in values.items()]
    for start in range(0, len(rows), MAX_PARAMS_PER_BATCH):
        client.log_batch(run_id, params=rows[start : start + MAX_PARAMS_PER_BATCH])


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """`{"a": {"b": 1}}` as `("a.b", "1")`."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, str(value)
