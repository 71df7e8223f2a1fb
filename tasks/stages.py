"""Stages as Prefect tasks. Their records are kept across runs, so a crash resumes at the last finished one.

Within a stage the verb itself resumes: at the next shard, checkpoint or cell.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE, CacheKeyFnPolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext

from drafter.config import (
    EstimateSettings,
    EvaluateSettings,
    ExportSettings,
    ExtractSettings,
    PreflightSettings,
    PrepareSettings,
    ReportSettings,
    TrainSettings,
)
from drafter.errors import CheckpointError, DataError
from drafter.records import (
    AcceptanceEstimate,
    DatasetRecord,
    DrafterRecord,
    EvaluationReport,
    StatesRecord,
    TrainingRecord,
)
from tasks.jobs import JobCrashed, run_verb, run_verb_json
from tasks.training_jobs import train_on_sagemaker
from tasks.training_request import TrainingJobSettings

STATES_MANIFEST = "manifest.json"


def _output_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """The output directory is named by the digest of all that changes its content."""
    output = Path(parameters["settings"].output).resolve()
    return f"fledge-{context.task.name}-{str(output).replace('/', '.')}"


def _crashed(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """A crash may pass when run again; a named problem will not."""
    return isinstance(state.result(raise_on_failure=False), JobCrashed)


_KEPT: dict[str, Any] = {
    "cache_policy": CacheKeyFnPolicy(cache_key_fn=_output_key),
    "persist_result": True,
    "result_serializer": "json",
}
_REPEATED: dict[str, Any] = {"retries": 1, "retry_delay_seconds": 5, "retry_condition_fn": _crashed}


def run_stage(stage: Task[Any, Any], settings: Any, *choices: Any) -> Any:
    """Call a stage; a kept record counts only while the files that it describes are there."""
    return stage.with_options(refresh_cache=not is_complete(settings.output))(settings, *choices)


def is_complete(output: Path) -> bool:
    """Whether a stage's directory has the record that is written last, and the files that it names."""
    if output.suffix == ".json":
        return output.is_file()
    kind = output.name.partition("-")[0]
    if kind == "states":
        return _has_all_shards(output)
    return all((output / name).is_file() for name in _FILES[kind])


_FILES = {
    "dataset": ("train.jsonl", "evaluation.jsonl", "profile.parquet", "dataset.json"),
    "training": ("weights.safetensors", "drafter.json", "settings.json", "training.json"),
    "drafter": ("config.json", "model.safetensors", "provenance.json"),
    "evaluation": ("evaluation.json",),
}


def _has_all_shards(output: Path) -> bool:
    try:
        manifest: StatesRecord = StatesRecord.load(output / STATES_MANIFEST)
    except DataError:
        return False
    return all(
        (output / shard.file).is_file() and (output / shard.file).stat().st_size == shard.num_bytes
        for shard in manifest.shards
    )


@task(name="prepare", timeout_seconds=timedelta(hours=2).total_seconds(), **_KEPT)
def prepare_dataset(settings: PrepareSettings) -> DatasetRecord:
    """Read conversations, drop duplicates, hold prompts out."""
    return run_verb("prepare", settings, DatasetRecord)


@task(
    name="extract",
    task_run_name="extract-{settings.split}",
    timeout_seconds=timedelta(days=2).total_seconds(),
    **_KEPT,
    **_REPEATED,
)
def extract_states(settings: ExtractSettings) -> StatesRecord:
    """Let the target answer, and write its hidden states."""
    return run_verb("extract", settings, StatesRecord)


@task(name="train", timeout_seconds=timedelta(days=5).total_seconds(), **_KEPT, **_REPEATED)
def train_drafter(settings: TrainSettings, job: TrainingJobSettings | None = None) -> TrainingRecord:
    """Train on the states, here or as a SageMaker job; a killed training resumes from its last checkpoint."""
    if job is not None:
        return train_on_sagemaker(settings, job)
    return run_verb("train", settings, TrainingRecord)


@task(name="export", timeout_seconds=timedelta(hours=1).total_seconds(), **_KEPT)
def export_drafter(settings: ExportSettings) -> DrafterRecord:
    """Write the directory that vLLM loads."""
    return run_verb("export", settings, DrafterRecord)


@task(name="estimate", timeout_seconds=timedelta(hours=6).total_seconds(), **_KEPT)
def estimate_acceptance(settings: EstimateSettings) -> AcceptanceEstimate:
    """Predict the acceptance length from held-out states."""
    return run_verb("estimate", settings, AcceptanceEstimate)


@task(name="preflight", cache_policy=NO_CACHE, timeout_seconds=timedelta(minutes=10).total_seconds())
def check_drafter(settings: PreflightSettings) -> None:
    """Name what is wrong with a drafter before a server is started with it.

    Raises:
        CheckpointError: it does not fit the target.
    """
    problems = run_verb_json("preflight", settings)
    if problems:
        raise CheckpointError(
            f"drafter {settings.drafter}: " + "; ".join(problems),
            f"a drafter that vLLM can run with the target {settings.target}",
            "delete the drafter's directory and run again, or train anew with --force",
        )


@task(name="evaluate", timeout_seconds=timedelta(hours=12).total_seconds(), **_KEPT, **_REPEATED)
def evaluate_drafters(settings: EvaluateSettings) -> EvaluationReport:
    """Measure inside vLLM, against serving without a drafter."""
    return run_verb("evaluate", settings, EvaluationReport)


@task(name="report", cache_policy=NO_CACHE, timeout_seconds=timedelta(minutes=10).total_seconds())
def write_report(settings: ReportSettings) -> Path:
    """Write the HTML page of what was measured and decided."""
    return Path(run_verb_json("report", settings))
