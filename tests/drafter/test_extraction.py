"""Extracting hidden states: right states for right tokens, resumable, and careful with the disk.

Everything but the last section runs a tiny target through transformers; the last runs the real target
through vLLM and holds the two against each other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafter.chat_template import load_chat_template
from drafter.config import ExtractSettings, PrepareSettings
from drafter.conversations import load_conversations, prepare
from drafter.errors import DataError
from drafter.extraction import extract
from drafter.records import Message, StatesRecord
from drafter.shards import HiddenStates, open_states
from drafter.target import load_target
from examples import smollm2
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
CONVERSATIONS = [
    ["Hello"],
    ["What is it?", "A bird.", "Can it fly?"],
    ["One", "1", "Two", "2"],
    ["Name three colours."],
    ["Bye"],
]


def make_dataset(target: Path, directory: Path, conversations: list[list[str]]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "chat.jsonl", "w") as file:
        for turns in conversations:
            messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(turns)]
            file.write(json.dumps({"messages": messages}) + "\n")
    source = {"uri": str(directory / "chat.jsonl"), "domain": "chat", "use": "train"}
    prepare(PrepareSettings(sources=(source,), target=target, output=directory / "dataset"))
    return directory / "dataset"


@pytest.fixture(scope="module")
def dataset(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tiny_target, tmp_path_factory.mktemp("data"), CONVERSATIONS)


@pytest.fixture
def settings(tiny_target: Path, dataset: Path, tmp_path: Path) -> ExtractSettings:
    return ExtractSettings(
        dataset=dataset,
        target=tiny_target,
        output=tmp_path / "states",
        extractor="transformers",
        max_answer_tokens=12,
        max_length_tokens=256,
        conversations_per_shard=2,
        server={"dtype": "bfloat16"},  # as shards keep states, so that nothing is rounded on the way
    )


def changed(settings: ExtractSettings, **changes: Any) -> ExtractSettings:
    return settings.model_copy(update=changes)


def files(directory: Path) -> dict[str, int]:
    """Name and inode of every shard: an untouched shard keeps both."""
    return {f.name: f.stat().st_ino for f in directory.glob("shard-*.safetensors")}


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.bfloat16).eval()


def test_states_are_those_of_a_plain_forward_pass(settings: ExtractSettings, model: Any) -> None:
    extract(settings)
    states = open_states(settings.output)
    layers = load_target(settings.target).default_auxiliary_layers
    for index in range(len(states)):
        document = states.document(index)
        with torch.no_grad():
            output = model(document.input_ids[None], output_hidden_states=True)
        expected = torch.cat([output.hidden_states[layer][0] for layer in layers], dim=-1)
        assert torch.equal(document.auxiliary[:-1], expected[:-1])
        # The final state is the one before the norm: norm and head make the model's logits of it.
        with torch.no_grad():
            logits = model.lm_head(model.model.norm(document.final))
        assert torch.allclose(logits[:-1], output.logits[0, :-1])


def test_answers_are_the_targets_own_greedy_tokens_and_only_they_are_supervised(
    settings: ExtractSettings,
) -> None:
    from transformers import AutoModelForCausalLM

    # In float32, since bf16 decides near-ties one way token by token and another in one pass.
    model = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.float32).eval()
    record = extract(changed(settings, server=settings.server.model_copy(update={"dtype": "float32"})))
    assert record.greedy_answers
    states = open_states(settings.output)
    for index in range(len(states)):
        document = states.document(index)
        start = int(document.loss_mask.nonzero()[-1]) + 1
        while document.loss_mask[start - 1]:
            start -= 1
        with torch.no_grad():
            predicted = model(document.input_ids[None]).logits[0].argmax(-1)
        assert torch.equal(document.input_ids[start:], predicted[start - 1 : -1])
        assert bool(document.loss_mask[start:].all())


def test_last_sampled_token_is_kept_with_a_state_of_zeros(settings: ExtractSettings) -> None:
    extract(settings)
    states = open_states(settings.output)
    for index in range(len(states)):
        document = states.document(index)
        assert bool(document.loss_mask[-1])
        assert not document.auxiliary[-1].any()
        assert not document.final[-1].any()
        assert bool(document.final[:-1].any(dim=-1).all())


def test_later_turns_follow_on_the_targets_own_earlier_answers(settings: ExtractSettings) -> None:
    extract(settings)
    template = load_chat_template(settings.target)
    states = open_states(settings.output)
    for conversation in load_conversations(settings.dataset, "train"):
        document = states.document(states.ids.index(conversation.id))
        text = template.decode_exactly(document.input_ids.tolist())
        asked = [m.content for m in conversation.messages if m.role == "user"]
        positions = [text.index(f"<|im_start|>user\n{question}<|im_end|>") for question in asked]
        assert positions == sorted(positions)
        assert text.count("<|im_start|>assistant\n") == len(asked)
        given = [m.content for m in conversation.messages if m.role == "assistant"]
        assert not any(f"assistant\n{answer}<|im_end|>" in text for answer in given)


def test_end_of_turn_that_the_target_did_not_write_is_not_supervised(settings: ExtractSettings) -> None:
    extract(changed(settings, max_answer_tokens=3))  # a random model does not end by itself in three tokens
    states = open_states(settings.output)
    end = load_chat_template(settings.target)._end_of_turn_ids
    multi_turn = [d for d in map(states.document, range(len(states))) if d.loss_mask.diff().sum() > 1]
    assert multi_turn
    for document in multi_turn:
        assert not set(document.input_ids[document.loss_mask].tolist()) & end


def test_given_answers_are_kept(settings: ExtractSettings, tmp_path: Path) -> None:
    dataset = make_dataset(settings.target, tmp_path / "given", [["q", "abc"], ["q", "def", "r"]])
    record = extract(changed(settings, dataset=dataset, answers="given"))
    assert not record.greedy_answers
    template = load_chat_template(settings.target)
    states = open_states(settings.output)
    supervised = set()
    for index in range(len(states)):
        document = states.document(index)
        supervised.add(template.decode_exactly(document.input_ids[document.loss_mask].tolist()))
        assert bool(document.final.any(dim=-1).all()), "every given token has a state"
    assert supervised == {"abc<|im_end|>", "def<|im_end|>"}


def test_given_answers_have_to_be_there(settings: ExtractSettings) -> None:
    with pytest.raises(DataError, match="3 of 5 conversations bring no answer"):
        extract(changed(settings, answers="given"))


def test_sampled_answers_repeat_with_their_seed_and_change_with_another(
    settings: ExtractSettings, tmp_path: Path
) -> None:
    def sampled(seed: int, name: str) -> list[list[int]]:
        extract(changed(settings, temperature=1.0, seed=seed, output=tmp_path / name))
        states = open_states(tmp_path / name)
        return [states.input_ids(i).tolist() for i in range(len(states))]

    first = sampled(1, "a")
    assert first == sampled(1, "b")
    assert first != sampled(2, "c")


def test_conversation_ends_before_the_turn_that_fills_the_window(settings: ExtractSettings) -> None:
    template = load_chat_template(settings.target)
    turns = [Message(role="user", content="What is it?")]
    window = len(template.encode_prompt(turns).input_ids) + 20  # a second question does not fit
    record = extract(changed(settings, max_length_tokens=window))
    states = open_states(settings.output)
    assert record.num_conversations == len(CONVERSATIONS)
    assert int(states.lengths.max()) <= window
    texts = [template.decode_exactly(states.input_ids(i).tolist()) for i in range(len(states))]
    assert any("What is it?" in text and "Can it fly?" not in text for text in texts)


def test_all_conversations_left_out_is_refused(settings: ExtractSettings) -> None:
    with pytest.raises(DataError, match="all 5 conversations were left out"):
        extract(changed(settings, max_length_tokens=10))
    assert not (settings.output / "manifest.json").exists()


def test_finished_states_are_returned_at_once(
    settings: ExtractSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = extract(settings)
    before = files(settings.output)
    monkeypatch.setattr("drafter.extraction._extract", lambda *_: pytest.fail("extracted again"))
    assert extract(settings) == record
    assert files(settings.output) == before
    assert not (settings.output / ".spool").exists()


@pytest.fixture(scope="module")
def split_dataset(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two conversations to train on, one held out."""
    directory = tmp_path_factory.mktemp("split")
    sources = []
    for use, questions in (("train", ["Hello", "Bye"]), ("evaluation", ["Name three colours."])):
        lines = [json.dumps({"messages": [{"role": "user", "content": one}]}) for one in questions]
        (directory / f"{use}.jsonl").write_text("\n".join(lines) + "\n")
        sources.append({"uri": str(directory / f"{use}.jsonl"), "domain": "chat", "use": use})
    prepare(PrepareSettings(sources=sources, target=tiny_target, output=directory / "dataset"))
    return directory / "dataset"


def test_both_sides_come_through_one_extractor(
    settings: ExtractSettings, split_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafter import extraction

    started: list[Path] = []
    original = extraction._extractor
    monkeypatch.setattr(
        extraction, "_extractor", lambda plan, raw: started.append(raw) or original(plan, raw)
    )
    both = changed(settings, dataset=split_dataset, evaluation_output=tmp_path / "held-out")

    record = extract(both)

    assert len(started) == 1
    assert (record.split, record.num_conversations) == ("train", 2)
    held_out = open_states(tmp_path / "held-out").record
    assert (held_out.split, held_out.num_conversations) == ("evaluation", 1)
    assert not list(tmp_path.rglob(".spool"))
    # The held-out side asked for on its own is found, and is what it would have been on its own.
    alone = changed(settings, dataset=split_dataset, split="evaluation", output=tmp_path / "held-out")
    assert extract(alone) == held_out
    assert len(started) == 1
    assert extract(changed(alone, output=tmp_path / "alone")).shards == held_out.shards


def test_tokens_of_conversations_that_are_read_at_the_same_time_are_all_counted(
    settings: ExtractSettings, split_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafter import extraction

    counted: list[int] = []
    original = extraction._read_all

    async def read_all(*arguments: Any) -> int:
        counted.append(await original(*arguments))
        return counted[-1]

    monkeypatch.setattr(extraction, "_read_all", read_all)
    monkeypatch.setattr(extraction.Plan, "num_in_flight", 3)
    both = changed(settings, dataset=split_dataset, evaluation_output=tmp_path / "held-out")
    record = extract(both)
    assert counted == [record.num_tokens + open_states(tmp_path / "held-out").record.num_tokens]


def test_only_the_side_that_is_missing_is_extracted(
    settings: ExtractSettings, split_dataset: Path, tmp_path: Path
) -> None:
    train = changed(settings, dataset=split_dataset)
    record, before = extract(train), files(settings.output)
    assert extract(changed(train, evaluation_output=tmp_path / "held-out")) == record
    assert files(settings.output) == before
    assert open_states(tmp_path / "held-out").record.num_conversations == 1


def test_a_second_output_beside_the_held_out_side_is_refused(
    settings: ExtractSettings, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="evaluation_output is for split=train"):
        ExtractSettings.model_validate(
            {**settings.model_dump(), "split": "evaluation", "evaluation_output": tmp_path / "held-out"}
        )


def test_output_of_other_settings_is_refused(settings: ExtractSettings) -> None:
    extract(settings)
    with pytest.raises(DataError, match="states of other data or settings"):
        extract(changed(settings, max_answer_tokens=5))


def test_only_a_missing_shard_is_made_again(settings: ExtractSettings) -> None:
    record = extract(settings)
    before = files(settings.output)
    (settings.output / record.shards[1].file).unlink()
    assert extract(settings).shards == record.shards
    after = files(settings.output)
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] != before[name]] == [record.shards[1].file]


def test_states_that_are_not_finite_stop_the_run(settings: ExtractSettings, tmp_path: Path) -> None:
    target = Path(shutil.copytree(settings.target, tmp_path / "target"))
    weights = load_file(target / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match="is not finite"):
        extract(
            changed(
                settings,
                target=target,
                answers="given",
                dataset=make_dataset(target, tmp_path / "d", [["q", "a"]]),
            )
        )
    assert not (settings.output / "manifest.json").exists()


def test_disk_that_does_not_suffice_is_refused_before_anything_is_computed(
    settings: ExtractSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(settings.output.parent)._replace(free=10**6)
    monkeypatch.setattr("drafter.extraction_plan.shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr("drafter.extraction._extractor", lambda *_: pytest.fail("started"))
    with pytest.raises(DataError, match=r"needs up to 0\.\d GB for \d+ tokens; 0\.0 GB are free"):
        extract(settings)


def test_disk_that_runs_full_stops_the_run_and_room_lets_it_continue(
    settings: ExtractSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_to_full_disk(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("drafter.shards.save_file", save_to_full_disk)
        with pytest.raises(DataError, match="the disk is full"):
            extract(settings)
    assert not files(settings.output)
    assert extract(settings).num_conversations == len(CONVERSATIONS)


def test_auxiliary_layers_have_to_ascend(settings: ExtractSettings) -> None:
    with pytest.raises(DataError, match="three ascending layer ids"):
        extract(changed(settings, auxiliary_layers=(3, 2, 5)))


def run_extract(settings: ExtractSettings) -> subprocess.Popen[bytes]:
    file = settings.output.with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(settings.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-m", "drafter", "extract", "--settings", str(file)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finished_shards(directory: Path) -> list[str]:
    """Shards with their record, which is written after them: a kill takes none of these back."""
    return [json.loads(f.read_text())["file"] for f in sorted(directory.glob("shard-?????.json"))]


def kill_when(process: subprocess.Popen[bytes], reached: Callable[[], bool]) -> None:
    wait_until(reached, process, interval_s=0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_killed_run_continues_and_repeats_no_finished_conversation(
    settings: ExtractSettings, tmp_path: Path
) -> None:
    conversations = [[f"Question {i}"] for i in range(24)]
    dataset = make_dataset(settings.target, tmp_path / "many", conversations)
    settings = changed(settings, dataset=dataset, conversations_per_shard=8, max_answer_tokens=150)
    spooled = settings.output / ".spool" / "done"
    ids = [c.id for c in load_conversations(dataset, "train")]

    def later() -> list[str]:
        """Conversations of shards to come."""
        return ids[8 * len(finished_shards(settings.output)) :]

    def kept() -> set[str]:
        return {name for name in later() if (spooled / f"{name}.json").exists()}

    kill_when(run_extract(settings), lambda: bool(finished_shards(settings.output)) and len(kept()) >= 2)
    before = {name: files(settings.output)[name] for name in finished_shards(settings.output)}
    missing = sorted(set(later()) - kept())
    with pytest.raises(DataError):
        open_states(settings.output)  # not taken for done
    written: list[str] = []
    from drafter.state_spool import Spool

    original = Spool.put

    def put(self: Spool, conversation: Any, result: Any) -> int:
        written.append(conversation.id)
        return original(self, conversation, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spool, "put", put)
        record = extract(settings)
    assert before.items() <= files(settings.output).items()
    assert sorted(written) == missing
    uninterrupted = extract(changed(settings, output=tmp_path / "again"))
    assert record.shards == uninterrupted.shards, "the same bytes as without the kill"


# --- The real target through vLLM ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_settings(tmp_path_factory: pytest.TempPathFactory) -> ExtractSettings:
    target = smollm2.ensure_target(ROOT / smollm2.TARGET)
    directory = tmp_path_factory.mktemp("real")
    questions = [
        [f"Write a Python function that returns the {name} of a list."] for name in ("sum", "mean", "median")
    ]
    conversations = [
        *questions,
        ["Hi!", "Hello.", "What is 2+2?", "4", "And 3+3?"],
        ["Tell me about birds.", "They fly."],
    ]
    return ExtractSettings(
        dataset=make_dataset(target, directory, conversations),
        target=target,
        output=directory / "states",
        max_answer_tokens=40,
        conversations_per_shard=2,
        concurrency=4,
        # In float32 what is left is the rounding of the stored states; bf16 differs by 3 % after 30 layers.
        server={"python": ROOT / ".venv-vllm/bin/python", "dtype": "float32"},
    )


@pytest.fixture(scope="module")
def real_states(real_settings: ExtractSettings) -> HiddenStates:
    """States of a run whose process was killed after its first shard and which two servers then finished."""
    process = run_extract(real_settings)
    kill_when(process, lambda: len(finished_shards(real_settings.output)) >= 1)
    before = {name: files(real_settings.output)[name] for name in finished_shards(real_settings.output)}
    record = extract(changed(real_settings, num_servers=2))
    assert before.items() <= files(real_settings.output).items()
    assert record.num_conversations == 5
    return open_states(real_settings.output, load_target(real_settings.target).fingerprint)


@pytest.mark.vllm
@pytest.mark.slow
def test_states_of_vllm_agree_with_transformers_layer_by_layer(
    real_settings: ExtractSettings, real_states: HiddenStates, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from drafter.reference_extraction import ReferenceExtractor

    target = load_target(real_settings.target)
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    layers = (*target.default_auxiliary_layers, target.num_layers)
    reference = ReferenceExtractor(model, layers, tmp_path, 0.0, target.eos_token_ids)
    for index in range(len(real_states)):
        document = real_states.document(index)
        expected = reference.hidden_states(document.input_ids[:-1]).float()  # [T, 4, H]
        found = torch.cat([document.auxiliary, document.final], dim=-1)[:-1].unflatten(-1, (4, -1)).float()
        for position, layer in enumerate(layers):
            # The first token's state is hundreds of times larger than others and would hide them.
            error = (found[1:, position] - expected[1:, position]).norm() / expected[1:, position].norm()
            assert error < 0.005, f"layer {layer} of conversation {document.id}: {error:.3f}"
        with torch.no_grad():
            predicted = model.lm_head(model.model.norm(document.final[:-1].float())).argmax(-1)
        answer = int(document.loss_mask.nonzero()[-1]) - 5
        agreement = (predicted[answer:] == document.input_ids[answer + 1 :]).float().mean()
        assert agreement > 0.9, "final states lead to the tokens that were sampled"


@pytest.mark.vllm
@pytest.mark.slow
def test_manifest_of_vllm_describes_what_is_there(
    real_settings: ExtractSettings, real_states: HiddenStates
) -> None:
    record: StatesRecord = real_states.record
    assert record.num_tokens == int(real_states.lengths.sum())
    assert record.num_supervised_tokens == sum(int(real_states.loss_mask(i).sum()) for i in range(5))
    assert record.greedy_answers
    assert not (real_settings.output / ".spool").exists()
    real_states.verify()
