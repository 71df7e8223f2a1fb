"""Real architectures in vLLM: states extracted by it, a drafter trained on them, served without a changed token.

`REFUSED` is what this version of vLLM cannot do on a CPU, in its own words. Such a test fails when a newer one
can: move its entry to `SERVED`, and correct docs/targets.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.errors import ServerError
from drafter.reference_extraction import ReferenceExtractor
from drafter.serving import VllmServer
from drafter.shards import Document
from drafter.state_server import extraction_arguments
from drafter.target import load_target
from tests.conftest import serve
from tests.drafter.architectures import make_architecture
from tests.drafter.tiny import make_documents, write_states
from tests.served.trained_on_states import (
    assert_same_answers,
    documents_of,
    drafting_server,
    extract_with_vllm,
    train_for_seconds,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# Architecture -> changes of its shape.
SERVED: dict[str, dict[str, Any]] = {
    "llama with llama3 RoPE": {},
    "qwen3": {},
    "qwen3-moe": {},
    "gpt-oss": {"num_hidden_layers": 12},  # see REFUSED
    "gemma4": {},
}


@pytest.fixture(scope="module", params=SERVED)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target") / "target"
    return make_architecture(directory, request.param, **SERVED[request.param])


@pytest.fixture(scope="module")
def states(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_with_vllm(target, tmp_path_factory.mktemp("extraction"))


@pytest.fixture(scope="module")
def documents(states: Path) -> list[Document]:
    return documents_of(states)


def test_states_agree_with_transformers(target: Path, documents: list[Document], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = load_target(target)
    layers = (*shape.default_auxiliary_layers, shape.num_layers)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    reference = ReferenceExtractor(model, layers, tmp_path, 0.0, frozenset())
    for document in documents[:8]:
        expected = reference.hidden_states(document.input_ids[:-1])
        found = torch.cat([document.auxiliary, document.final], dim=-1)[:-1].unflatten(-1, (4, -1)).float()
        for position, layer in enumerate(layers):
            error = (found[:, position] - expected[:, position]).norm() / expected[:, position].norm()
            assert error < 0.005, f"layer {layer}: {error:.4f}"


def test_greedy_output_is_the_same_with_the_drafter(
    target: Path, states: Path, documents: list[Document], tmp_path: Path
) -> None:
    """Extraction has answered greedily without one, in the same vLLM."""
    drafter = train_for_seconds(states, target, tmp_path)
    with drafting_server(target, drafter, tmp_path / "server.log") as server:
        assert_same_answers(server, documents)


def _extraction_from_gemma3(directory: Path) -> VllmServer:
    target = make_architecture(directory / "target", "gemma3")
    return serve(target, directory / "server.log", *extraction_arguments((2, 4, 5, 8), directory))


def _gpt_oss_of_few_layers(directory: Path) -> VllmServer:
    """Four sliding layers, four full ones and the drafter's two, which are full as well: too uneven."""
    target = make_architecture(directory / "target", "gpt-oss")
    states = write_states(directory / "states", target, make_documents(target, 8))
    drafter = train_for_seconds(states, target, directory, num_epochs=1)
    return drafting_server(target, drafter, directory / "server.log")


def _gemma4_with_images(directory: Path) -> VllmServer:
    target = make_architecture(directory / "target", "gemma4 with images")
    return serve(target, directory / "server.log")


def _gguf(directory: Path) -> VllmServer:
    """What kind of files they are does not matter: there is no loader to read them."""
    target = make_architecture(directory / "target", "llama")
    return serve(target, directory / "server.log", "--quantization", "gguf")


REFUSED: dict[str, tuple[Callable[[Path], VllmServer], str]] = {
    "states of gemma3": (
        _extraction_from_gemma3,
        "Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested",
    ),
    "GGUF": (_gguf, "Unknown quantization method: gguf"),
    # The lock of `.venv-vllm` leaves it out: text models need none.
    "gemma4 with images": (_gemma4_with_images, "No module named 'torchvision'"),
    "gpt-oss with half as many drafter layers as sliding ones": (
        _gpt_oss_of_few_layers,
        "All drafting layers should belong to the same kv cache group",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_vllm_refuses_it_still_refuses(case: str, tmp_path: Path) -> None:
    make, words = REFUSED[case]
    server = make(tmp_path)
    with pytest.raises(ServerError, match="has ended"):
        server.start().wait_until_ready()
    assert words in server.log_path.read_text()
