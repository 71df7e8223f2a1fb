"""vLLM's processes are forked where the environment says so, and only there. Run inside the vLLM environment."""

from __future__ import annotations

import pytest

from tests.containers.vllm_script import run_in_vllm

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


def test_forked_processes_keep_neither_the_servers_port_nor_its_event_loop() -> None:
    result = run_in_vllm(SCRIPT, FLEDGE_VLLM_FORK="1")
    assert result["methods"] == ["fork", "fork"]
    assert result["child has port"] is False
    assert result["child wakes"] == -1
    assert result["port"], "the parent has lost it"


def test_without_the_variable_they_start_anew_as_vllm_wants_it() -> None:
    script = SCRIPT.partition("\ndef child")[0] + '\nprint("RESULT" + json.dumps({"methods": methods}))'
    assert run_in_vllm(script)["methods"] == ["spawn", "spawn"]
