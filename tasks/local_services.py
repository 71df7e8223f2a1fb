"""Prefect's server and worker, MLflow's pages and a page server, on this machine's loopback, for `fledge up`.

For development: no authentication, one user. They end when the process that started them ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from drafter import process_guard
from drafter.errors import ServerError
from tasks.settings import Places

HOST = "127.0.0.1"
DEPLOYMENTS = Path("prefect.yaml")
# Loopback requests must not take a detour through a proxy that the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Ports:
    """Where each service listens."""

    prefect: int
    mlflow: int
    pages: int


@dataclass
class Service:
    """A process that is kept running.

    Args:
        name: what it is called in messages and by its log file.
        command: program and arguments.
        ready_url: answers 200 when the service is ready; None when nothing can be asked.
    """

    name: str
    command: list[str]
    log: Path
    ready_url: str | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, environment: dict[str, str]) -> None:
        """Start under a guard that ends it when this process is gone, killed or not."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-I", "-S", process_guard.__file__]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*guard, *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Let the guard end the service, and wait for it."""
        if self.process is None or self.process.stdin is None:
            return
        self.process.stdin.close()
        self.process.wait()

    def raise_if_ended(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-15:]
            raise ServerError(
                f"{self.name} ended with code {self.process.returncode}; its last lines:\n"
                + "\n".join(lines),
                "it to run until fledge up is stopped",
                f"read {self.log}, and fledge doctor",
            )

    def wait_until_ready(self, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.ready_url is not None:
            self.raise_if_ended()
            with contextlib.suppress(OSError, urllib.error.URLError), _DIRECT.open(self.ready_url, timeout=2):
                return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name} did not answer {self.ready_url} within {timeout_s:.0f} s",
                    "an answer",
                    f"read {self.log}",
                )
            time.sleep(0.3)


@contextlib.contextmanager
def running_services(places: Places, ports: Ports) -> Iterator[list[Service]]:
    """Start everything, register the deployments, and end everything with the block.

    Raises:
        ServerError: a port is taken, or a service did not start.
    """
    for port in (ports.prefect, ports.mlflow, ports.pages):
        _require_free(port)
    (places.home / "prefect").mkdir(parents=True, exist_ok=True)
    environment = service_environment(places, ports)
    services = _services(places, ports)
    try:
        *first, worker = services
        for service in first:
            service.start(environment)
        for service in first:
            service.wait_until_ready()
        _register_deployments(environment, places.home / "logs" / "deploy.log")
        worker.start(environment)
        yield services
    finally:
        for service in reversed(services):
            service.stop()


def set_environment_defaults(places: Places) -> None:
    """Apply `environment_defaults` to this process, before Prefect is imported: it reads them once."""
    (places.home / "prefect").mkdir(parents=True, exist_ok=True)  # Prefect would not make the folders above
    for name, value in environment_defaults(places).items():
        os.environ.setdefault(name, value)


def environment_defaults(places: Places) -> dict[str, str]:
    """What Prefect, MLflow and Great Expectations are told unless the environment says otherwise."""
    home = places.home.resolve()
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "prefect" / "storage"),
        # Without a server up, Prefect starts one for the run: 9 s when idle, more on a busy machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # A stop signal to the process group ends that server too; 5 retries, its default, wait over a minute.
        "PREFECT_CLIENT_MAX_RETRIES": "2",
        # A crash of the server must not leak a concurrency slot.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GX_ANALYTICS_ENABLED": "false",
    }


def service_environment(places: Places, ports: Ports) -> dict[str, str]:
    """What server, worker and the flows that it starts read."""
    prefect = f"http://{HOST}:{ports.prefect}/api"
    ours = {
        "PREFECT_API_URL": prefect,
        "PREFECT_SERVER_UI_API_URL": prefect,  # else a page on another port calls 4200
        "FLEDGE_HOME": str(places.home.resolve()),
        "FLEDGE_PAGES_URL": f"http://{HOST}:{ports.pages}",
        "FLEDGE_MLFLOW_UI_URL": f"http://{HOST}:{ports.mlflow}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    return {**environment_defaults(places), **os.environ, **ours}


def _services(places: Places, ports: Ports) -> list[Service]:
    logs = places.home.resolve() / "logs"
    prefect = [sys.executable, "-m", "prefect"]
    mlflow = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(ports.mlflow)]
    mlflow += ["--backend-store-uri", places.tracking_uri, "--workers", "1"]
    if places.artifact_location:
        mlflow += ["--default-artifact-root", places.artifact_location]
    pages = [sys.executable, "-m", "http.server", str(ports.pages), "--bind", HOST]
    pages += ["--directory", str(places.home.resolve())]
    return [
        Service(
            "Prefect",
            [*prefect, "server", "start", "--host", HOST, "--port", str(ports.prefect)],
            logs / "prefect-server.log",
            f"http://{HOST}:{ports.prefect}/api/health",
        ),
        Service("MLflow", mlflow, logs / "mlflow.log", f"http://{HOST}:{ports.mlflow}/health"),
        Service("pages", pages, logs / "pages.log", f"http://{HOST}:{ports.pages}/"),
        Service("worker", [*prefect, "worker", "start", "--pool", work_pool()], logs / "prefect-worker.log"),
    ]


def work_pool() -> str:
    """Name of the pool that the deployments of prefect.yaml run on."""
    deployments = yaml.safe_load(DEPLOYMENTS.read_text(encoding="utf-8"))["deployments"]
    return str(deployments[0]["work_pool"]["name"])


def _register_deployments(environment: dict[str, str], log: Path) -> None:
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    for command in (
        [*prefect, "work-pool", "create", work_pool(), "--type", "process", "--overwrite"],
        [*prefect, "deploy", "--all"],
    ):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
        )
        with open(log, "a", encoding="utf-8") as handle:
            handle.write(done.stdout + done.stderr)
        if done.returncode:
            raise ServerError(
                f"`{' '.join(command[2:])}` failed:\n" + (done.stdout + done.stderr).strip()[-1500:],
                f"the deployments of {DEPLOYMENTS} to be registered",
                f"correct {DEPLOYMENTS}; the whole output is in {log}",
            )


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise ServerError(
                f"port {port} on {HOST} is in use",
                "a free port",
                "stop what listens there, or choose another (fledge up --help)",
            ) from None
