"""vLLM's processes are forked where the environment says so, and only there. Run inside the vLLM environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
SCRIPT = """
import json, os, signal, socket
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()  # vLLM may load plugins more than once
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as vLLM's CPU platform does in any case
from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor
methods = [module.get_mp_context().get_start_method() for module in (utils, multiproc_executor)]

def child(mine, pipe):
    try:
        socket.socket(fileno=mine).getsockname()
        has_port = True
    except OSError:
        has_port = False
    os.write(pipe, json.dumps([has_port, signal.set_wakeup_fd(-1)]).encode())

with socket.socket() as server:
    server.bind(("127.0.0.1", 0))  # as vLLM does before it starts its engine
    reader, writer = os.pipe()
    _, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    process = utils.get_mp_context().Process(target=child, args=(server.fileno(), writer))
    process.start()
    process.join()
    child_has_port, wakes = json.loads(os.read(reader, 100))
    port = server.getsockname()[1]
print("RESULT" + json.dumps({"methods": methods, "child has port": child_has_port, "child wakes": wakes, "port": port}))
"""

pytestmark = pytest.mark.slow


def found(**environment: str) -> dict[str, object]:
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={"PATH": "/usr/bin:/bin", "VLLM_NO_USAGE_STATS": "1", **environment},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    return dict(json.loads(lines[0].removeprefix("RESULT")))


def test_forked_processes_keep_neither_the_servers_port_nor_its_event_loop() -> None:
    result = found(FLEDGE_VLLM_FORK="1")
    assert result["methods"] == ["fork", "fork"]
    assert result["child has port"] is False
    assert result["child wakes"] == -1
    assert result["port"], "the parent has lost it"


def test_without_the_variable_they_start_anew_as_vllm_wants_it() -> None:
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT.partition("\ndef child")[0] + "\nprint(methods)"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={"PATH": "/usr/bin:/bin", "VLLM_NO_USAGE_STATS": "1"},
    )
    assert "['spawn', 'spawn']" in done.stdout, done.stderr[-3000:]
