"""Services of `fledge up` start when they can, say why when they cannot, and never outlive their starter."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drafter.errors import ServerError
from tasks.local_environment import Ports
from tasks.local_services import Service, running_services
from tasks.settings import Places
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(**chosen: int) -> Ports:
    return Ports(**{name: chosen.get(name) or free_port() for name in Ports.__dataclass_fields__})


@pytest.mark.parametrize("service", ["mlflow", "aws", "sagemaker"])
def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path, service: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        places = Places(home=tmp_path)
        ports = free_ports(**{service: port})
        error = pytest.raises(ServerError, match=f"port {port} on 127.0.0.1 is in use")
        with error, running_services(places, ports):
            pytest.fail("it must not start")
    assert not (tmp_path / "logs").exists()


def test_a_service_that_ends_shows_its_last_lines(tmp_path: Path) -> None:
    code = "print('no such database', flush=True); raise SystemExit(3)"
    service = Service("Broken", [sys.executable, "-c", code], tmp_path / "log", "http://127.0.0.1:9/")
    service.start(dict(os.environ))
    with pytest.raises(ServerError, match="code 3") as error:
        service.wait_until_ready(timeout_s=PATIENCE_S)
    assert "no such database" in str(error.value)


def test_a_service_answers_then_stops(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    service = Service("pages", command, tmp_path / "log", f"http://127.0.0.1:{port}/")
    service.start(dict(os.environ))
    service.wait_until_ready()
    service.stop()
    assert not answers(port)


def test_services_end_when_their_starter_is_killed(tmp_path: Path) -> None:
    port = free_port()
    code = f"""
import os, sys, time
from pathlib import Path
from tasks.local_services import Service
command = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
service = Service("pages", command, Path(r"{tmp_path}") / "log", "http://127.0.0.1:{port}/")
service.start(dict(os.environ)); service.wait_until_ready(); print("up", flush=True); time.sleep(60)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    assert starter.stdout.readline() == "up\n"
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    wait_until(lambda: not answers(port))


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
