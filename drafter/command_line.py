"""Settings classes as commands: flags from fields, a JSON file beneath them, and errors in plain words.

One mechanism for `python -m drafter VERB` and for `fledge VERB`: pydantic-settings turns a settings class
into flags (`--server.max-num-seqs`), so a field added there is a flag here with nothing to write.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict

from drafter.errors import FledgeError

EXIT_USER_ERROR = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
CONTINUES = "continues where it stopped when run again"


@dataclass(frozen=True)
class Verb:
    """A command: its settings, what it calls, and what it tells its reader.

    Args:
        name: as typed.
        settings: model whose fields are the flags.
        run: called with the settings; returns a record, a list of records or None. Imports lazily.
        purpose: one paragraph.
        examples: commands that can be pasted.
        exit_code: of a result that came back; 0 if not given.
        show: prints a result for people; a table of its fields if not given.
        as_plain: a result as what --json prints; its fields if not given.
    """

    name: str
    settings: type[BaseModel]
    run: Callable[[Any], Any]
    purpose: str
    examples: tuple[str, ...]
    exit_code: Callable[[Any], int] = lambda result: 0
    show: Callable[[Any], None] = field(default=lambda result: show_result(result))
    as_plain: Callable[[Any], Any] = field(default=lambda result: plain_result(result))


def run_verbs(program: str, description: str, verbs: Sequence[Verb], arguments: Sequence[str]) -> int:
    """Run the verb that `arguments` name and return the process's exit code.

    0: done. 1: a problem that the user can fix, printed without a traceback. 2: not a command.
    130 and 143: Ctrl-C and SIGTERM.
    """
    by_name = {verb.name: verb for verb in verbs}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview(program, description, verbs))
        return 0 if arguments else 2
    verb = by_name.get(arguments[0])
    if verb is None:
        print(
            f"{program}: no verb {arguments[0]!r}\n  expected: one of {', '.join(by_name)}", file=sys.stderr
        )
        print(f"  what to do: see {program} --help", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _terminate)
    try:
        settings, options = parse_verb(program, verb, arguments[1:])
        result = verb.run(settings)
        if options.json:
            print(json.dumps(verb.as_plain(result)))
        else:
            verb.show(result)
        sys.stdout.flush()
        return verb.exit_code(result)
    except FledgeError as error:
        print(f"{program} {verb.name}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except ValidationError as error:
        print(_explain(program, verb, error), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"\n{program} {verb.name}: interrupted; {CONTINUES}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except _Terminated:
        print(f"{program} {verb.name}: terminated; {CONTINUES}", file=sys.stderr)
        return EXIT_TERMINATED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USER_ERROR
    except OSError as error:
        return _explain_os_error(f"{program} {verb.name}", error)


def parse_verb(program: str, verb: Verb, arguments: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """Settings from flags over the JSON of `--settings`, and the options every verb has.

    Raises:
        ValidationError: a value is not what its field takes, or a required one is missing.
        FledgeError: the settings file cannot be read.
    """
    parser, source = build_parser(program, verb)
    options = parser.parse_args(list(arguments))
    flags = source(parsed_args=options)()
    values = _read_settings_file(options.settings) if options.settings else {}
    return verb.settings.model_validate(_merged(values, flags)), options


def build_parser(program: str, verb: Verb) -> tuple[argparse.ArgumentParser, CliSettingsSource[Any]]:
    """The argument parser of a verb; every field of its settings is a flag."""

    class Flags(BaseSettings, verb.settings):  # type: ignore[name-defined]
        model_config = SettingsConfigDict(cli_hide_none_type=True, cli_avoid_json=True)

    examples = "\n".join(f"  {example}" for example in verb.examples)
    parser = _Parser(
        prog=f"{program} {verb.name}",
        description=verb.purpose,
        epilog=f"examples:\n{examples}\n\nA list takes JSON, a,b,c or the flag repeated.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--settings", metavar="FILE", type=Path, help="JSON with values of the flags below; flags win over it"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON on the last line of stdout"
    )
    source: CliSettingsSource[Any] = CliSettingsSource(
        Flags,
        root_parser=parser,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        formatter_class=_HelpFormatter,
    )
    return parser, source


class _Parser(argparse.ArgumentParser):
    """Names the mistake and where help is, instead of a screen of flags above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n  what to do: see {self.prog} --help\n")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Flags in one column, as wide as the terminal allows."""

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog, max_help_position=36, width=min(shutil.get_terminal_size((110, 24)).columns, 110)
        )


class _Terminated(BaseException):
    """SIGTERM, raised where the program stands so that servers and files are closed on the way out."""


def _terminate(signum: int, frame: Any) -> NoReturn:
    raise _Terminated


def _overview(program: str, description: str, verbs: Sequence[Verb]) -> str:
    width = max(len(verb.name) for verb in verbs)
    lines = [f"usage: {program} VERB [flags]", "", description, "", "verbs:"]
    lines += [f"  {verb.name:<{width}}  {verb.purpose.splitlines()[0]}" for verb in verbs]
    return "\n".join([*lines, "", f"`{program} VERB --help` explains a verb's flags and shows examples."])


def _read_settings_file(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FledgeError(
            f"--settings {path}: {error}",
            "a JSON file with the verb's settings",
            "check the path and the JSON",
        ) from None
    if not isinstance(values, dict):
        raise FledgeError(
            f"--settings {path}: a JSON {type(values).__name__}",
            'an object, as in {"output": "somewhere"}',
            "write the settings as one JSON object",
        )
    return values


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _explain(program: str, verb: Verb, error: ValidationError) -> str:
    if not issubclass(verb.settings, BaseModel) or error.title != verb.settings.__name__:
        raise error  # a bug of ours, not the user's flags: keep the traceback
    lines = []
    for problem in error.errors(include_url=False):
        path = ".".join(str(part).replace("_", "-") for part in problem["loc"])
        flag = f"--{path}" if path else "flags that do not fit together,"
        given = "is missing" if problem["type"] == "missing" else f"given {problem['input']!r}"
        expected = "a value" if problem["type"] == "missing" else problem["msg"].removeprefix("Value error, ")
        lines.append(f"{program} {verb.name}: {flag} {given}\n  expected: {expected}")
    return "\n".join([*lines, f"  what to do: see {program} {verb.name} --help"])


def _explain_os_error(command: str, error: OSError) -> int:
    import errno

    no_room_or_right = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
    no_directory = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
    if error.errno not in no_room_or_right + no_directory:
        raise error
    print(f"{command}: {error}", file=sys.stderr)
    print("  expected: a directory with room on the disk, and the right to write there", file=sys.stderr)
    print(f"  what to do: free space or choose another --output; the work {CONTINUES}", file=sys.stderr)
    return EXIT_USER_ERROR


def show_result(result: Any) -> None:
    """A record as a table, a list by lines."""
    if isinstance(result, BaseModel):
        from rich.table import Table

        from drafter.terminal_report import make_console

        table = Table(title=type(result).__name__, show_header=False, title_justify="left")
        for name, value in result.model_dump(mode="json").items():
            table.add_row(name, _short(value))
        make_console().print(table)
    elif isinstance(result, str):
        print(result)
    elif result:
        for item in result:
            print(item)


def plain_result(result: Any) -> Any:
    """A record, or a list of records, as JSON's own types."""
    if isinstance(result, BaseModel):
        return result.model_dump(mode="json")
    if isinstance(result, list | tuple):
        return [plain_result(item) for item in result]
    return result


def _short(value: Any) -> str:
    """A value as a table shows it: long lists by their length, the rest as JSON."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 or isinstance(value, str) else f"{len(value)} entries"
