"""`fledge up` as a process: what it costs when idle, what it survives, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import boto3
import httpx
import psutil
import pytest
import yaml

from tasks.local_environment import Ports, RunningServices
from tasks.local_services import DEPLOYMENTS
from tasks.settings import Places
from tests.flows.prefect_server import prefect_api
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
MOST_IDLE_GIB = 1.5
pytestmark = pytest.mark.slow


class Up:
    """One `fledge up` after another on the same home and ports."""

    def __init__(self, home: Path) -> None:
        self.places = Places(home=home)
        self.log = home / "up.log"
        self.ports = Ports(*(_free_port() for _ in Ports.__dataclass_fields__))
        self.process: subprocess.Popen[bytes] | None = None
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FLEDGE_"))}
        kept.pop("PREFECT_API_URL", None)
        self.environment = {**kept, "FLEDGE_HOME": str(home), "PWD": str(ROOT)}

    def start(self) -> RunningServices:
        """Start, and wait until it has written down what runs."""
        flags = [part for name, port in asdict(self.ports).items() for part in (f"--{name}-port", str(port))]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.command_line", "up", *flags],
                cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        process = self.process

        def is_up() -> bool:
            assert process.poll() is None, self.log.read_text()
            return self.places.services_file.exists() and self.services().pid == process.pid

        wait_until(is_up)
        return self.services()

    def services(self) -> RunningServices:
        found: RunningServices = RunningServices.load(self.places.services_file)
        return found

    def tree(self) -> list[psutil.Process]:
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def memory_gib(self) -> dict[str, float]:
        """What each process has for itself, with its share of what several have."""
        shares = {}
        for one in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends as it is looked at
                shares[f"{one.pid} {' '.join(one.cmdline())[-60:]}"] = one.memory_full_info().pss / 2**30
        return shares

    def process_of(self, *words: str) -> psutil.Process:
        """The one whose command has these words behind its program."""
        for one in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                if tuple(one.cmdline()[1 : 1 + len(words)]) == words:
                    return one
        raise AssertionError(f"no process: {' '.join(words)}")

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("home"))
    up.start()
    yield up
    if up.process is not None and up.process.poll() is None:
        up.end(signal.SIGTERM)


def test_with_nothing_deployed_it_stays_small(up: Up) -> None:
    time.sleep(20)  # what starting needed is given back; and SageMaker is old enough to be killed
    wait_until(lambda: sum(up.memory_gib().values()) < MOST_IDLE_GIB, interval_s=1, told=up.memory_gib)


def test_everything_is_there_to_begin_with(up: Up) -> None:
    environment = up.services().environment
    addresses = {
        name: environment[f"AWS_ENDPOINT_URL_{name.upper().replace('-', '_')}"]
        for name in ("s3", "sagemaker", "cloudwatch", "sts", "application-auto-scaling")
    }
    client = _client("s3", addresses["s3"], environment)
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == [environment["FLEDGE_BUCKET"]]
    assert _client("sagemaker", addresses["sagemaker"], environment).list_endpoints()["Endpoints"] == []
    assert _client("cloudwatch", addresses["cloudwatch"], environment).describe_alarms()["MetricAlarms"] == []
    with prefect_api(environment["PREFECT_API_URL"].removesuffix("/api")) as prefect:
        deployments = prefect.post("/deployments/filter", json={}).json()
    wanted = yaml.safe_load((ROOT / DEPLOYMENTS).read_text(encoding="utf-8"))["deployments"]
    assert {one["name"] for one in deployments} == {one["name"] for one in wanted}


def test_sagemaker_comes_back_when_it_is_killed(up: Up) -> None:
    url = f"http://127.0.0.1:{up.ports.sagemaker}/_local/health"
    victim = up.process_of("-m", "containers.local", "serve")
    victim.kill()
    victim.wait(PATIENCE_S)
    wait_until(lambda: _answers(url))
    assert up.process is not None
    assert up.process.poll() is None


def test_a_second_one_on_the_same_home_is_refused(up: Up) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.command_line", "up"],
        cwd=ROOT, env=up.environment, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert "already runs" in done.stderr


def test_killed_it_leaves_nothing_behind_and_starts_again_at_once(up: Up) -> None:
    started = up.tree()
    up.end(signal.SIGKILL)
    up.start()
    _, alive = psutil.wait_procs(started[1:], timeout=PATIENCE_S)
    assert [" ".join(one.cmdline()) for one in alive] == []


def test_stopped_it_leaves_nothing_behind(up: Up) -> None:
    started = up.tree()
    assert up.end(signal.SIGTERM) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(started[1:], timeout=PATIENCE_S)
    assert [" ".join(one.cmdline()) for one in alive] == []
    assert not up.places.services_file.exists()


def _client(service: str, url: str, environment: dict[str, str]) -> Any:
    return boto3.client(
        service,
        endpoint_url=url,
        region_name=environment["AWS_REGION"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
    )


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
