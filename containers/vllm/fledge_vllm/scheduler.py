"""A scheduler that verifies no drafts, for extracting hidden states at full speed.

vLLM's `extract_hidden_states` is built as a speculative method: it hands each sampled token back as a
"draft" and the next step verifies it. Hardly any is right (2 % on real answers), so every decoding step
computes twice the tokens for nothing. The states are written all the same without them.

    --scheduler-cls fledge_vllm.scheduler.DraftlessScheduler --no-async-scheduling
"""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds


class DraftlessScheduler(Scheduler):
    """The synchronous scheduler, deaf to drafts."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Leave the drafts of the last step unscheduled."""
