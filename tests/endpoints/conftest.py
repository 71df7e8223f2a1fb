"""SageMaker of this machine with the real vLLM behind it, a registry, and drafters of one small target."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from moto.server import ThreadedMotoServer
from prefect.testing.utilities import prefect_test_harness

from drafter.files import write_text_atomically
from tasks.settings import Places
from tests.containers.control_plane import ROOT, ControlPlane
from tests.endpoints.real_endpoints import CATALOGUE_ENTRY, RealEndpoints
from tests.flows.endpoint_world import BUCKET, EndpointWorld


@pytest.fixture(scope="module")
def harness() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="module")
def endpoints(
    harness: None, servable_target: Path, servable_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealEndpoints]:
    """One installation for all tests of a module: they tell one story, in order."""
    home = tmp_path_factory.mktemp("endpoints")
    shutil.copytree(servable_target, home / "targets" / "tiny")
    write_text_atomically(home / "catalogue.yaml", yaml.safe_dump({"tiny": CATALOGUE_ENTRY}))
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    host, port = moto.get_host_and_port()
    plane = ControlPlane(home, f"http://{host}:{port}")
    plane.environment["FLEDGE_VLLM_PYTHON"] = str(ROOT / ".venv-vllm/bin/python")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in EndpointWorld.environment(home, plane, f"http://{host}:{port}").items():
            patch.setenv(name, value)
        patch.setenv("FLEDGE_APPROVERS", "alice")
        patch.delenv("FLEDGE_MLFLOW_TRACKING_URI", raising=False)
        patch.setattr("tasks.catalogue.CATALOGUE", home / "catalogue.yaml")
        world = RealEndpoints(Places(), plane, servable_drafter)
        world.s3.create_bucket(Bucket=BUCKET)
        plane.start()
        yield world
        plane.close()
    moto.stop()
