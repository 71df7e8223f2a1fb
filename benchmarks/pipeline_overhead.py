"""What Prefect, MLflow and Great Expectations add to the work itself, read off a finished run of `retrain-drafter`.

    make demo
    python -m benchmarks.pipeline_overhead

Prefect keeps when each task began and ended. The work is what `python -m drafter VERB` does, which a person
could run without any of the three, the start of its processes included. The rest is theirs: MLflow's and Great
Expectations' the tasks that call them, with what it takes to import them; Prefect's what lies between tasks.
Start-up, before the flow run begins (importing Prefect, a server of its own where none is up), is not in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drafter.command_line import Verb, run_verbs
from drafter.config import Settings
from drafter.errors import DataError
from drafter.machine import describe_machine
from drafter.records import Record

if TYPE_CHECKING:
    from prefect.client.schemas.objects import TaskRun

WORK, MLFLOW, EXPECTATIONS, PREFECT = "the work itself", "MLflow", "Great Expectations", "Prefect"
# Whose time a task's is, by the module that defines it.
OWNERS = {
    "tasks.stages": WORK,
    "tasks.track_runs": MLFLOW,
    "tasks.find_drafters": MLFLOW,
    "tasks.register_drafter": MLFLOW,
    "tasks.validate_data": EXPECTATIONS,
}


class PipelineOverheadSettings(Settings):
    """Which run to look at."""

    run: str | None = Field(
        default=None,
        description="Finished run of this FLEDGE_HOME, by id, name or registered version; None: the last that trained.",
    )
    quick: bool = Field(
        default=False,
        description="Make a small run of its own, some minutes, in place of the demo's. The three cost as many "
        "seconds there as in a long run, so their share says little.",
    )
    output: Path = Field(
        default=Path(".fledge/benchmarks/pipeline_overhead"), description="Directory of the result."
    )


class Part(Record):
    """Time of a run that is one tool's."""

    name: str
    seconds: float
    share: float = Field(description="Of the run's wall time.")


class PipelineOverhead(Record):
    """A run's wall time, divided."""

    run_id: str
    wall_s: float = Field(description="From the flow run's begin to the end of its last task.")
    parts: tuple[Part, ...] = Field(description="They add up to the wall time.")
    overhead_share: float = Field(description="Of all but the work itself.")
    machine: str
    versions: dict[str, str]


def pipeline_overhead(settings: PipelineOverheadSettings) -> PipelineOverhead:
    """Divide a run's time.

    Raises:
        DataError: no such run, one that Prefect does not know, or one that trained nothing: without work there
            is no share of it.
    """
    from tasks.find_runs import find_run, list_runs, read_task_runs
    from tasks.local_environment import set_environment_defaults
    from tasks.settings import Places

    if settings.quick:
        _make_quick_run(settings.output / "quick")
    places = Places()
    set_environment_defaults(places)
    chosen = settings.run or next((run.run_id for run in list_runs(places) if run.trained), None)
    record = find_run(places, chosen).record
    if not record.trained:
        raise DataError(
            f"run {record.run_name} in {places.runs}: it found a finished drafter and trained nothing",
            "a run that did all of its work",
            "name another one (`fledge runs`), or make one: make demo in a fresh FLEDGE_HOME",
        )
    tasks = read_task_runs(record.run_id)
    if not tasks:
        raise DataError(
            f"run {record.run_name}: this Prefect knows none of its tasks",
            "the Prefect that the run was made with",
            "set PREFECT_API_URL or FLEDGE_HOME as they were then",
        )
    parts = divide(record.started_at, tasks)
    wall_s = sum(parts.values())
    return PipelineOverhead(
        run_id=record.run_id,
        wall_s=wall_s,
        parts=tuple(Part(name=name, seconds=s, share=s / wall_s) for name, s in parts.items()),
        overhead_share=1 - parts[WORK] / wall_s,
        machine=describe_machine(),
        versions={name: version(name) for name in ("prefect", "mlflow", "great-expectations")},
    )


def divide(began_at: datetime, tasks: Iterable[TaskRun]) -> dict[str, float]:
    """Seconds of a flow run by owner. Tasks run one after the other; what lies between them is Prefect's.

    Example:
        begun at 0 s, `prepare` from 1 to 9 s, `register` from 10 to 12 s: 8 s work, 2 s MLflow, 2 s Prefect.
    """
    owners = _owners()
    seconds = dict.fromkeys((WORK, EXPECTATIONS, MLFLOW, PREFECT), 0.0)
    last_at = began_at
    for task in tasks:
        if task.start_time is None or task.end_time is None:
            raise DataError(f"task {task.name} has no end", "a finished run", "run the flow again to its end")
        seconds[PREFECT] += max((task.start_time - last_at).total_seconds(), 0.0)
        owner = owners.get(task.task_key.rpartition("-")[0], PREFECT)
        seconds[owner] += (task.end_time - max(task.start_time, last_at)).total_seconds()
        last_at = task.end_time
    return seconds


def _owners() -> dict[str, str]:
    """Function that a task calls -> whose time that is."""
    from importlib import import_module

    from prefect import Task

    return {
        task.fn.__qualname__: owner
        for module, owner in OWNERS.items()
        for task in vars(import_module(module)).values()
        if isinstance(task, Task)
    }


def _make_quick_run(home: Path) -> None:
    """The demo with a small part of its work, in a home of its own; begun anew each time."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    os.environ["FLEDGE_HOME"] = str(home / stamp)
    from examples.demo_conversations import write_conversations
    from examples.demo_settings import demo_settings
    from examples.smollm2 import ensure_target
    from tasks.local_environment import set_environment_defaults
    from tasks.settings import Places

    set_environment_defaults(Places())
    conversations = write_conversations(home / "conversations", {"python-stdlib": 60, "humaneval": 2})
    demo = demo_settings(ensure_target(), conversations)
    small = {
        "dataset": {"evaluation_share": 0.1},
        "training": {"time_budget_s": 20.0},
        "evaluation": {"concurrency": (1,), "prompts_per_domain": 2, "requests_per_concurrency": 2},
    }
    changes = {name: getattr(demo, name).model_copy(update=values) for name, values in small.items()}
    from flows.retrain_drafter import retrain_drafter

    retrain_drafter(demo.model_copy(update=changes))


def table(result: PipelineOverhead) -> RenderableType:
    """One row a part."""
    rows = Table("", "seconds", "share", title="a run of retrain-drafter", title_justify="left")
    for column in rows.columns[1:]:
        column.justify = "right"
    for part in result.parts:
        rows.add_row(part.name, f"{part.seconds:.1f}", f"{100 * part.share:.2f} %")
    rows.add_row("all", f"{result.wall_s:.1f}", "", style="bold")
    versions = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    return Group(
        rows,
        Text(f"Beside the work: {100 * result.overhead_share:.2f} %. {result.machine}; {versions}"),
    )


def show(result: PipelineOverhead) -> None:
    from drafter.terminal_report import make_console

    make_console().print(table(result))


def run(settings: PipelineOverheadSettings) -> PipelineOverhead:
    """As `pipeline_overhead`; the result is kept in `result.json`."""
    result = pipeline_overhead(settings)
    result.save(settings.output / "result.json")
    return result


VERB = Verb(
    "benchmarks.pipeline_overhead",
    PipelineOverheadSettings,
    run,
    "Tell what Prefect, MLflow and Great Expectations added to a run of retrain-drafter.",
    (
        "python -m benchmarks.pipeline_overhead",
        "python -m benchmarks.pipeline_overhead --run 1 --json",
        "python -m benchmarks.pipeline_overhead --quick",
    ),
    show=show,
)


def main() -> int:
    return run_verbs("python -m", "", (VERB,), [VERB.name, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
