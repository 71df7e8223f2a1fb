"""`fledge`: its verbs, help that needs no service, and what its mistakes get."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from drafter.command_line import Verb, parse_verb
from flows.command_line import VERBS, exit_code_of_doctor
from tasks.check_machine import Check
from tasks.retrain_settings import RetrainSettings
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.command_line", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=PATIENCE_S,
    )


def test_verbs_are_frozen() -> None:
    assert [verb.name for verb in VERBS] == [
        "retrain", "report", "runs",
        "models", "approve", "deploy", "status", "chat", "roll-back", "delete", "logs",
        "up", "doctor",
    ]  # fmt: skip


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import contextlib, sys\n"
        "from flows.command_line import main\n"
        "sys.argv = ['fledge', 'retrain', '--help']\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print(sorted({'prefect', 'mlflow', 'great_expectations', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S
    )
    assert "--training.time-budget-s" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_examples_parse(verb: Verb) -> None:
    assert verb.examples
    for example in verb.examples:
        if "--settings" not in example:
            parse_verb("fledge", verb, shlex.split(example)[2:])


def test_a_run_can_be_repeated_from_its_settings_as_json(tmp_path: Path) -> None:
    settings = RetrainSettings(seed=3, training={"num_epochs": 1.5, "betas": (0.8, 0.9)})
    file = tmp_path / "retrain.json"
    file.write_text(settings.model_dump_json())
    parsed, _ = parse_verb("fledge", VERBS[0], ["--settings", str(file)])
    assert parsed == settings
    changed, _ = parse_verb(
        "fledge", VERBS[0], ["--settings", str(file), "--training.num-epochs", "2", "--force"]
    )
    assert (changed.training.num_epochs, changed.training.betas, changed.force) == (2, (0.8, 0.9), True)


@pytest.mark.parametrize("name", ["report", "retrain"])
def test_a_user_error_exits_with_1_and_no_traceback(tmp_path: Path, name: str) -> None:
    arguments = {"report": ["no-such-run"], "retrain": ["--gate.confidence", "2"]}[name]
    done = run(name, *arguments, FLEDGE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "expected:" in done.stderr
    assert "what to do:" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_runs_is_no_error(tmp_path: Path) -> None:
    assert "fledge retrain" in run("runs", FLEDGE_HOME=str(tmp_path)).stdout
    assert json.loads(run("runs", "--json", FLEDGE_HOME=str(tmp_path)).stdout.splitlines()[-1]) == []


def test_doctor_exits_with_1_when_something_needs_doing() -> None:
    well, ill = Check(name="a", found="b"), Check(name="a", found="b", remedy="c")
    assert exit_code_of_doctor([well]) == 0
    assert exit_code_of_doctor([well, ill]) == 1


def test_flags_of_numbers_that_may_only_be_some_are_taken() -> None:
    deploy = next(verb for verb in VERBS if verb.name == "deploy")
    settings, _ = parse_verb("fledge", deploy, ["3", "--alarms.period-s", "10"])
    assert settings.alarms.period_s == 10
    with pytest.raises(ValidationError):
        parse_verb("fledge", deploy, ["3", "--alarms.period-s", "20"])


def test_the_short_form_of_drafting_takes_one_branch_only() -> None:
    short = ["--parallel-drafting-spec.num-speculative-tokens", "4"]
    deploy = next(verb for verb in VERBS if verb.name == "deploy")
    settings, _ = parse_verb("fledge", deploy, ["3", *short])
    assert settings.chosen_num_speculative_tokens == 4
    done = run("deploy", "3", *short, "--parallel-drafting-spec.num-branches", "2")
    assert done.returncode == 1
    assert "num_branches is 2, expected 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_flags_that_contradict_each_other_are_told_as_such() -> None:
    short = ["--parallel-drafting-spec.num-speculative-tokens", "4"]
    done = run("deploy", "3", "--num-speculative-tokens", "2", *short)
    assert done.returncode == 1
    assert "flags that do not fit together" in done.stderr
    assert "expected: num_speculative_tokens is 2 and the parallel_drafting_spec says 4" in done.stderr


def test_an_approval_names_who_and_why() -> None:
    done = run("approve", "3")
    assert done.returncode == 1
    assert "--as is missing" in done.stderr
    assert "--reason is missing" in done.stderr
