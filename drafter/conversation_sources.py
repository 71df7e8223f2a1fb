"""A source read as a whole: personal data taken out, and captured requests joined to the conversations they make."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from drafter.captures import longest_only
from drafter.config import RedactionSettings, SourceSettings
from drafter.conversation_files import RawConversation, read_file
from drafter.redaction import Redactor, build_redactor

_NOTHING = RedactionSettings(kinds=())


def read_source(source: SourceSettings, uris: list[str]) -> Iterator[RawConversation]:
    """Conversations of all files of a source.

    Captures come last, because the last file may hold the longest form of a conversation in the first.

    Raises:
        DataError: a file that is empty or not of the kind its name says.
        FledgeError: a redactor that is not allowed or not there.
    """
    redact_file = build_redactor(source.redaction or _NOTHING)
    redact_capture = build_redactor(source.redaction or RedactionSettings())
    captured: list[RawConversation] = []
    for uri in uris:
        for raw in read_file(uri):
            if raw.is_captured:
                captured.append(raw)
            else:
                yield _redacted(raw, redact_file)
    if captured:
        yield from (_redacted(raw, redact_capture) for raw in _join(source.uri, captured))


def _redacted(raw: RawConversation, redact: Redactor) -> RawConversation:
    return replace(raw, turns=tuple((role, redact(content)) for role, content in raw.turns))


def _join(uri: str, captured: list[RawConversation]) -> list[RawConversation]:
    """Damaged lines, and of the requests of one conversation the longest; says what was left out."""
    damaged = [raw for raw in captured if raw.problem is not None]
    whole = [raw for raw in captured if raw.problem is None and raw.left_out is None]
    longest = [whole[index] for index in longest_only([raw.turns for raw in whole])]
    reasons = Counter(raw.left_out for raw in captured if raw.left_out is not None)
    reasons["earlier requests of the same conversations"] += len(whole) - len(longest)
    shown = [f"{count} {reason}" for reason, count in reasons.most_common() if count]
    without = f"; without {', '.join(shown)}" if shown else ""
    print(
        f"{uri}: {len(longest)} conversations of {len(captured)} captured requests{without}", file=sys.stderr
    )
    return damaged + longest
