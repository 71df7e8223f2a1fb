"""One installation for all tests of flows: a home, Prefect's server and worker, MLflow, and a tiny run in it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.local_environment import Ports, service_environment
from tasks.local_services import running_services
from tasks.settings import Places
from tests.flows.installation import Installation, Kills, kill_in_every_stage
from tests.flows.tiny_run import tiny_settings, write_conversations

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".fledge/targets/smollm2-135m-instruct"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Everything that `fledge up` starts, in a home of its own."""
    home = tmp_path_factory.mktemp("home")
    (home / "prefect").mkdir()
    write_conversations(home)
    places = Places(home=home, mlflow_tracking_uri=None)
    ports = Ports(*(free_port() for _ in Ports.__dataclass_fields__))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("PWD", str(ROOT))  # where prefect.yaml says that flows run
        patch.setenv("FLEDGE_HOME", str(home))
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.delenv("FLEDGE_MLFLOW_TRACKING_URI", raising=False)
        with running_services(places, ports):
            environment = {**service_environment(places, ports), "PYTHONPATH": str(ROOT)}
            # Else two servers on a small machine bind to the same core, and one of them starves.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            yield Installation(places, ports, environment, tiny_settings(home, TARGET))


@pytest.fixture(scope="session")
def kills(installation: Installation) -> Kills:
    """The flow, killed in extraction, training and evaluation, and run to its end after that."""
    return kill_in_every_stage(installation)


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures of pages go: FLEDGE_SCREENSHOTS, to be looked at, else a temporary directory."""
    chosen = os.environ.get("FLEDGE_SCREENSHOTS")
    directory = Path(chosen) if chosen else tmp_path_factory.mktemp("screenshots")
    directory.mkdir(parents=True, exist_ok=True)
    return directory
