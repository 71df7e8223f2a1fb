"""One installation for tests of whole flows (a home, Prefect's server and worker, MLflow, a tiny run in it), and a
world of endpoints for flows that run in the tests' own process.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tasks.local_environment import Ports, service_environment
from tasks.local_services import running_services
from tasks.settings import Places
from tasks.version_record import VersionRecord
from tests.containers.control_plane import ControlPlane, forget_everything
from tests.flows.endpoint_world import EndpointWorld, copy_database
from tests.flows.installation import Installation, Kills, kill_in_every_stage
from tests.flows.prefect_server import MAX_RETRIES
from tests.flows.tiny_run import tiny_settings, write_conversations
from tests.waiting import PATIENCE_MS, PATIENCE_S

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".fledge/targets/smollm2-135m-instruct"

CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


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
        patch.setenv("PREFECT_CLIENT_MAX_RETRIES", MAX_RETRIES)
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


@pytest.fixture(scope="session")
def harness() -> Iterator[None]:
    """A Prefect server for flows that run in the tests' own process: one, as their events go to one all along."""
    from prefect.testing.utilities import prefect_test_harness

    from tests.flows.prefect_server import drain

    with prefect_test_harness(server_startup_timeout=int(PATIENCE_S)):
        yield
        drain()


@pytest.fixture
def world(
    tmp_path: Path, harness: None, moto: str, database: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EndpointWorld]:
    """A SageMaker and a registry of this test's own."""
    home = tmp_path / "home"
    copy_database(database, home)
    forget_everything(moto)
    plane = ControlPlane(home, moto)
    for name, value in EndpointWorld.environment(home, plane, moto).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FLEDGE_MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("tasks.catalogue.CATALOGUE", home / "catalogue.yaml")
    world = EndpointWorld(Places(), plane, moto)
    world.prepare(home)
    plane.start()
    yield world
    plane.close()


@pytest.fixture
def v1(world: EndpointWorld, tmp_path: Path) -> VersionRecord:
    """A version in production."""
    from flows.deploy_endpoint import deploy_endpoint  # here, because Prefect takes seconds to import

    version = world.register(tmp_path, "a")
    deploy_endpoint(world.settings(version))
    return version


@pytest.fixture
def v2(world: EndpointWorld, v1: VersionRecord, tmp_path: Path) -> VersionRecord:
    """Its approved successor."""
    return world.register(tmp_path, "b")


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of the system's Chromium, which waits for as long as every test does."""
    executable = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    assert executable, "no Chromium: apt-get install chromium"
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=executable,
            args=list(CHROMIUM_ARGUMENTS),
            viewport={"width": 1400, "height": 1100},
            timeout=PATIENCE_MS,
        )
        context.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        yield context.new_page()
        context.close()
