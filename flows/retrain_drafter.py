"""Conversations in; a measured, judged and registered drafter out.

    python flows/retrain_drafter.py       runs it once with its defaults, with or without a Prefect server
    prefect deploy --all                  makes it a deployment with a run form (prefect.yaml)

Killed at any moment, the next run continues: finished stages come from their kept records, the stage that
was interrupted resumes at its last shard, checkpoint or cell, and registration happens once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from drafter.gate import decide_release
from drafter.provenance import read_provenance
from drafter.records import DatasetRecord, DrafterRecord, EvaluationReport, ReleaseDecision, TrainingRecord
from tasks.find_drafters import RegisteredDrafter, find_by_fingerprint, find_champion, warm_start_of
from tasks.link_artifacts import link_release, link_validation
from tasks.logs import flow_logger, quiet_user_errors
from tasks.plan_stages import FIRST_ATTEMPT, RetrainPlan
from tasks.register_drafter import Candidate, register_drafter
from tasks.retrain_settings import RetrainSettings
from tasks.run_records import RetrainRecord, save_run
from tasks.settings import Places
from tasks.stages import (
    check_drafter,
    estimate_acceptance,
    evaluate_drafters,
    export_drafter,
    extract_states,
    is_complete,
    prepare_dataset,
    run_stage,
    train_drafter,
    write_report,
)
from tasks.track_runs import close_run, log_evaluation, log_training, log_validation, open_run
from tasks.validate_data import ValidationRecord, validate_data


@flow(
    name="retrain-drafter",
    description="Retrain a drafter on new conversations, measure it in vLLM, and register it if it is good enough.",
    validate_parameters=True,
)
def retrain_drafter(settings: RetrainSettings = RetrainSettings()) -> RetrainRecord:  # noqa: B008 - frozen
    """Retrain a drafter on new conversations, measure it in vLLM, and register it if it is good enough."""
    quiet_user_errors()
    started_at = datetime.now(UTC)
    plan = RetrainPlan(settings, Places(), attempt=flow_run.id if settings.force else FIRST_ATTEMPT)

    dataset = run_stage(prepare_dataset, plan.prepare())
    run_id = open_run(flow_run.id, flow_run.name, plan.fingerprint(dataset), settings)
    try:
        validation = validate(plan, dataset, run_id)
        champion = find_champion(plan.target_fingerprint)
        known = None if settings.force else find_by_fingerprint(plan.fingerprint(dataset))
        made = use(known) if known else train(plan, dataset, champion, run_id)
        evaluation, decision = measure(plan, dataset, made.drafter, champion)
        page = write_report(plan.report(evaluation, made.training, made.drafter))
        log_evaluation(run_id, evaluation, decision, page)
        registered = register_drafter(
            Candidate(
                drafter=made.drafter,
                fingerprint=plan.fingerprint(dataset),
                attempt=known.attempt if known else plan.attempt,
                run_id=run_id,
                evaluation=evaluation,
                decision=decision,
            )
        )
        link_release(evaluation, decision, page, registered)
    except BaseException:
        close_run(run_id, succeeded=False)
        raise
    close_run(run_id, succeeded=True)
    record = RetrainRecord(
        run_id=flow_run.id,
        run_name=flow_run.name,
        started_at=started_at,
        ended_at=datetime.now(UTC),
        fingerprint=plan.fingerprint(dataset),
        trained=known is None,
        decision=decision,
        registry_uri=registered.uri,
        mlflow_run_id=run_id,
        drafter=made.drafter.path,
        evaluation=evaluation.path,
        report=str(page),
        validation_page=validation.page,
    )
    save_run(plan.places, record)
    return record


@dataclass(frozen=True)
class Made:
    """A drafter, and its training where this run knows it."""

    drafter: DrafterRecord
    training: TrainingRecord | None


def validate(plan: RetrainPlan, dataset: DatasetRecord, run_id: str) -> ValidationRecord:
    """Let Great Expectations judge; publish its page, then stop if it says so."""
    validation = validate_data(
        dataset, plan.settings.validation, plan.window_tokens(), plan.validation_directory(dataset)
    )
    log_validation(run_id, validation)
    link_validation(validation)
    validation.raise_if_stopped()
    return validation


def use(known: RegisteredDrafter) -> Made:
    """Take the version that the same data, target and settings have made before."""
    flow_logger().info("%s was made from the same data, target and settings: not trained again", known.uri)
    training = read_provenance(Path(known.drafter.path)).training
    return Made(known.drafter, training if is_complete(Path(training.path)) else None)


def train(plan: RetrainPlan, dataset: DatasetRecord, champion: RegisteredDrafter | None, run_id: str) -> Made:
    """Let the target answer, train on its states, and export what vLLM loads."""
    states = run_stage(extract_states, plan.extract_both(dataset))
    held_out = run_stage(extract_states, plan.extract(dataset, "evaluation"))
    predecessor = warm_start_of(champion, plan.settings.drafter) if plan.settings.warm_start else None
    training = run_stage(train_drafter, plan.train(states, predecessor), plan.settings.training_job)
    drafter = run_stage(export_drafter, plan.export(training))
    check_drafter(plan.preflight(drafter))
    estimate = run_stage(estimate_acceptance, plan.estimate(drafter, held_out))
    log_training(run_id, training, estimate)
    return Made(drafter, training)


def measure(
    plan: RetrainPlan, dataset: DatasetRecord, drafter: DrafterRecord, champion: RegisteredDrafter | None
) -> tuple[EvaluationReport, ReleaseDecision]:
    """Measure beside the champion, if it is another drafter, and let the gate decide."""
    compares = plan.settings.compare_with_champion and champion is not None
    rival = champion.drafter if champion and compares and champion.drafter.digest != drafter.digest else None
    evaluation = run_stage(evaluate_drafters, plan.evaluate(dataset, drafter, rival))
    decision = decide_release(evaluation, "challenger", "champion" if rival else None, plan.settings.gate)
    decision.save(Path(evaluation.path) / "decision.json")
    return evaluation, decision


if __name__ == "__main__":
    retrain_drafter()
