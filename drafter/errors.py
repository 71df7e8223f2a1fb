"""The errors that a user meets: what was given, what was expected, what to do."""

from __future__ import annotations

# In the words of a rank whose training ended because another one did: the reason is not its own.
LOST_RANK = "has lost another rank"


class FledgeError(Exception):
    """A problem that the user can fix. Entry points print it without a traceback and exit with 1.

    Args:
        given: what was found, with the value and where it stands (`chat.jsonl, line 7: role "bot"`).
        expected: what would have been right.
        remedy: what to do about it, as an instruction.
    """

    def __init__(self, given: str, expected: str, remedy: str) -> None:
        self.given = given
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{given}\n  expected: {expected}\n  what to do: {remedy}")


class DataError(FledgeError):
    """Conversations, tokens or hidden states that cannot be used as they are."""


class CheckpointError(FledgeError):
    """A drafter, target or training checkpoint that does not fit what it is used with."""


class ServerError(FledgeError):
    """A vLLM server that is missing, did not start, or died. Carries its last log lines in `given`."""
