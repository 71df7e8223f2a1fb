"""Waiting for a suspended promotion to take the answer that it was given."""

from __future__ import annotations

import time

from prefect.client.orchestration import get_client

from tasks.approval import WaitingRun
from tasks.promotion import PromotionError, read_version
from tasks.version_record import VersionRecord

_POLL_S = 4.0


def wait_for_approval(waiting: WaitingRun, timeout_s: float = 300.0) -> VersionRecord:
    """The version, once the run that asked has recorded the decision on it.

    Raises:
        PromotionError: the run ended without recording it, or no worker took it up.
    """
    deadline = time.monotonic() + timeout_s
    with get_client(sync_client=True) as client:
        while True:
            record = read_version(waiting.shown.version)
            if record.approval is not None and record.approval.flow_run == str(waiting.flow_run_id):
                return record
            state = client.read_flow_run(waiting.flow_run_id).state
            if state is not None and state.is_final():
                raise PromotionError(
                    f"the run {waiting.name} ended as {state.name}: {state.message}",
                    "the decision to be recorded",
                    "run promote-drafter again and decide on what is there now",
                )
            if time.monotonic() > deadline:
                raise PromotionError(
                    f"the run {waiting.name} has the answer but was not taken up within {timeout_s:.0f} s",
                    "a worker of its pool",
                    "see whether `fledge up` runs; the answer is kept and counts when a worker comes",
                )
            time.sleep(_POLL_S)
