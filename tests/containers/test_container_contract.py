"""The serving container's contract, case by case; see the table in `container_contract.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from containers.local.container_contract import (
    ContainerCannotStart,
    container_arguments,
    on_this_machine,
    server_arguments,
)

SPECULATIVE_CONFIG = (
    '{"model": "/opt/ml/additional-model-data-sources/eagle", "method": "eagle3", '
    '"num_speculative_tokens": 3, "parallel_drafting": true}'
)


def arguments_of(name: str, value: str) -> list[str]:
    """What one SM_VLLM_ variable becomes, without the port and the model."""
    environment = {f"SM_VLLM_{name}": value, "HF_MODEL_ID": "m"}
    return container_arguments(environment, Path("/nowhere"))[4:]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TENSOR_PARALLEL_SIZE", "8", ["--tensor-parallel-size", "8"]),
        ("ENFORCE_EAGER", "true", ["--enforce-eager"]),
        ("ENFORCE_EAGER", "TRUE", ["--enforce-eager"]),
        ("ENFORCE_EAGER", " True ", ["--enforce-eager"]),
        ("ENFORCE_EAGER", "false", []),
        ("ENFORCE_EAGER", "False", []),
        ("ENFORCE_EAGER", "", ["--enforce-eager"]),
        ("ENFORCE_EAGER", "1", ["--enforce-eager", "1"]),
        ("SERVED_MODEL_NAME", '["drafter-v7", "smollm2"]', ["--served-model-name", "drafter-v7", "smollm2"]),
        ("CUDAGRAPH_CAPTURE_SIZES", "[1, 2, 4]", ["--cudagraph-capture-sizes", "1", "2", "4"]),
        ("CUSTOM_OPS", "[]", []),
        ("X", '[true, null, {"a": 1}]', ["--x", "true", "", '{"a":1}']),
        ("LORA_MODULES", '[{"name":"a","path":}]', ["--lora-modules", '[{"name":"a","path":}]']),
        ("LORA_MODULES", '{"name": "a"} {"name": "b"}', ["--lora-modules", '{"name":"a"}', '{"name":"b"}']),
        ("LORA_MODULES", "a=/loras/a", ["--lora-modules", "a=/loras/a"]),
        ("ALLOWED_ORIGINS", '["https://a"]', ["--allowed-origins", '["https://a"]']),
        ("MIDDLEWARE", '["a.B"]', ["--middleware", '["a.B"]']),
        ("SPECULATIVE_CONFIG", SPECULATIVE_CONFIG, ["--speculative-config", SPECULATIVE_CONFIG]),
        ("SPECULATIVE_CONFIG", '{"a": 1,\n "b": 2}', ["--speculative-config", '{"a": 1,\n "b": 2}']),
        ("LIMIT_MM_PER_PROMPT", '{"image": {"count": 2}}', ["--limit-mm-per-prompt", '{"image": {"count": 2}}']),
        ("CHAT_TEMPLATE", "{% for m in x %}{{ m }} {% endfor %}", None),
        ("MODEL_LOADER_EXTRA", "100%", None),
        ("MODEL_TAG", "a value with spaces", None),
    ],
)  # fmt: skip
def test_a_variable_becomes_the_arguments_that_the_image_makes_of_it(
    name: str, value: str, expected: list[str] | None
) -> None:
    verbatim = ["--" + name.lower().replace("_", "-"), value]
    assert arguments_of(name, value) == (verbatim if expected is None else expected)


def test_variables_come_in_alphabetical_order_after_the_port_and_others_are_left_alone(
    tmp_path: Path,
) -> None:
    environment = {"SM_VLLM_MODEL": "m", "PATH": "/bin", "HF_TOKEN": "secret", "SM_VLLM_DTYPE": "auto"}
    assert container_arguments(environment, tmp_path) == ["--port", "8080", "--dtype", "auto", "--model", "m"]


def test_the_model_is_the_variable_else_the_model_folder_else_the_hub_id(tmp_path: Path) -> None:
    both = {"SM_VLLM_MODEL": "named", "HF_MODEL_ID": "hub"}
    hub = {"HF_MODEL_ID": "hub"}
    assert container_arguments(hub, tmp_path)[2:] == ["--model", "hub"]
    assert container_arguments({}, tmp_path)[2:] == []
    (tmp_path / "config.json").write_text("{}")
    assert container_arguments(both, tmp_path)[2:] == ["--model", "named"]
    assert container_arguments(hub, tmp_path)[2:] == ["--model", "/opt/ml/model"]


def test_paths_of_the_container_point_into_the_instances_folder_inside_json_too(tmp_path: Path) -> None:
    root = tmp_path / 'a "quoted" folder'
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text("{}")
    environment = {"SM_VLLM_SPECULATIVE_CONFIG": SPECULATIVE_CONFIG, "PROCESS_AUTO_RECOVERY": "false"}
    arguments = server_arguments(environment, root, 4321)
    assert arguments[: arguments.index("--speculative-config")] == [
        "--port", "4321", "--model", str(root / "model"),
    ]  # fmt: skip
    config = json.loads(arguments[arguments.index("--speculative-config") + 1])
    assert config["model"] == str(root / "additional-model-data-sources" / "eagle")
    assert config["parallel_drafting"] is True


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/opt/ml/model", "/r/model"),
        ("a=/opt/ml/model/x,b=/opt/ml", "a=/r/model/x,b=/r"),
        ("s3://bucket/opt/ml/model", "s3://bucket/opt/ml/model"),
        ("/data/opt/ml/model", "/data/opt/ml/model"),
        ("/opt/mlx", "/opt/mlx"),
    ],
)
def test_only_whole_container_paths_are_mapped(value: str, expected: str) -> None:
    assert on_this_machine(value, Path("/r")) == expected


def test_the_containers_port_is_a_port_of_this_machine_and_no_other_is() -> None:
    environment = {"SM_VLLM_MODEL": "m", "SM_VLLM_PORT": "9000", "SM_VLLM_DTYPE": "auto"}
    arguments = server_arguments(environment, Path("/r"), 4321)
    assert arguments[:2] == ["--port", "4321"]
    assert arguments[-4:] == ["--port", "9000", "--host", "127.0.0.1"]  # it would listen where nobody asks


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, ["--dtype", "float32"]), ({"SM_VLLM_DTYPE": "bfloat16"}, ["--dtype", "bfloat16"])],
)
def test_without_a_number_format_it_is_this_machines_own(
    environment: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("containers.local.container_contract.native_number_format", lambda: "float32")
    arguments = server_arguments({"SM_VLLM_MODEL": "m", **environment}, Path("/r"), 4321)
    assert arguments.count("--dtype") == 1
    at = arguments.index("--dtype")
    assert arguments[at : at + 2] == expected


def test_whatever_host_is_asked_for_the_server_binds_to_loopback() -> None:
    arguments = server_arguments({"SM_VLLM_MODEL": "m", "SM_VLLM_HOST": "0.0.0.0"}, Path("/r"), 4321)
    assert arguments[-2:] == ["--host", "127.0.0.1"]


def test_the_images_supervisor_halves_percent_signs_and_stops_at_a_lone_one() -> None:
    supervised = {"SM_VLLM_MODEL": "m", "SM_VLLM_X": "50%% of a"}
    assert "50% of a" in server_arguments(supervised, Path("/r"), 1)
    assert "50%% of a" in server_arguments({**supervised, "PROCESS_AUTO_RECOVERY": "false"}, Path("/r"), 1)
    lone = {"SM_VLLM_MODEL": "m", "SM_VLLM_CHAT_TEMPLATE": "{% if x %}"}
    with pytest.raises(ContainerCannotStart, match="PROCESS_AUTO_RECOVERY=false"):
        server_arguments(lone, Path("/r"), 1)
    assert "{% if x %}" in server_arguments({**lone, "PROCESS_AUTO_RECOVERY": "false"}, Path("/r"), 1)
