"""A server on a small CPU machine in a third of the time: its processes are forked, not started anew.

vLLM's API server starts an engine process, and that a worker. On CPU each of the three begins as a new Python that
imports torch and vLLM: 24 to 29 s of one core each on an AMD EPYC of 2021, 84 s until the server answers. Forked,
the second and third have everything already: 34 s.

vLLM starts them anew so that each worker's OpenMP can be bound to cores of its own, which OpenMP reads when it is
loaded. Where one worker has all cores there is nothing to bind; whoever starts the server says so by
`FLEDGE_VLLM_FORK=1`, and sets OpenMP's variables for all three.

vLLM calls `register` in each of its processes through the entry point group `vllm.general_plugins`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
from multiprocessing.context import BaseContext

logger = logging.getLogger("vllm.fledge")

VARIABLE = "FLEDGE_VLLM_FORK"


def register() -> None:
    """Let vLLM fork, if the environment says so. Safe to call again; does nothing on accelerators."""
    from vllm.platforms import current_platform

    if os.environ.get(VARIABLE) != "1" or not current_platform.is_cpu():
        return

    from vllm.utils import system_utils
    from vllm.v1.engine import utils as engine_processes
    from vllm.v1.executor import multiproc_executor as worker_processes

    if system_utils.get_mp_context is fork_context:
        return
    for module in (system_utils, engine_processes, worker_processes):
        module.get_mp_context = fork_context
    os.register_at_fork(after_in_child=_forget_the_parents_sockets)
    logger.info("Fledge: the engine and its worker are forked")


def fork_context() -> BaseContext:
    """In place of vLLM's `get_mp_context`, which takes `spawn` on CPU whatever is asked for."""
    return multiprocessing.get_context("fork")


def _forget_the_parents_sockets() -> None:
    """What a new process would not have: the API server's port, and the pipe that wakes its event loop.

    Kept, the port would stay open when the API server dies, and a signal to the engine would reach it too. The
    port is bound before the engine starts and listened on after it, so every TCP socket goes; the processes talk
    over pipes and Unix sockets.
    """
    signal.set_wakeup_fd(-1)
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as twin:
                is_tcp = twin.family in (socket.AF_INET, socket.AF_INET6) and twin.type == socket.SOCK_STREAM
            if is_tcp:
                os.close(int(name))
        except OSError:
            continue  # no socket, or gone with the listing
