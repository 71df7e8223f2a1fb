"""Running the flow in processes of its own, and killing them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tasks.local_environment import Ports
from tasks.run_records import RetrainRecord, load_run
from tasks.settings import Places
from tests.flows.prefect_server import prefect_api
from tests.waiting import PATIENCE_S, wait_until

RUN = """
import sys
from pathlib import Path
from flows.retrain_drafter import retrain_drafter
from tasks.retrain_settings import RetrainSettings
retrain_drafter(RetrainSettings.model_validate_json(Path(sys.argv[1]).read_text()))
"""


@dataclass(frozen=True)
class Installation:
    """A home with its services, and the values of a tiny run."""

    places: Places
    ports: Ports
    environment: dict[str, str]
    settings: dict[str, Any]

    @property
    def stages(self) -> Path:
        return self.places.stages

    def start_flow(self, **environment: str) -> subprocess.Popen[bytes]:
        """Start the flow; its log is home/flow.log."""
        settings = self.places.home / "settings.json"
        settings.write_text(json.dumps(self.settings))
        with open(self.places.home / "flow.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", RUN, str(settings)],
                env={**self.environment, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run_flow(self, **environment: str) -> RetrainRecord:
        """Run the flow to its end."""
        flow = self.start_flow(**environment)
        assert flow.wait(PATIENCE_S) == 0, self.last_lines()
        return load_run(self.places)

    def last_flow_run(self) -> dict[str, Any]:
        """What Prefect's server knows of the newest flow run."""
        with prefect_api(f"http://127.0.0.1:{self.ports.prefect}") as client:
            runs = client.post("/flow_runs/filter", json={"sort": "START_TIME_DESC", "limit": 1}).json()
        return dict(runs[0])

    def last_lines(self) -> str:
        return (self.places.home / "flow.log").read_text(errors="replace")[-4000:]


@dataclass(frozen=True)
class Kill:
    """What stood on disk when the flow was killed."""

    survivors: list[str]
    files: dict[Path, tuple[int, bytes]]


@dataclass(frozen=True)
class Kills:
    """Three kills and the run that finished."""

    extraction: Kill
    training: Kill
    evaluation: Kill
    record: RetrainRecord


def kill_in_every_stage(installation: Installation) -> Kills:
    """SIGKILL the flow in the middle of three stages, run after run, then let one finish."""
    stages = installation.stages
    return Kills(
        extraction=_kill_when(installation, lambda: sorted(stages.glob("states-train-*/shard-*.json"))),
        training=_kill_when(
            installation, lambda: _half_trained(stages), lambda: _newest_training_files(stages)
        ),
        evaluation=_kill_when(installation, lambda: sorted(stages.glob("evaluation-*/cells/*.json"))),
        record=installation.run_flow(),
    )


def _half_trained(stages: Path) -> list[Path]:
    """Metrics of a training that has a checkpoint and steps beyond it."""
    for checkpoint in stages.glob("training-*/checkpoint-*"):
        metrics = checkpoint.parent / "metrics.jsonl"
        step = int(checkpoint.name.removeprefix("checkpoint-"))
        if metrics.exists() and len(metrics.read_text().splitlines()) > step:
            return [metrics, *checkpoint.glob("*")]
    return []


def _newest_training_files(stages: Path) -> list[Path]:
    """Metrics and newest checkpoint: a training that is still alive replaces its checkpoint every second."""
    checkpoints = stages.glob("training-*/checkpoint-*")
    newest = max(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")))
    return [newest.parent / "metrics.jsonl", *newest.glob("*")]


def _kill_when(
    installation: Installation,
    reached: Callable[[], list[Path]],
    standing: Callable[[], list[Path]] | None = None,
) -> Kill:
    """SIGKILL the flow as soon as files are there that say how far it is.

    What stands after that is kept: those files, or what `standing` finds.
    """
    flow = installation.start_flow()
    wait_until(reached, flow, told=installation.last_lines)
    paths = reached()
    descendants = psutil.Process(flow.pid).children(recursive=True)
    flow.kill()
    flow.wait()
    _, alive = psutil.wait_procs(descendants, timeout=60)
    if standing is not None:
        paths = standing()
    return Kill(
        survivors=[" ".join(process.cmdline()) for process in alive if process.is_running()],
        files={
            path: (path.stat().st_mtime_ns, path.read_bytes())
            for path in [*paths, *_partners(paths)]
            if path.exists()
        },
    )


def _partners(paths: list[Path]) -> list[Path]:
    """The shard files beside their records."""
    return [shard for path in paths for shard in path.parent.glob(f"{path.stem}-*.safetensors")]
