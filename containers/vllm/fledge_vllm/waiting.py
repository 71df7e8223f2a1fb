"""Wait for other processes without spinning, where there are few cores.

vLLM's engine hands a step to its worker process through shared memory and then reads that memory in a loop
(`SpinCondition`, up to a second) until the answer is there. That saves microseconds where a core is idle.
With two cores the loop takes time from the very computation that it waits for. Here readers go straight to
the notification that writers send in any case.

Active only where FLEDGE_NO_SPIN=1 is set; vLLM calls `register` through `vllm.general_plugins`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger("vllm.fledge")


def register() -> None:
    """Let every reader of shared memory wait for its notification. Safe to call again."""
    if os.environ.get("FLEDGE_NO_SPIN") != "1":
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if getattr(SpinCondition.__init__, "waits", False):
        return
    create = SpinCondition.__init__

    def create_without_spinning(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.busy_loop_s = 0

    create_without_spinning.waits = True  # type: ignore[attr-defined]
    SpinCondition.__init__ = create_without_spinning
    logger.info("Fledge: readers of shared memory wait without spinning")
