"""The whole flow on the real target and vLLM, killed in the middle of its stages and run again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drafter.metrics import read_metrics
from drafter.records import EvaluationReport, StatesRecord, TrainingRecord
from tasks.find_drafters import version_of_alias
from tasks.track_runs import connect, experiment_id
from tests.flows.installation import Installation, Kill, Kills
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def changed(kill: Kill) -> list[Path]:
    """Files that a later run has written again."""
    return [path for path, (mtime_ns, _) in kill.files.items() if path.stat().st_mtime_ns != mtime_ns]


def test_no_process_is_left_by_a_killed_flow(kills: Kills) -> None:
    assert kills.extraction.survivors == []
    assert kills.training.survivors == []
    assert kills.evaluation.survivors == []


def test_finished_shards_are_not_extracted_again(kills: Kills, installation: Installation) -> None:
    assert kills.extraction.files
    assert changed(kills.extraction) == []
    (manifest,) = installation.stages.glob("states-train-*/manifest.json")
    states: StatesRecord = StatesRecord.load(manifest)
    assert states.num_conversations + states.num_skipped == 10
    assert len(list(manifest.parent.glob("*.safetensors"))) == len(states.shards) == 5


def test_training_repeats_at_most_what_came_after_the_checkpoint(
    kills: Kills, installation: Installation
) -> None:
    (before,) = [path for path in kills.training.files if path.name == "metrics.jsonl"]
    checkpoint = next(path.parent for path in kills.training.files if path.parent.name.startswith("check"))
    kept = int(checkpoint.name.removeprefix("checkpoint-"))

    lines = kills.training.files[before][1].splitlines()[:kept]

    assert before.read_bytes().splitlines()[:kept] == lines
    training: TrainingRecord = TrainingRecord.load(before.parent / "training.json")
    assert [metrics.step for metrics in read_metrics(before)] == list(range(1, training.num_steps + 1))
    assert len(list(installation.stages.glob("training-*/training.json"))) == 1


def test_finished_cells_are_not_measured_again(kills: Kills) -> None:
    assert kills.evaluation.files
    assert changed(kills.evaluation) == []


def test_exactly_one_version_is_registered_and_it_is_challenger(
    kills: Kills, installation: Installation
) -> None:
    client = connect(installation.places)
    name = installation.places.model_name

    versions = client.search_model_versions(f"name = '{name}'")
    assert [f"models:/{name}/{version.version}" for version in versions] == [kills.record.registry_uri]
    assert len(client.search_logged_models([experiment_id(client, installation.places)])) == 1
    challenger = version_of_alias(client, installation.places, "challenger")
    assert kills.record.decision.approved, kills.record.decision.reasons
    assert challenger is not None
    assert str(challenger.version) == str(versions[0].version)
    assert challenger.tags["fledge.fingerprint"] == kills.record.fingerprint


def test_mlflow_has_pages_metrics_and_parameters_of_the_run(kills: Kills, installation: Installation) -> None:
    client = connect(installation.places)
    run = client.get_run(kills.record.mlflow_run_id)

    files = {
        file.path
        for folder in ("validation", "report")
        for file in client.list_artifacts(run.info.run_id, folder)
    }
    assert {"validation/validation.html", "report/report.html", "report/evaluation.json"} <= files
    assert run.data.params["drafter.num_layers"] == "1"
    assert run.info.status == "FINISHED"
    assert run.data.metrics["training.loss"] > 0
    assert run.data.metrics["challenger.k2.c1.subjects.acceptance_length"] >= 1
    assert run.data.metrics["estimate.acceptance_length"] >= 1


def test_the_benchmark_says_what_the_three_tools_cost(kills: Kills, installation: Installation) -> None:
    command = [sys.executable, "-m", "benchmarks.pipeline_overhead", "--run", kills.record.run_id, "--json"]
    output = ["--output", str(installation.places.home / "overhead")]
    printed = subprocess.run(
        [*command, *output],
        env=installation.environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=PATIENCE_S,
    ).stdout
    answer = json.loads(printed.splitlines()[-1])
    seconds = {part["name"]: part["seconds"] for part in answer["parts"]}
    assert all(value > 0 for value in seconds.values())
    took_s = (kills.record.ended_at - kills.record.started_at).total_seconds()
    assert sum(seconds.values()) == pytest.approx(answer["wall_s"]) == pytest.approx(took_s, rel=0.2)
    assert answer["overhead_share"] == pytest.approx(1 - seconds["the work itself"] / answer["wall_s"])


def test_the_same_run_again_trains_and_measures_nothing_without_a_server_too(
    kills: Kills, installation: Installation, tmp_path: Path
) -> None:
    (tmp_path / "prefect").mkdir()
    evaluation: EvaluationReport = EvaluationReport.load(Path(kills.record.evaluation) / "evaluation.json")

    again = installation.run_flow(
        PREFECT_API_URL="",
        PREFECT_HOME=str(tmp_path / "prefect"),
        PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=str(int(PATIENCE_S)),
        PREFECT_CLIENT_MAX_RETRIES="2",  # as without these tests: at its end the run's own server is gone
    )

    assert not again.trained
    assert again.registry_uri == kills.record.registry_uri
    assert again.run_id != kills.record.run_id
    assert EvaluationReport.load(Path(again.evaluation) / "evaluation.json").elapsed_s == evaluation.elapsed_s
    assert len(connect(installation.places).search_model_versions()) == 1


def test_vanished_files_are_not_trusted_to_be_there(kills: Kills, installation: Installation) -> None:
    (dataset,) = installation.stages.glob("dataset-*/train.jsonl")
    dataset.unlink()

    installation.run_flow()

    assert dataset.is_file()


def test_bad_conversations_stop_the_flow_with_the_reason(installation: Installation, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    good = {"messages": [{"role": "user", "content": "Hello?"}]}
    bad.write_text(json.dumps(good) + "\n" + json.dumps({"messages": turns}) + "\n")
    sources = [{"uri": str(bad), "use": "train"}, installation.settings["sources"][1]]
    broken = Installation(
        installation.places,
        installation.ports,
        installation.environment,
        {**installation.settings, "sources": sources},
    )

    flow = broken.start_flow()

    assert flow.wait(PATIENCE_S) != 0
    state = installation.last_flow_run()["state"]
    assert state["type"] == "FAILED"
    assert "conversations are well formed: 1 of 6 not as expected" in state["message"]
    assert "bad.jsonl" in state["message"]
    assert "what to do: correct the data" in state["message"]
    assert "Traceback" not in broken.last_lines().split("bad.jsonl")[-1]
