"""Starting, losing and ending a vLLM server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import pytest

from drafter.config import ServerSettings
from drafter.errors import ServerError
from drafter.serving import (
    Share,
    VllmServer,
    require_vllm_environment,
    speculative_arguments,
    vllm_environment,
)
from tests.waiting import is_alive, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]


def stand_in(tmp_path: Path, program: str) -> ServerSettings:
    """Settings whose interpreter is a stand-in: it runs `program` instead of vLLM, whatever it is asked.

    The program finds the server's arguments in `sys.argv`.
    """
    code = tmp_path / "program.py"
    code.write_text("import sys, os, time, http.server\n" + textwrap.dedent(program), encoding="utf-8")
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{code}" "$@"\n', encoding="utf-8")
    interpreter.chmod(0o755)
    return ServerSettings(python=interpreter, start_timeout_s=60)


HEALTHY = """
    port = int(sys.argv[sys.argv.index("--port") + 1])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def log_message(self, *arguments): pass
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    {before}
    server.serve_forever()
"""
# A server with a child in its process group that would outlive it, as vLLM's workers could.
WITH_CHILD = HEALTHY.format(
    before="child = os.fork()\n    if child == 0: time.sleep(3600); os._exit(0)\n"
    "    print('pids', os.getpid(), child, flush=True)"
)


def pids_in(log: Path) -> list[int]:
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        if line.startswith("pids "):
            return [int(word) for word in line.split()[1:]]
    return []


def test_server_is_up_inside_the_block_and_gone_with_its_children_after_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with VllmServer(tmp_path, stand_in(tmp_path, WITH_CHILD), log) as server:
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        assert server.alive()
        pids = pids_in(log)
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert not server.alive()


def test_error_inside_the_block_ends_the_server(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with pytest.raises(ZeroDivisionError), VllmServer(tmp_path, stand_in(tmp_path, WITH_CHILD), log):
        _ = 1 / 0
    wait_until(lambda: not any(is_alive(pid) for pid in pids_in(log)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_parent_leaves_no_server(tmp_path: Path, number: int) -> None:
    log = tmp_path / "server.log"
    settings = stand_in(tmp_path, WITH_CHILD)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from drafter.config import ServerSettings\n"
            "from drafter.serving import VllmServer\n"
            f"with VllmServer(Path('.'), ServerSettings(python={str(settings.python)!r}), Path({str(log)!r})):\n"
            "    print('up', flush=True); time.sleep(3600)",
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    pids = pids_in(log)
    assert len(pids) == 2
    os.kill(parent.pid, number)
    parent.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    program = HEALTHY.format(
        before="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    print('pids', os.getpid(), os.getpid(), flush=True)"
    )
    log = tmp_path / "server.log"
    with VllmServer(tmp_path, stand_in(tmp_path, program), log):
        pids = pids_in(log)
    assert not is_alive(pids[0])


def test_server_that_dies_while_starting_shows_the_end_of_its_log(tmp_path: Path) -> None:
    program = """
        for number in range(100): print("line", number)
        print("RuntimeError: the engine has no weights", flush=True)
        sys.exit(3)
    """
    with (
        pytest.raises(ServerError) as error,
        VllmServer(tmp_path, stand_in(tmp_path, program), tmp_path / "server.log"),
    ):
        pass
    text = str(error.value)
    assert "exit code 3" in text
    assert "the engine has no weights" in text
    assert "line 99" in text
    assert "line 50" not in text


def test_server_that_does_not_get_ready_is_ended_in_time(tmp_path: Path) -> None:
    settings = stand_in(tmp_path, "print('pids', os.getpid(), os.getpid(), flush=True); time.sleep(3600)")
    log = tmp_path / "server.log"
    server = VllmServer(tmp_path, settings.model_copy(update={"start_timeout_s": 1.0}), log).start()
    wait_until(lambda: pids_in(log))
    with pytest.raises(ServerError, match="did not answer within 1 s"):
        server.wait_until_ready()
    assert not is_alive(pids_in(log)[0])


def test_server_that_dies_later_is_noticed(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with VllmServer(tmp_path, stand_in(tmp_path, WITH_CHILD), log) as server:
        os.kill(pids_in(log)[0], signal.SIGKILL)
        wait_until(lambda: not server.alive())
        with pytest.raises(ServerError, match="has ended"):
            server.raise_if_dead()
    wait_until(lambda: not any(is_alive(pid) for pid in pids_in(log)))


def test_port_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = stand_in(tmp_path, HEALTHY.format(before="pass")).model_copy(update={"port": port})
        with (
            pytest.raises(ServerError, match=f"port {port} .* in use"),
            VllmServer(tmp_path, settings, tmp_path / "server.log"),
        ):
            pass


def test_missing_environment_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="make setup"):
        require_vllm_environment(ServerSettings(python=tmp_path / "bin" / "python"))


def test_environment_without_vllm_is_told_from_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(ServerError, match="has no vLLM"):
        require_vllm_environment(ServerSettings(python=tmp_path / "bin" / "python"))


def test_processes_of_the_vllm_environment_are_offline_and_see_nothing_of_ours() -> None:
    base = {"PYTHONPATH": "/ours", "HTTPS_PROXY": "http://proxy:1", "HOME": "/home"}
    environment = vllm_environment(ServerSettings(kv_cache_gb=1.5), base)
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment["HOME"] == "/home"
    assert not {"PYTHONPATH", "HTTPS_PROXY"} & environment.keys()


def test_a_model_is_compiled_where_that_is_asked_for_and_a_compiler_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    assert "--enforce-eager" in VllmServer(tmp_path, ServerSettings(), log).command(Path("python"))
    compiled = VllmServer(tmp_path, ServerSettings(compile=True), log)
    assert "--enforce-eager" not in compiled.command(Path("python"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("drafter.serving.require_vllm_environment", lambda settings: settings.python)
    with pytest.raises(ServerError, match="no-such-compiler is not on PATH"):
        compiled.start()


def test_servers_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    base = {"OMP_NUM_THREADS": "6", "VLLM_CPU_OMP_THREADS_BIND": "0-5"}
    environment = vllm_environment(ServerSettings(), base, Share(1, 2))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["FLEDGE_VLLM_FORK"] == "1"
    assert vllm_environment(ServerSettings(), base, Share(5, 7))["OMP_NUM_THREADS"] == "1"
    alone = vllm_environment(ServerSettings(), {}, Share())
    assert alone["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3,4,5"


def test_servers_side_by_side_take_a_gpu_each() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "4,GPU-7,6"}
    found = [vllm_environment(ServerSettings(), base, Share(i, 2))["CUDA_VISIBLE_DEVICES"] for i in (0, 1)]
    assert found == ["4", "GPU-7"]
    assert vllm_environment(ServerSettings(), base)["CUDA_VISIBLE_DEVICES"] == "4,GPU-7,6"
    with pytest.raises(ServerError, match=r"4 servers side by side, and 3 GPU"):
        vllm_environment(ServerSettings(), base, Share(0, 4))


def test_parallel_drafting_is_what_tells_peagle_from_eagle3(tmp_path: Path) -> None:
    flag, peagle = speculative_arguments(tmp_path, 3, "peagle")
    assert flag == "--speculative-config"
    assert json.loads(peagle) == {
        "model": str(tmp_path),
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    assert "parallel_drafting" not in json.loads(speculative_arguments(tmp_path, 3, "eagle3")[1])
    with pytest.raises(ValueError, match="at least 1"):
        speculative_arguments(tmp_path, 0)


def test_server_listens_on_loopback_only(tmp_path: Path) -> None:
    server = VllmServer(tmp_path, ServerSettings(), tmp_path / "server.log")
    command = server.command(Path("python"))
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "--trust-remote-code" not in command
