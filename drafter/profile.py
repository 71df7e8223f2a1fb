"""What is wrong with a conversation, and the columns about it that Great Expectations judges.

`find_problem` is the one place that decides; strict preparation stops at its answer, and `profile.parquet`
carries it in words for every conversation that was read, those left out included.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from drafter.chat_template import ChatTemplate, Tokens
from drafter.conversation_files import RawConversation
from drafter.errors import DataError
from drafter.files import atomic_path
from drafter.records import Message, Record

ROLES = ("system", "user", "assistant")
UNDECODABLE = "\ufffd"  # what decoders put where bytes made no character


class ProfileRow(Record):
    """One conversation that was read. Token columns are null where the chat template could not be applied."""

    id: str = Field(description="Content hash; empty where the record could not be read.")
    domain: str
    split: str | None = Field(description="`train` or `evaluation`; null: left out.")
    source: str = Field(description="File and line.")
    problem: str | None = Field(description="Why it is malformed, in words; null: nothing is wrong with it.")
    num_turns: int
    first_role: str | None
    last_role: str | None
    roles: str = Field(description="Roles in order, separated by blanks: `system user assistant`.")
    num_empty_turns: int
    num_undecodable: int = Field(description="Characters U+FFFD: their bytes were not text.")
    num_tokens: int | None = Field(description="Before truncation.")
    num_supervised_tokens: int | None = Field(description="Written by the assistant, before truncation.")
    supervised_share: float | None
    is_duplicate: bool = Field(description="The same messages were read before.")
    prompt_digest: str = Field(description="Over the normalised system and first user turn.")
    fits_window: bool | None


def find_problem(conversation: RawConversation) -> str | None:
    """What makes a conversation unusable, in words, or None.

    The order of turns is: perhaps a system turn, then user and assistant in turn. A user turn may end it
    (its answer is then the target's to write).
    """
    if conversation.problem is not None:
        return conversation.problem
    roles = [role for role, _ in conversation.turns]
    if not roles:
        return "no turn at all"
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        return f'unknown role "{unknown[0]}"'
    empty = [number for number, (_, content) in enumerate(conversation.turns, 1) if not content.strip()]
    if empty:
        return f"turn {empty[0]} ({roles[empty[0] - 1]}) is empty"
    undecodable = sum(content.count(UNDECODABLE) for _, content in conversation.turns)
    if undecodable:
        return f"{undecodable} characters that did not decode (U+FFFD)"
    surrogates = [
        n for n, (_, text) in enumerate(conversation.turns, 1) if any("\ud800" <= c <= "\udfff" for c in text)
    ]
    if surrogates:
        return f"turn {surrogates[0]} holds half of a surrogate pair, which is no character"
    return _problem_of_order(roles)


def _problem_of_order(roles: Sequence[str]) -> str | None:
    if "system" in roles[1:]:
        return f"turn {roles.index('system', 1) + 1} is a system turn; only the first may be"
    spoken = roles[1:] if roles[0] == "system" else roles
    if not spoken:
        return "a system turn and nothing else"
    if spoken[0] == "assistant":
        return "the assistant speaks first"
    offset = len(roles) - len(spoken)
    for index in range(1, len(spoken)):
        if spoken[index] == spoken[index - 1]:
            return f"turns {index + offset} and {index + offset + 1} are both the {spoken[index]}'s"
    return None


def find_token_problem(messages: Sequence[Message], tokens: Tokens) -> str | None:
    """As `find_problem`, for what shows only in tokens: `tokens` are those left after truncation."""
    has_answer = any(message.role == "assistant" for message in messages)
    if has_answer and tokens.num_supervised == 0:
        if tokens.num_cut:
            return f"no token of an answer is left after truncation to {len(tokens.input_ids)} tokens"
        return "no token is the assistant's under the chat template (the loss mask is empty)"
    if not has_answer and tokens.num_cut:
        return (
            f"the prompt alone is longer than {len(tokens.input_ids)} tokens and leaves no room for an answer"
        )
    return None


def prompt_digest(turns: Sequence[tuple[str, str]]) -> str:
    """Digest of what was asked: the system turn and the first user turn.

    Case, white space and Unicode's ways of writing the same are levelled, so that a prompt which differs
    only in these does not come to stand on both sides of the split.
    """
    asked: dict[str, str] = {}
    for role, content in turns:
        if role in ("system", "user"):
            asked.setdefault(role, " ".join(unicodedata.normalize("NFKC", content).casefold().split()))
        if role == "user":
            break
    text = "\x1e".join(f"{role}\x1f{content}" for role, content in sorted(asked.items()))
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def encode_safely(
    template: ChatTemplate, messages: Sequence[Message]
) -> tuple[Tokens | None, DataError | None]:
    """Tokens of a conversation, or the template's objection to it."""
    try:
        if messages[-1].role == "user":
            return template.encode_prompt(messages), None
        return template.encode(messages), None
    except DataError as error:
        return None, error


def write_profile(path: Path, rows: Sequence[ProfileRow]) -> None:
    """Write the rows as Parquet, with types that hold even where a column is all null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    fields = ProfileRow.model_fields
    schema = pa.schema([(name, kinds[_plain_kind(field.annotation)]) for name, field in fields.items()])
    table = pa.Table.from_pylist([row.model_dump() for row in rows], schema=schema)
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary)


def _plain_kind(annotation: object) -> str:
    """`str` for `str | None`."""
    return str(getattr(annotation, "__name__", annotation)).removesuffix(" | None") if annotation else "str"
