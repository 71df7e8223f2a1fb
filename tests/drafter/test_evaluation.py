"""What an evaluation measures, keeps and reuses. The last tests start real vLLM servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafter import evaluation, measurement
from drafter.answers import Answer
from drafter.benchmark_client import Load
from drafter.config import CandidateSettings, EvaluateSettings, PrepareSettings, SourceSettings
from drafter.conversations import prepare
from drafter.errors import CheckpointError, DataError, ServerError
from drafter.evaluation import evaluate, identical_share
from drafter.held_out import choose_prompts
from drafter.machine import describe_machine
from drafter.measurement import (
    Bench,
    SpeedTask,
    SpeedUnit,
    Variant,
    num_requests,
    speed_tasks,
    to_cell,
    variants,
)
from drafter.progress import track
from drafter.records import EvaluationReport
from tests.drafter.synthetic_evaluation import make_cell, make_report
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dataset(servable_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty conversations, ten of them held out per domain."""
    folder = tmp_path_factory.mktemp("dataset")
    for domain in ("code", "chat"):
        lines = [
            {
                "messages": [
                    {"role": "user", "content": f"{domain} {number}"},
                    {"role": "assistant", "content": "yes"},
                ]
            }
            for number in range(20)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{domain}.jsonl").write_text(text, encoding="utf-8")
    sources = (
        SourceSettings(uri=str(folder / "code.jsonl"), domain="code"),
        SourceSettings(uri=str(folder / "chat.jsonl"), domain="chat", use="evaluation"),
    )
    prepare(
        PrepareSettings(
            sources=sources, target=servable_target, output=folder / "prepared", evaluation_share=0.5
        )
    )
    return folder / "prepared"


def settings_for(dataset: Path, target: Path, output: Path, **changes: object) -> EvaluateSettings:
    """A small evaluation; `changes` go on top."""
    values: dict[str, object] = {
        "dataset": dataset,
        "target": target,
        "output": output,
        "num_speculative_tokens": (3,),
        "concurrency": (1, 4),
        "max_answer_tokens": 16,
        "prompts_per_domain": 6,
        "requests_per_concurrency": 4,
        "identity_prompts": 4,
        "measure_schedule": False,  # whether there is a switch is chance, with servers this small
        "server": {"max_num_seqs": 16, "max_model_len_tokens": 512},
        **changes,
    }
    return EvaluateSettings.model_validate(values)


def test_servers_started_together_cannot_share_a_port(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave the port empty"):
        settings_for(tmp_path, tmp_path, tmp_path, servers_at_once=2, server={"port": 8000})


def test_no_speculation_is_always_measured_and_first(tmp_path: Path) -> None:
    candidate = CandidateSettings(name="challenger", path=tmp_path)
    settings = settings_for(
        tmp_path, tmp_path, tmp_path, candidates=(candidate,), num_speculative_tokens=(5, 3, 3)
    )
    assert [variant.label for variant in variants(settings)] == ["none", "challenger-k3", "challenger-k5"]
    assert [variant.label for variant in variants(settings_for(tmp_path, tmp_path, tmp_path))] == ["none"]


@pytest.mark.parametrize(
    ("full_grid", "expected"),
    [((), [("chat", 1), ("code", 1), ("code", 4)]), (("chat",), [("chat", 1), ("chat", 4), ("code", 1)])],
)
def test_domain_that_did_not_train_is_measured_at_the_lowest_concurrency_only(
    tmp_path: Path, full_grid: tuple[str, ...], expected: list[tuple[str, int]]
) -> None:
    settings = settings_for(tmp_path, tmp_path, tmp_path, full_grid_domains=full_grid)
    tasks = speed_tasks(settings, ["chat", "code"], ["code"])
    assert [(task.domain, task.concurrency) for task in tasks] == expected


def test_without_a_trained_domain_every_domain_gets_the_full_grid(tmp_path: Path) -> None:
    assert len(speed_tasks(settings_for(tmp_path, tmp_path, tmp_path), ["a", "b"], [])) == 4


def test_requests_grow_with_the_root_of_concurrency_and_fill_it(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, tmp_path, tmp_path, requests_per_concurrency=8)
    assert [num_requests(settings, level) for level in (1, 4, 16, 100)] == [8, 16, 32, 100]


def test_identity_compares_tokens_prompt_by_prompt() -> None:
    def answer(name: str, *ids: int) -> Answer:
        return Answer(
            conversation_id=name,
            domain="code",
            prompt_tokens=3,
            token_ids=ids,
            num_drafts=0,
            num_accepted_tokens=0,
        )

    plain = [answer("a", 1, 2), answer("b", 3), answer("c", 4, 5)]
    drafted = [answer("c", 4, 5), answer("a", 1, 2), answer("b", 3, 3)]
    assert identical_share(plain, drafted) == pytest.approx(2 / 3)


def test_result_of_the_benchmark_becomes_a_cell(tmp_path: Path) -> None:
    result = {
        "completed": 8,
        "total_output_tokens": 900,
        "output_throughput": 72.5,
        "median_ttft_ms": 40.0,
        "median_tpot_ms": 13.0,
    }
    plain = to_cell(result, Variant(None, 0), SpeedTask("code", 4))
    assert (plain.speculation, plain.drafter, plain.acceptance_length) == ("none", None, None)
    drafting = Variant(CandidateSettings(name="challenger", path=tmp_path), 3)
    counted = {
        "spec_decode_acceptance_length": 1.9,
        "spec_decode_per_position_acceptance_rates": [0.6, 0.2, 0.1],
    }
    cell = to_cell(result | counted, drafting, SpeedTask("code", 4))
    assert (cell.speculation, cell.num_speculative_tokens, cell.acceptance_length) == ("peagle", 3, 1.9)
    assert cell.acceptance_rate_per_position == (0.6, 0.2, 0.1)


def test_where_speculation_stops_paying_a_server_that_changes_over_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = CandidateSettings(name="challenger", path=tmp_path)
    settings = settings_for(tmp_path, tmp_path, tmp_path, candidates=(candidate,), measure_schedule=True)
    bench = Bench(settings, {"code": (), "chat": ()}, {}, {"challenger": "digest"})
    tasks = speed_tasks(settings, ["code", "chat"], ["code"])
    cells = [
        make_cell(None, 0, 1, 50.0, "code"),
        make_cell(None, 0, 4, 100.0, "code"),
        make_cell("challenger", 3, 1, 80.0, "code"),
        make_cell("challenger", 3, 4, 70.0, "code"),
    ]
    report = make_report(cells, [], train_domains=("code",))
    started: list[tuple[str, ...]] = []

    def measure(bench: Bench, passes: list[Any], total: int, target: Path) -> None:
        for one in passes:
            started.append(one.variant.server_arguments())
            for task in one.tasks:
                name, key = bench._speed_name(one.variant, task), bench._speed_key(one.variant, task)
                cell = make_cell("challenger", 3, task.concurrency, 79.0, task.domain)
                SpeedUnit(key=key, cell=cell).save(bench.directory / f"{name}.json")

    monkeypatch.setattr(evaluation, "_measure", measure)
    (found,) = evaluation._measure_schedules(bench, tasks, report, tmp_path)
    assert found.schedule == ((1, 1, 3), (2, 4, 0))
    assert [(cell.domain, cell.concurrency) for cell in found.cells] == [("code", 1), ("code", 4)]
    (arguments,) = started
    assert '"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 4, 0]]' in " ".join(arguments)

    assert evaluation._measure_schedules(bench, tasks, report, tmp_path) == (found,)
    assert len(started) == 1, "measured twice"
    never = Bench(settings.model_copy(update={"measure_schedule": False}), bench.prompts, {}, {})
    assert evaluation._measure_schedules(never, tasks, report, tmp_path) == ()


def test_servers_side_by_side_take_turns_and_each_is_warmed_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a first request pays for is in no speed, and a machine that slows down does so for all servers."""
    bench = Bench(settings_for(tmp_path, tmp_path, tmp_path), {"code": ()}, {}, {})
    done: list[object] = []

    class Client:
        def measure(self, server: str, load: Load, name: str) -> dict[str, Any]:
            done.append((server, load.concurrency, load.num_warmups))
            return {}

    monkeypatch.setattr(Bench, "measure_answers", lambda self, server, *_: done.append((server, "answers")))
    monkeypatch.setattr(measurement, "to_cell", lambda *_: make_cell(None, 0, 1, 50.0, "code"))
    tasks = speed_tasks(bench.settings, ["code"], ["code"])

    def pass_over(tasks: tuple[SpeedTask, ...], answers: str | None) -> evaluation._Pass:
        return evaluation._Pass(Variant(None, 0), "float32", tasks, answers, (), greedy=False)

    passes = [pass_over(tasks, "float32"), pass_over(tasks, None), pass_over((), "float32")]
    running = list(zip(passes, "abc", strict=True))
    with track(6, "measuring", "units") as progress:
        evaluation._measure_in_turns(running, Client(), bench, progress)  # type: ignore[arg-type]
    assert done == [
        ("a", "answers"),
        ("c", "answers"),
        ("a", 1, 0),
        ("b", 1, 1),
        ("a", 4, 0),
        ("b", 4, 0),
    ]


def test_prompts_are_held_out_stable_and_end_where_the_target_writes(
    dataset: Path, servable_target: Path, tmp_path: Path
) -> None:
    settings = settings_for(dataset, servable_target, tmp_path)
    prompts = choose_prompts(settings, 512)
    assert {domain: len(chosen) for domain, chosen in prompts.items()} == {"chat": 6, "code": 6}
    assert prompts == choose_prompts(settings, 512)
    assert all(
        one.text.endswith("<|im_start|>assistant\n") and "yes" not in one.text for one in prompts["chat"]
    )
    other = choose_prompts(settings.model_copy(update={"seed": 1}), 512)
    assert {one.conversation_id for one in other["chat"]} != {one.conversation_id for one in prompts["chat"]}


def test_prompts_that_leave_no_room_for_an_answer_are_refused(
    dataset: Path, servable_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="leaves room"):
        choose_prompts(settings_for(dataset, servable_target, tmp_path), 20)


def test_candidate_that_does_not_fit_stops_before_any_server(
    dataset: Path, servable_target: Path, tmp_path: Path
) -> None:
    candidate = CandidateSettings(name="challenger", path=tmp_path / "nothing")
    with pytest.raises(CheckpointError):
        evaluate(settings_for(dataset, servable_target, tmp_path, candidates=(candidate,)))


def test_missing_vllm_environment_stops_with_what_to_do(
    dataset: Path, servable_target: Path, tmp_path: Path
) -> None:
    settings = settings_for(dataset, servable_target, tmp_path, server={"python": tmp_path / "python"})
    with pytest.raises(ServerError, match="make setup"):
        evaluate(settings)


def test_machine_is_described_with_its_cores() -> None:
    assert f"{os.cpu_count()} cores" in describe_machine()


# --- with vLLM --------------------------------------------------------------------------------------


def unit_times(output: Path) -> dict[str, float]:
    """Finished units and when each was written."""
    return {path.name: path.stat().st_mtime for path in (output / "cells").glob("*.json")}


def check_whole(report: EvaluationReport) -> None:
    """What a report of one candidate at K=3 has to hold."""
    assert {(c.drafter, c.domain, c.concurrency) for c in report.cells} == {
        (drafter, domain, level)
        for drafter in (None, "challenger")
        for domain, level in (("code", 1), ("code", 4), ("chat", 1))
    }
    assert all(cell.output_tokens_per_second > 0 and cell.ttft_ms > 0 for cell in report.cells)
    assert all(len(c.acceptance_rate_per_position) == 3 for c in report.cells if c.drafter)
    assert len(report.prompts) == 12
    assert all(prompt.num_drafts > 0 for prompt in report.prompts)
    assert report.greedy_identical_share["challenger"]["float32"] == 1.0
    assert report.versions["vllm"]


@pytest.mark.vllm
def test_killed_evaluation_leaves_no_server_and_goes_on_where_it_stopped(
    dataset: Path, servable_target: Path, servable_drafter: Path, tmp_path: Path
) -> None:
    """SIGKILL after some units of the drafter: the rest is measured, nothing that was finished is repeated.

    The run that goes on starts two servers at a time, the first run one; the numbers are of one evaluation.
    """
    candidate = CandidateSettings(name="challenger", path=servable_drafter)
    settings = settings_for(dataset, servable_target, tmp_path / "evaluation", candidates=(candidate,))
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from drafter.config import EvaluateSettings; from drafter.evaluation import evaluate\n"
            "evaluate(EvaluateSettings.model_validate_json(sys.argv[1]))",
            settings.model_dump_json(),
        ],
        cwd=REPOSITORY,
    )
    wait_until(lambda: any("challenger" in name for name in unit_times(settings.output)), child)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    finished = unit_times(settings.output)
    assert not (settings.output / "evaluation.json").exists()

    report = evaluate(settings.model_copy(update={"servers_at_once": 2}))
    check_whole(report)
    again = unit_times(settings.output)
    assert {name: again[name] for name in finished} == finished
    assert _servers_of(settings.output) == []

    logs = {path: path.stat().st_mtime_ns for path in settings.output.rglob("*.log")}
    assert evaluate(settings) == report
    assert {path: path.stat().st_mtime_ns for path in settings.output.rglob("*.log")} == logs, (
        "a server started"
    )


def _servers_of(output: Path) -> list[str]:
    """Command lines of processes that work in the evaluation's log folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(output.absolute() / "logs"):
                found.append((process / "cmdline").read_text(encoding="utf-8").replace("\0", " "))
        except OSError:
            continue
    return found
