"""`fledge VERB`: the pipeline for people who prefer a terminal to a browser.

Each verb imports what it needs when it runs: help and mistakes are answered at once.
"""

from __future__ import annotations

import sys
import time
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from drafter.command_line import Verb, run_verbs
from drafter.config import Settings
from flows.endpoint_commands import ENDPOINT_VERBS
from tasks.local_environment import Ports
from tasks.retrain_settings import RetrainSettings
from tasks.settings import Places

DESCRIPTION = """\
Keep P-EAGLE drafters fresh: new conversations in; a drafter out that was measured inside vLLM, judged by a
gate and registered in MLflow; once a person approves it, an endpoint runs it, on SageMaker or on this machine
(fledge up). What a run writes is below FLEDGE_HOME (.fledge), its registry included."""

Port = Annotated[int, Field(ge=1, le=65535)]


class ReportChoice(Settings):
    """Which run to show."""

    run: CliPositionalArg[str | None] = Field(
        default=None,
        description="MLflow run id, registered version, or directory of an evaluation; left out: the last run.",
    )


class RunsChoice(Settings):
    """Which runs to list."""

    limit: int = Field(default=20, ge=1, description="At most so many, newest first.")


class UpSettings(Settings):
    """Where the local services listen, on 127.0.0.1."""

    prefect_port: Port = Field(default=4200, description="Port of Prefect's server and pages.")
    mlflow_port: Port = Field(default=5000, description="Port of MLflow's pages.")
    pages_port: Port = Field(default=4280, description="Port under which reports are shown.")
    sagemaker_port: Port = Field(default=4281, description="Port of SageMaker on this machine.")
    aws_port: Port = Field(default=4282, description="Port of S3, CloudWatch and the like (moto's server).")

    def ports(self) -> Ports:
        """As the services take them."""
        return Ports(
            prefect=self.prefect_port,
            mlflow=self.mlflow_port,
            pages=self.pages_port,
            aws=self.aws_port,
            sagemaker=self.sagemaker_port,
        )


class DoctorSettings(Settings):
    """What to look at."""

    target: Path = Field(
        default_factory=lambda: RetrainSettings().target, description="Directory of the target model."
    )


def run_retrain(settings: RetrainSettings) -> Any:
    """Run the flow here; Prefect's and MLflow's files go below FLEDGE_HOME, beside the run's own."""
    from tasks.local_environment import set_environment_defaults, use_services

    set_environment_defaults(use_services(say=False))
    from flows.retrain_drafter import retrain_drafter
    from tasks.find_runs import find_run

    return find_run(Places(), retrain_drafter(settings).run_id)


def run_report(choice: ReportChoice) -> Any:
    from tasks.find_runs import find_run

    return find_run(Places(), choice.run)


def plain_report(run: Any) -> Any:
    from drafter.provenance import read_provenance
    from drafter.report import report_as_json

    provenance = read_provenance(Path(run.record.drafter)).model_dump(mode="json")
    return report_as_json(run.evaluation, run.record.decision, run.record.registry_uri, provenance)


def run_runs(choice: RunsChoice) -> Any:
    from tasks.find_runs import list_runs

    return list_runs(Places())[: choice.limit]


def show_run(run: Any) -> None:
    """Tables, decision, and where things are."""
    from drafter.terminal_report import decision_text, evaluation_tables, make_console

    console = make_console()
    for part in (evaluation_tables(run.evaluation), "", decision_text(run.record.decision), ""):
        console.print(part)
    console.print(f"registry   {run.record.registry_uri}", highlight=False, soft_wrap=True)
    console.print(f"drafter    {run.record.drafter}", highlight=False, soft_wrap=True)
    console.print(f"report     {run.record.report}", highlight=False, soft_wrap=True)
    console.print(f"data       {run.record.validation_page}", highlight=False, soft_wrap=True)


def show_runs(records: Any) -> None:
    from rich.table import Table

    from drafter.terminal_report import make_console

    table = Table("run", "ended", "decision", "registered", "trained", "MLflow run")
    for record in records:
        ended = record.ended_at.astimezone().strftime("%Y-%m-%d %H:%M")
        trained = "yes" if record.trained else "found"
        columns = (record.run_name, ended, record.decision.outcome, record.registry_uri, trained)
        table.add_row(*columns, record.mlflow_run_id)
    make_console().print(table if records else "no run has finished here yet; start one with fledge retrain")


def run_up(settings: UpSettings) -> None:
    from tasks.local_environment import has_local_cloud
    from tasks.local_services import running_services

    places, ports = Places(), settings.ports()
    print("starting Prefect, MLflow, a worker, and SageMaker on this machine ...", file=sys.stderr)
    try:
        with running_services(places, ports) as services:
            print(f"run form, runs, schedule   http://127.0.0.1:{ports.prefect}")
            print(f"registry and metrics       http://127.0.0.1:{ports.mlflow}")
            print(f"reports                    http://127.0.0.1:{ports.pages}")
            if has_local_cloud(places):
                print(f"endpoints                  fledge status, fledge chat (port {ports.sagemaker})")
            print("Ctrl-C ends all of them, endpoints too; those come back at the next start.", flush=True)
            while True:
                time.sleep(1)
                for service in services:
                    service.keep_running()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)


def run_doctor(settings: DoctorSettings) -> Any:
    from tasks.check_machine import check_machine

    return check_machine(Places(), settings.target, astuple(UpSettings().ports()))


def exit_code_of_doctor(checks: Any) -> int:
    return 1 if any(check.remedy for check in checks) else 0


VERBS = (
    Verb(
        "retrain",
        RetrainSettings,
        run_retrain,
        "Turn conversations into a measured, judged and registered drafter.\n\n"
        "Runs the Prefect flow retrain-drafter here, with or without a Prefect server up. Stopped or killed,\n"
        "it continues when run again with the same flags; the same data, target and settings are not trained\n"
        "twice (--force does). A drafter that the gate rejects is a run that worked: exit code 0, with the\n"
        "reasons; it is registered without the alias `challenger`.",
        (
            'fledge retrain --sources \'{"uri": "chats.jsonl", "domain": "support"}\' --target models/my-model',
            "fledge retrain --settings retrain.json --training.time-budget-s 900 --force",
        ),
        show=show_run,
        as_plain=plain_report,
    ),
    Verb(
        "report",
        ReportChoice,
        run_report,
        "Show what a run measured and decided.\n\n"
        "With --json, for scripts: decision, serving_advice (expected_concurrency, num_speculative_tokens,\n"
        "speculate_up_to_concurrency, schedule, sentence, what was measured), registry_uri, cells,\n"
        "greedy_identical_share and provenance.",
        ("fledge report", "fledge report 3 --json"),
        show=show_run,
        as_plain=plain_report,
    ),
    Verb(
        "runs",
        RunsChoice,
        run_runs,
        "List the runs that finished, newest first.",
        ("fledge runs --limit 5",),
        show=show_runs,
    ),
    *ENDPOINT_VERBS,
    Verb(
        "up",
        UpSettings,
        run_up,
        "Start Prefect, MLflow, a worker, and SageMaker on this machine, until Ctrl-C.\n\n"
        "Registers the deployments of prefect.yaml first, so the run form is there at once. Verbs in other\n"
        "terminals find it by FLEDGE_HOME and speak to it; with FLEDGE_CLOUD=aws, up leaves endpoints to AWS.\n"
        "For one machine and one user: no login, 127.0.0.1 only. Logs are in FLEDGE_HOME/logs.",
        (
            "fledge up",
            "fledge up --prefect-port 4300 --mlflow-port 5100 --pages-port 4380 --sagemaker-port 4381 "
            "--aws-port 4382",
        ),
    ),
    Verb(
        "doctor",
        DoctorSettings,
        run_doctor,
        "Say what this machine lacks, and what to do about it.\n\n"
        "Looks at both environments, versions, disk, memory, ports and the target. Exit code 1 if something\n"
        "needs doing.",
        ("fledge doctor", "fledge doctor --target models/my-model"),
    ),
)


def main() -> int:
    return run_verbs("fledge", DESCRIPTION, VERBS, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
