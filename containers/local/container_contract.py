"""What a serving container is given and what it makes of it: the contract of AWS's vLLM image.

Read in AWS's sources (github.com/aws/deep-learning-containers, `scripts/docker/vllm/sagemaker_args.py`, its
tests `test/vllm/test_sagemaker_args.py`, and `sagemaker_entrypoint.sh` beside it), and tried with the package
that runs inside the image (`model_hosting_container_standards`, its `standard-supervisor`):

| given | becomes |
|---|---|
| `SM_VLLM_TENSOR_PARALLEL_SIZE=8` | `--tensor-parallel-size 8`; variables in alphabetical order after `--port 8080` |
| `true`, `TRUE`, ` true ` | the bare flag |
| `false` in any spelling | nothing at all |
| an empty value | the bare flag |
| a JSON array | the flag and one argument an element: objects and arrays as compact JSON, `true` and `false` in lower case, null as an empty argument |
| an empty JSON array | nothing at all |
| an array for `--allowed-origins`, `--allowed-methods`, `--allowed-headers`, `--middleware` | one argument, verbatim |
| one JSON object | one argument, verbatim: spaces and quotes as given |
| several JSON objects with blanks between | one argument an object, as compact JSON |
| anything else, a broken array and a chat template included | one argument, verbatim |
| no `SM_VLLM_MODEL`, or an empty one | `--model /opt/ml/model` when that folder holds anything, else `--model $HF_MODEL_ID`, else no model |

With `PROCESS_AUTO_RECOVERY` other than `false`, the image starts the server through supervisord, whose
configuration treats `%` as its own: `%%` arrives as `%`, and a lone `%` stops the container before it starts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter.machine import native_number_format

PREFIX = "SM_VLLM_"
CONTAINER_PORT = 8080
CONTAINER_ROOT = "/opt/ml"
MODEL_FOLDER = "model"
ADDITIONAL_SOURCES_FOLDER = "additional-model-data-sources"

_ONE_ARGUMENT_FLAGS = frozenset(
    {"--allowed-origins", "--allowed-methods", "--allowed-headers", "--middleware"}
)
# A path of the container, as a whole value or inside one; not the tail of a longer path such as s3://x/opt/ml.
_CONTAINER_PATH = re.compile(rf"(?<![\w./-]){re.escape(CONTAINER_ROOT)}(?![\w.-])")


class ContainerCannotStart(Exception):
    """The container would end before its server starts. The message is what its log would say."""


def server_arguments(environment: Mapping[str, str], root: Path, port: int) -> list[str]:
    """Arguments of vLLM's server for a Model's environment, on this machine.

    Args:
        environment: what the Model gives its container.
        root: folder of this machine that stands for `/opt/ml`.
        port: port of this machine that stands for the container's 8080.

    What the image does not say: without a number format in the environment, the one that this machine multiplies.

    Raises:
        ContainerCannotStart: a percent sign that the image's supervisor refuses.
    """
    arguments = container_arguments(environment, root / MODEL_FOLDER)
    if _is_supervised(environment):
        arguments = [_as_supervisor_passes_it_on(argument) for argument in arguments]
    arguments = [on_this_machine(argument, root) for argument in arguments]
    if "--dtype" not in arguments:
        # vLLM would take the checkpoint's format, and computes bfloat16 on a CPU without it number by number.
        arguments += ["--dtype", native_number_format()]
    # The last one wins: a container binds to every address, a process of this machine to loopback only.
    return [*_with_port(arguments, port), "--host", "127.0.0.1"]


def container_arguments(environment: Mapping[str, str], model_folder: Path) -> list[str]:
    """What the image's entrypoint hands to vLLM, word for word; see the table above.

    Args:
        model_folder: where `/opt/ml/model` is on this machine; only whether it holds anything matters.
    """
    arguments = ["--port", str(CONTAINER_PORT), *_model_arguments(environment, model_folder)]
    for name in sorted(environment):
        if name.startswith(PREFIX):
            flag = "--" + name.removeprefix(PREFIX).lower().replace("_", "-")
            arguments += _flag_with_values(flag, environment[name])
    return arguments


def _model_arguments(environment: Mapping[str, str], model_folder: Path) -> list[str]:
    if environment.get(f"{PREFIX}MODEL"):
        return []  # comes with the other variables
    if model_folder.is_dir() and any(model_folder.iterdir()):
        return ["--model", f"{CONTAINER_ROOT}/{MODEL_FOLDER}"]
    if environment.get("HF_MODEL_ID"):
        return ["--model", environment["HF_MODEL_ID"]]
    return []


def _flag_with_values(flag: str, value: str) -> list[str]:
    spelling = value.strip().lower()
    if spelling == "false":
        return []
    if spelling == "true" or not value:
        return [flag]
    values = [value] if flag in _ONE_ARGUMENT_FLAGS else _values(value)
    return [flag, *values] if values else []


def _values(value: str) -> list[str]:
    """The arguments that one value stands for; none for an empty array."""
    text = value.strip()
    if text.startswith("[") and text.endswith("]"):
        try:
            elements = json.loads(text)
        except ValueError:
            return [value]  # vLLM says better what is wrong with it
        return [_as_argument(element) for element in elements]
    if text.startswith("{") and text.endswith("}"):
        objects = _json_objects(text)
        if len(objects) > 1:
            return [_as_argument(element) for element in objects]
    return [value]


def _json_objects(text: str) -> list[dict[str, Any]]:
    """The objects of `{...} {...}`; empty when the text is anything else."""
    decoder, objects, start = json.JSONDecoder(), [], 0
    while start < len(text):
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            return []
        if not isinstance(value, dict):
            return []
        objects.append(value)
        start = len(text) - len(text[end:].lstrip())
    return objects


def _as_argument(element: Any) -> str:
    if isinstance(element, dict | list):
        return json.dumps(element, separators=(",", ":"))
    if isinstance(element, bool):
        return str(element).lower()
    return "" if element is None else str(element)


def _is_supervised(environment: Mapping[str, str]) -> bool:
    return environment.get("PROCESS_AUTO_RECOVERY", "true").lower() in ("true", "1")


def _as_supervisor_passes_it_on(argument: str) -> str:
    if "%" in argument.replace("%%", ""):
        raise ContainerCannotStart(
            f"Failed to generate supervisord configuration: invalid interpolation syntax in {argument!r}. "
            "Write %% for a percent sign, or set PROCESS_AUTO_RECOVERY=false, which starts vLLM without a supervisor."
        )
    return argument.replace("%%", "%")


def on_this_machine(value: str, root: Path) -> str:
    """The value with every `/opt/ml` path in it pointing into `root`, inside JSON too."""
    path = os.path.abspath(root)
    if value.lstrip().startswith(("{", "[")):
        path = json.dumps(path)[1:-1]
    return _CONTAINER_PATH.sub(lambda _: path, value)


def _with_port(arguments: Sequence[str], port: int) -> list[str]:
    """The container's 8080 as a port of this machine. Any other is kept: a container that listens there, instead
    of where SageMaker asks, fails its health check here too."""
    ours = list(arguments)
    for index, argument in enumerate(ours[:-1]):
        if argument == "--port" and ours[index + 1] == str(CONTAINER_PORT):
            ours[index + 1] = str(port)
    return ours
