"""`prepare`: conversations from anywhere become a dataset with a held-out side that shares no prompt with training.

A directory of it holds `train.jsonl` and `evaluation.jsonl` (one Conversation a line), `profile.parquet`
(one row per conversation read) and, written last, `dataset.json`.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from drafter.chat_template import ChatTemplate, load_chat_template
from drafter.config import PrepareSettings, SourceSettings
from drafter.conversation_files import RawConversation, files_digest, list_files
from drafter.conversation_sources import read_source
from drafter.errors import DataError
from drafter.files import atomic_path, digest_of, write_text_atomically
from drafter.profile import (
    UNDECODABLE,
    ProfileRow,
    encode_safely,
    find_problem,
    find_token_problem,
    prompt_digest,
    write_profile,
)
from drafter.progress import track
from drafter.records import Conversation, DatasetRecord, Message
from drafter.target import load_target

DATASET_FILE = "dataset.json"
_INPUTS_FILE = "inputs.json"
_PROFILE_FILE = "profile.parquet"
_SIDES = {"train": "train.jsonl", "evaluation": "evaluation.jsonl"}
_EXPECTED = (
    "perhaps a system turn, then user and assistant in turn, none empty, roles system, user or assistant"
)


@dataclass(frozen=True)
class _Read:
    """A conversation that was read, with what was found out about it so far."""

    row: ProfileRow
    use: str
    conversation: Conversation | None
    num_cut: int = 0


def load_conversations(dataset: Path, split: str) -> list[Conversation]:
    """One side of a prepared dataset, ordered by id.

    Raises:
        DataError: the dataset is not there or not finished.
    """
    DatasetRecord.load(dataset / DATASET_FILE)
    file = dataset / f"{split}.jsonl"
    try:
        with open(file, "rb") as lines:
            return sorted((Conversation.model_validate_json(line) for line in lines), key=lambda c: c.id)
    except (FileNotFoundError, ValidationError) as error:
        reason = "is missing" if isinstance(error, OSError) else f"is damaged: {error.errors()[0]['msg']}"
        raise DataError(
            f"{file} {reason}",
            "the conversations that `prepare` wrote",
            f"delete {dataset} and run `python -m drafter prepare` again",
        ) from None


def prepare(settings: PrepareSettings) -> DatasetRecord:
    """Read all sources, drop exact duplicates, split, and write the dataset.

    Raises:
        DataError: a malformed file or conversation (on_problem=stop), or nothing left to train on.
    """
    files = [(source, list_files(source.uri)) for source in settings.sources]
    inputs = _digest_of_inputs(settings, files)
    record_path = settings.output / DATASET_FILE
    inputs_path = settings.output / _INPUTS_FILE
    written = [
        settings.output / name for name in (*_SIDES.values(), _PROFILE_FILE, _INPUTS_FILE, DATASET_FILE)
    ]
    if all(path.is_file() for path in written) and inputs_path.read_text().strip() == inputs:
        record: DatasetRecord = DatasetRecord.load(record_path)
        return record
    record_path.unlink(missing_ok=True)  # what stands there describes other inputs

    read = _read_all(settings, files)
    split = list(_assign_splits(read, settings))
    record = _record_of(split, settings)
    for side, name in _SIDES.items():
        _write_side(settings.output / name, [r for r in split if r.row.split == side])
    write_profile(settings.output / _PROFILE_FILE, [r.row for r in split])
    write_text_atomically(inputs_path, inputs + "\n")
    record.save(record_path)
    return record


def _digest_of_inputs(settings: PrepareSettings, files: list[tuple[SourceSettings, list[str]]]) -> str:
    choices = settings.model_dump(mode="json", exclude={"output", "target"})
    marks = [files_digest(uris) for _, uris in files]
    return digest_of([choices, marks, load_target(settings.target).fingerprint])


def _read_all(settings: PrepareSettings, files: list[tuple[SourceSettings, list[str]]]) -> list[_Read]:
    """Read every file; evaluation sources first, so that of two equal conversations theirs is kept."""
    template = load_chat_template(settings.target)
    window = min(settings.max_length_tokens, load_target(settings.target).max_position_embeddings)
    seen: set[str] = set()
    read: list[_Read] = []
    ordered = sorted(files, key=lambda pair: pair[0].use != "evaluation")
    with track(0, "reading conversations", "conversations") as progress:
        for source, uris in ordered:
            contents_by_explicit_id: dict[str, str] = {}
            for raw in read_source(source, uris):
                raw = _refuse_reused_id(raw, contents_by_explicit_id)
                one = _examine(raw, source, template, window, settings.on_problem)
                if one.conversation is not None:
                    is_duplicate = one.row.id in seen
                    seen.add(one.row.id)
                    one = replace(one, row=one.row.model_copy(update={"is_duplicate": is_duplicate}))
                read.append(one)
                progress.advance()
    return read


def _refuse_reused_id(raw: RawConversation, contents: dict[str, str]) -> RawConversation:
    """Mark a conversation whose own id stands for other content earlier in the same source."""
    if raw.explicit_id is None or raw.problem is not None:
        return raw
    content = _content_id(raw.turns)
    if contents.setdefault(raw.explicit_id, content) != content:
        return replace(
            raw, problem=f'id "{raw.explicit_id}" was used before for a conversation of other content'
        )
    return raw


def _examine(
    raw: RawConversation, source: SourceSettings, template: ChatTemplate, window: int, mode: str
) -> _Read:
    """Judge and tokenize one conversation.

    Raises:
        DataError: it is malformed and `mode` is "stop".
    """
    problem = find_problem(raw)
    row = _row_of(raw, source.domain, problem)
    if problem is None:
        messages = tuple(Message(role=role, content=content) for role, content in raw.turns)
        tokens, objection = encode_safely(template, messages)
        if objection is not None and mode == "stop":
            raise DataError(f"{raw.source}: {objection.given}", objection.expected, objection.remedy)
        if tokens is None:
            problem = str(objection.given) if objection else "no tokens"
        else:
            kept = tokens.truncated(window)
            problem = find_token_problem(messages, kept)
            row = row.model_copy(
                update=_token_columns(len(tokens.input_ids), tokens.num_supervised, kept.num_cut)
            )
            if problem is None:
                conversation = Conversation(
                    id=row.id, domain=source.domain, source=raw.source, messages=messages
                )
                return _Read(row, source.use, conversation, kept.num_cut)
    if mode == "stop":
        raise DataError(
            f"{raw.source}: {problem}",
            _EXPECTED,
            "correct that conversation, or leave such ones out with on_problem=drop",
        )
    return _Read(row.model_copy(update={"problem": problem}), source.use, None)


def _row_of(raw: RawConversation, domain: str, problem: str | None) -> ProfileRow:
    roles = [role for role, _ in raw.turns]
    return ProfileRow(
        id=_content_id(raw.turns) if raw.turns else "",
        domain=domain,
        split=None,
        source=raw.source,
        problem=problem,
        num_turns=len(roles),
        first_role=roles[0] if roles else None,
        last_role=roles[-1] if roles else None,
        roles=" ".join(role.replace(" ", "_") for role in roles),
        num_empty_turns=sum(not content.strip() for _, content in raw.turns),
        num_undecodable=sum(content.count(UNDECODABLE) for _, content in raw.turns),
        num_tokens=None,
        num_supervised_tokens=None,
        supervised_share=None,
        is_duplicate=False,
        prompt_digest=prompt_digest(raw.turns),
        fits_window=None,
    )


def _token_columns(num_tokens: int, num_supervised: int, num_cut: int) -> dict[str, object]:
    return {
        "num_tokens": num_tokens,
        "num_supervised_tokens": num_supervised,
        "supervised_share": num_supervised / max(num_tokens, 1),
        "fits_window": num_cut == 0,
    }


def _content_id(turns: Iterable[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    for role, content in turns:
        for part in (role, content):
            data = part.encode("utf-8", errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def _assign_splits(read: list[_Read], settings: PrepareSettings) -> Iterator[_Read]:
    """Give each usable conversation its side.

    A prompt is held out if the hash of it falls below `evaluation_share`, so adding data moves no prompt
    into evaluation that trained before; the cap keeps the smallest hashes, which moves them out only.
    """
    usable = [r for r in read if r.conversation is not None and not r.row.is_duplicate]
    evaluation_only = {r.row.prompt_digest for r in usable if r.use == "evaluation"}
    # A prompt that any `train` source brings trains: it cannot be held out as well.
    train_only = {r.row.prompt_digest for r in usable if r.use == "train"} - evaluation_only
    held_out = _held_out_prompts(
        [r for r in usable if r.use == "split"], settings, evaluation_only | train_only
    )
    for one in read:
        digest = one.row.prompt_digest
        split: str | None = None
        if one.conversation is not None and not one.row.is_duplicate:
            if one.use == "evaluation":
                split = "evaluation"
            elif digest not in evaluation_only:
                split = "evaluation" if one.use == "split" and digest in held_out else "train"
        yield replace(one, row=one.row.model_copy(update={"split": split}))


def _held_out_prompts(read: list[_Read], settings: PrepareSettings, excluded: set[str]) -> set[str]:
    """Digests of held-out prompts: below the share, smallest hashes first, up to the cap in each domain."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for one in read:
        if one.row.prompt_digest not in excluded:
            counts[one.row.prompt_digest][one.row.domain] += 1
    places = {digest: _place_of(digest, settings.seed) for digest in counts}
    used: Counter[str] = Counter()
    full: set[str] = set()
    held_out: set[str] = set()
    for digest in sorted(
        (d for d in counts if places[d] < settings.evaluation_share), key=lambda d: places[d]
    ):
        domains = counts[digest]
        full |= {d for d, count in domains.items() if used[d] + count > settings.max_evaluation_conversations}
        if full.isdisjoint(domains):
            held_out.add(digest)
            used.update(domains)
    return held_out


def _place_of(digest: str, seed: int) -> float:
    """A number in [0, 1) that depends on the prompt and the seed alone."""
    return int(hashlib.sha256(f"{seed}:{digest}".encode()).hexdigest()[:13], 16) / 16**13


def _record_of(read: list[_Read], settings: PrepareSettings) -> DatasetRecord:
    """Count, and refuse a dataset without training conversations."""
    kept = [r for r in read if r.row.split is not None]
    per_domain: dict[str, dict[str, int]] = {}
    for one in kept:
        sides = per_domain.setdefault(one.row.domain, {"train": 0, "evaluation": 0})
        sides[str(one.row.split)] += 1
    num_train = sum(sides["train"] for sides in per_domain.values())
    num_problems = sum(r.row.problem is not None for r in read)
    num_duplicates = sum(r.row.is_duplicate for r in read)
    if num_train == 0:
        raise DataError(
            f"{len(read)} conversations read, none left to train on ({num_problems} malformed, "
            f"{num_duplicates} duplicates, {len(kept)} for evaluation)",
            "at least one training conversation",
            "add conversations, lower evaluation_share, or give a source use=split or use=train",
        )
    return DatasetRecord(
        digest=digest_of(sorted([r.row.id, r.row.domain, r.row.split] for r in kept)),
        path=str(settings.output),
        num_train=num_train,
        num_evaluation=len(kept) - num_train,
        num_duplicates=num_duplicates,
        num_problems=num_problems,
        num_withheld=len(read) - len(kept) - num_problems - num_duplicates,
        num_truncated=sum(r.num_cut > 0 for r in kept),
        num_per_domain=per_domain,
        train_domains=tuple(sorted(d for d, sides in per_domain.items() if sides["train"])),
    )


def _write_side(path: Path, read: list[_Read]) -> None:
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for one in read:
            assert one.conversation is not None
            file.write(one.conversation.model_dump_json() + "\n")
