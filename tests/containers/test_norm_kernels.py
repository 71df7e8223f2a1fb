"""Norms on CPU by vLLM's kernels: needed, the same numbers, and confined. Run inside the vLLM environment.

If "this vLLM" fails, it uses its kernels by itself: take its version out of `_AFFECTED_MINOR_VERSIONS`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.containers.vllm_script import run_in_vllm

SCRIPT = """
import json, torch
import vllm
from vllm.platforms import current_platform
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from fledge_vllm import norm_kernels

current_platform.import_kernels()
kernels, called = torch.ops._C, []

class Counting:
    def __getattr__(self, name):
        def call(*arguments):
            called.append(name)
            return getattr(kernels, name)(*arguments)
        return call

def layer(dtype=torch.float32, compiled=False, **arguments):
    how = CompilationConfig() if compiled else CompilationConfig(mode=0)  # 0: --enforce-eager
    with set_current_vllm_config(VllmConfig(compilation_config=how)):
        norm = RMSNorm(64, eps=1e-5, dtype=dtype, **arguments)
    if norm.has_weight:
        norm.weight.data.copy_(torch.linspace(0.5, 2.0, 64))
    return norm

def tried(x, residual=None, norm=None):
    norm = norm or layer(x.dtype)
    expected = norm.forward_native(x.clone(), None if residual is None else residual.clone())
    called.clear()
    found = norm.forward_cpu(x, residual)
    pairs = [(expected, found)] if residual is None else list(zip(expected, found))
    return {"kernels": list(called), "difference": max((a.float() - b.float()).abs().max().item() for a, b in pairs)}

stock = RMSNorm.forward_cpu
found = {}
true_version = vllm.__version__
vllm.__version__ = "0.33.1"
norm_kernels.register()
found["replaced in another version"] = RMSNorm.forward_cpu is not stock
vllm.__version__ = true_version
is_cpu = type(current_platform).is_cpu
type(current_platform).is_cpu = lambda self: False
norm_kernels.register()
found["replaced on an accelerator"] = RMSNorm.forward_cpu is not stock
type(current_platform).is_cpu = is_cpu

torch.manual_seed(0)
rows = lambda dtype=torch.float32: torch.randn(5, 64).to(dtype)
torch.ops._C = Counting()
found["stock"] = tried(rows(), rows())
from vllm.plugins import load_general_plugins
load_general_plugins()
norm_kernels.register()  # vLLM may load plugins more than once
is_used = lambda one: getattr(one._forward_method, "__func__", None) is norm_kernels.norm
found["used"], found["used when compiled"] = is_used(layer()), is_used(layer(compiled=True))
found["alone"] = tried(rows())
found["with residual"] = tried(rows(), rows())
found["bfloat16"] = tried(rows(torch.bfloat16), rows(torch.bfloat16))
found["three dimensions"] = tried(torch.randn(5, 3, 64))
found["not contiguous"] = tried(torch.randn(5, 128)[:, :64])
found["a part of the values"] = tried(rows(), norm=layer(var_hidden_size=32))
found["without weight"] = tried(rows(), norm=layer(has_weight=False))
found["weight of another format"] = tried(rows(), norm=layer(torch.bfloat16))
print("RESULT" + json.dumps(found))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_in_vllm(SCRIPT)


def test_this_vllm_leaves_its_kernels_unused(found: dict[str, Any]) -> None:
    assert found["stock"]["kernels"] == []


def test_layers_call_the_kernels(found: dict[str, Any]) -> None:
    assert found["used"]
    assert found["alone"]["kernels"] == ["rms_norm"]
    assert found["three dimensions"]["kernels"] == ["rms_norm"]
    assert found["with residual"]["kernels"] == ["fused_add_rms_norm"]
    assert found["bfloat16"]["kernels"] == ["fused_add_rms_norm"]


@pytest.mark.parametrize("how", ["alone", "three dimensions", "with residual"])
def test_kernels_compute_what_pytorch_does(found: dict[str, Any], how: str) -> None:
    assert found[how]["difference"] < 2e-6


def test_in_bfloat16_they_differ_by_one_rounding(found: dict[str, Any]) -> None:
    assert found["bfloat16"]["difference"] <= 2**-5  # half a unit in the last place of values below 8, twice


@pytest.mark.parametrize(
    "how", ["not contiguous", "a part of the values", "without weight", "weight of another format"]
)
def test_what_kernels_cannot_do_is_left_to_pytorch(found: dict[str, Any], how: str) -> None:
    assert found[how] == {"kernels": [], "difference": 0.0}


def test_a_compiled_model_keeps_what_its_compiler_fuses(found: dict[str, Any]) -> None:
    assert not found["used when compiled"]


def test_other_versions_and_accelerators_are_left_alone(found: dict[str, Any]) -> None:
    assert not found["replaced in another version"]
    assert not found["replaced on an accelerator"]
