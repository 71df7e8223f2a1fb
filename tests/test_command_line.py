"""`python -m drafter`: which verbs and flags there are, what help teaches, and what mistakes get."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from drafter.__main__ import VERBS
from drafter.command_line import Verb, build_parser, parse_verb
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]
PROGRAM = "python -m drafter"
BLOCKED = ("prefect", "mlflow", "great_expectations", "boto3", "botocore", "sagemaker")
# Runs `python -m drafter ...` as on a machine without the extras: importing one of them fails.
WITHOUT_EXTRAS = f"""
import sys, runpy
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Blocker())
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drafter", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=PATIENCE_S,
    )


def fields_as_flags(model: type[BaseModel], prefix: str = "") -> set[str]:
    """`--a-b` for a field a_b, `--server.port` for a field of a nested model."""
    flags: set[str] = set()
    for name, field in model.model_fields.items():
        nested = nested_model(field.annotation)
        if nested is not None:
            flags |= fields_as_flags(nested, f"{prefix}{name}.")
        else:
            flags.add("--" + (prefix + name).replace("_", "-"))
    return flags


def nested_model(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := nested_model(part))), None)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def flags_of(verb: Verb) -> set[str]:
    parser, _ = build_parser(PROGRAM, verb)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return {option for action in shown for option in action.option_strings}


def test_verbs_are_the_stages_in_order() -> None:
    assert [verb.name for verb in VERBS] == [
        "prepare", "extract", "train", "export", "preflight", "estimate", "evaluate", "decide", "report",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_flags_are_the_fields_of_the_settings(verb: Verb) -> None:
    ours = {"--settings", "--json", "--help", "-h"}
    negations = {flag for flag in flags_of(verb) if flag.startswith("--no-")}
    assert flags_of(verb) - ours - negations == fields_as_flags(verb.settings)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_help_explains_every_flag_and_shows_examples_that_parse(verb: Verb) -> None:
    parser, _ = build_parser(PROGRAM, verb)
    undescribed = [action.option_strings for action in parser._actions if not (action.help or "").strip()]
    assert not undescribed
    assert verb.purpose.splitlines()[0].endswith(".")
    assert verb.examples
    for example in verb.examples:
        words = shlex.split(example)
        assert words[:4] == [*PROGRAM.split(), verb.name]
        parse_verb(PROGRAM, verb, words[4:])


def test_every_verb_works_without_the_extras() -> None:
    modules = ["conversations", "extraction", "trainer", "export", "preflight", "estimate", "evaluation"]
    modules += ["gate", "report"]
    code = (
        WITHOUT_EXTRAS
        + f"import importlib\nfor name in {modules!r}: importlib.import_module('drafter.' + name)\n"
    )
    code += (
        "import contextlib\n"
        "from drafter.__main__ import VERBS, main\n"
        "for verb in VERBS:\n"
        "    sys.argv = ['drafter', verb.name, '--help']\n"
        "    with contextlib.suppress(SystemExit): main()\n"
        "sys.argv = ['drafter', '--help']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert all(f"usage: {PROGRAM} {verb.name} " in done.stdout for verb in VERBS)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import contextlib, sys\n"
        "from drafter.__main__ import main\n"
        "sys.argv = ['drafter', 'train', '--help']\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout[-300:] + done.stderr


def test_a_user_error_is_printed_without_traceback(tmp_path: Path) -> None:
    done = run("decide", "--evaluation", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "expected:" in done.stderr
    assert "what to do:" in done.stderr


def test_a_value_that_does_not_fit_is_named_with_its_flag() -> None:
    done = run("train", "--states", "s", "--target", "t", "--output", "o", "--drafter.num-layers", "9")
    assert done.returncode == 1
    assert "--drafter.num-layers given '9'" in done.stderr
    assert "less than or equal to 4" in done.stderr


def test_a_missing_flag_is_named() -> None:
    done = run("export", "--target", "t")
    assert done.returncode == 1
    assert "--training is missing" in done.stderr
    assert "--output is missing" in done.stderr


def test_an_unknown_flag_or_verb_exits_with_2() -> None:
    assert run("train", "--lerning-rate", "1").returncode == 2
    unknown = run("trian")
    assert unknown.returncode == 2
    assert "prepare, extract, train" in unknown.stderr


def test_flags_win_over_the_settings_file_and_keep_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    drafter = {"num_layers": 3, "draft_vocab_size": 64}
    file.write_text(json.dumps({"states": "s", "target": "t", "output": "o", "drafter": drafter}))
    verb = next(verb for verb in VERBS if verb.name == "train")
    settings, _ = parse_verb(
        PROGRAM, verb, ["--settings", str(file), "--drafter.num-layers", "1", "--seed", "7"]
    )
    assert (settings.drafter.num_layers, settings.drafter.draft_vocab_size, settings.seed) == (1, 64, 7)
    assert type(settings) is verb.settings


def test_a_typo_in_the_settings_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text('{"states": "s", "target": "t", "output": "o", "num_epoch": 2}')
    done = run("train", "--settings", str(file))
    assert done.returncode == 1
    assert "num-epoch" in done.stderr


@pytest.mark.parametrize("text", ["{broken", "[1]", None])
def test_a_settings_file_that_cannot_be_read_is_an_error(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "train.json"
    if text is not None:
        file.write_text(text)
    done = run("train", "--settings", str(file))
    assert done.returncode == 1
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr


def test_environment_variables_are_no_settings() -> None:
    done = run("export", "--training", "a", "--output", "b", target="from-the-environment")
    assert "--target is missing" in done.stderr


PROGRAM_THAT_WAITS = """
import sys, time
from pydantic import BaseModel
from drafter.command_line import Verb, run_verbs
class Nothing(BaseModel):
    "No settings."
def wait(settings):
    try:
        print("waiting", flush=True)
        time.sleep(60)
    finally:
        print("closed", flush=True)
sys.exit(run_verbs("waiter", "Waits.", [Verb("wait", Nothing, wait, "Wait.", ())], ["wait"]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_verb_closes_what_it_opened_and_says_that_it_continues(
    number: signal.Signals, code: Literal[130, 143]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM_THAT_WAITS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert stdout == "closed\n"
    assert "continues where it stopped when run again" in stderr
    assert "Traceback" not in stderr


PROGRAM_WITH_A_RESULT = """
import sys
from pydantic import BaseModel
from drafter.command_line import Verb, run_verbs
class Result(BaseModel):
    path: str = "somewhere"
class Nothing(BaseModel):
    "No settings."
def work(settings):
    print("noise")
    return Result()
sys.exit(run_verbs("worker", "Works.", [Verb("work", Nothing, work, "Work.", ())], sys.argv[1:]))
"""


def test_json_is_the_last_line_of_stdout() -> None:
    command = [sys.executable, "-c", PROGRAM_WITH_A_RESULT, "work"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {"path": "somewhere"}
    plain = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "path" in plain.stdout
    assert "somewhere" in plain.stdout
