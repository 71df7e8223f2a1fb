"""Prefect's server and a worker with two slots, a registry, and the deployments that ask for approval."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tasks.local_environment import environment_defaults
from tasks.local_services import Service
from tasks.settings import Places
from tests.flows.prefect_server import MAX_RETRIES, prefect_api
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
APPROVERS = "alice,bob"
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass
class ApprovalInstallation:
    """What a test needs to promote drafters for real, but for endpoints."""

    home: Path
    url: str
    environment: dict[str, str]
    worker: Service

    def __post_init__(self) -> None:
        self.api = prefect_api(self.url)

    def promote(self, version: str, **settings: Any) -> str:
        """Start promote-drafter from its deployment; return the flow run's id."""
        deployment = self.api.get("/deployments/name/promote-drafter/promote-drafter").json()
        values = {"version": version, **settings}
        created = self.api.post(
            f"/deployments/{deployment['id']}/create_flow_run", json={"parameters": {"settings": values}}
        )
        assert created.status_code == 201, created.text
        return str(created.json()["id"])

    def run(self, flow_run: str) -> dict[str, Any]:
        return dict(self.api.get(f"/flow_runs/{flow_run}").json())

    def wait_until(self, flow_run: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The state of a run once it is as wanted."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            state = dict(self.run(flow_run)["state"])
            if reached(state):
                return state
            assert state["type"] not in FINAL, state
            assert time.monotonic() < deadline, (state, self.last_lines())
            time.sleep(0.5)

    def wait_for_form(self, flow_run: str) -> str:
        """Wait until the form is open and its process gone; return the text above the form."""
        self.wait_until(flow_run, lambda state: state["name"] == "Suspended")
        deadline = time.monotonic() + PATIENCE_S
        while self.processes():
            assert time.monotonic() < deadline, "a process of the waiting run is left"
            time.sleep(0.2)
        return str(self.api.get(f"/flow_runs/{flow_run}/input/suspended-approval-description").json())

    def wait_for_end(self, flow_run: str) -> dict[str, Any]:
        return self.wait_until(flow_run, lambda state: state["type"] in FINAL)

    def answer(self, flow_run: str, **answer: str) -> dict[str, Any]:
        """Fill in the form as Prefect's page does; return what the server says."""
        filled = {"decision": "approve", "approver": "alice", "reason": "better on code", **answer}
        return dict(self.api.post(f"/flow_runs/{flow_run}/resume", json={"run_input": filled}).json())

    def states(self, flow_run: str) -> list[str]:
        """Names of the states that a run went through."""
        found = self.api.get("/flow_run_states/", params={"flow_run_id": flow_run}).json()
        return [state["name"] for state in sorted(found, key=lambda state: state["timestamp"])]

    def processes(self) -> list[psutil.Process]:
        """Processes of flow runs that the worker has started."""
        found = []
        assert self.worker.process is not None
        for process in psutil.Process(self.worker.process.pid).children(recursive=True):
            try:
                command = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if "worker start" not in command and "prefect" in command:
                found.append(process)
        return found

    def last_lines(self) -> str:
        return self.worker.log.read_text(errors="replace")[-3000:]


@contextmanager
def approval_installation(home: Path, port: int) -> Iterator[ApprovalInstallation]:
    """Start server and worker, register the two deployments, and end both with the block."""
    url = f"http://127.0.0.1:{port}"
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    environment = {
        **environment_defaults(Places(home=home)),
        **os.environ,
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_CLIENT_MAX_RETRIES": MAX_RETRIES,
        "PREFECT_SERVER_UI_API_URL": f"{url}/api",
        "FLEDGE_HOME": str(home),
        "FLEDGE_APPROVERS": APPROVERS,
        "PYTHONPATH": str(ROOT),
        "PWD": str(ROOT),  # where prefect.yaml says that flows run
    }
    prefect = [sys.executable, "-m", "prefect"]
    server = Service(
        "Prefect",
        [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        home / "logs/server.log",
        f"{url}/api/health",
    )
    worker_command = [*prefect, "worker", "start", "--pool", "fledge", "--limit", "1"]
    worker = Service("worker", worker_command, home / "logs/worker.log")
    try:
        server.start(environment)
        server.wait_until_ready(PATIENCE_S)
        for command in (
            ("work-pool", "create", "fledge", "--type", "process"),
            ("deploy", "-n", "promote-drafter", "-n", "expire-approval"),
        ):
            done = subprocess.run(
                [*prefect, "--no-prompt", *command],
                env=environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        worker.start(environment)
        yield ApprovalInstallation(home, url, environment, worker)
    finally:
        worker.stop()
        server.stop()


def kill(process: psutil.Process) -> None:
    """SIGKILL a process and everything that it has started."""
    for one in [*process.children(recursive=True), process]:
        if one.is_running():
            os.kill(one.pid, signal.SIGKILL)
