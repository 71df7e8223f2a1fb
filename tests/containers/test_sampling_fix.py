"""The sampling fix of the vLLM environment: needed, sufficient, and confined to where it is needed.

Runs in vLLM's own environment, where the package is installed. If "the stock functions" tests fail, this
vLLM no longer needs the fix: take its version out of `_AFFECTED_MINOR_VERSIONS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.containers.vllm_script import run_in_vllm

ROOT = Path(__file__).parents[2]

# Each function is tried stock, then after what a vLLM worker does when it starts.
SCRIPT = """
import json, torch
import vllm
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils as kernels
from vllm.v1.sample.ops import topk_topp_sampler as sampler
from fledge_vllm import sampling_fix

current_platform.import_kernels()
TEMPERATURES, COUNTS = torch.tensor([0.7, 0.0, 0.3]), torch.tensor([2, 3, 6], dtype=torch.int32)

def expand():
    output = torch.full((6,), -1.0)
    kernels._expand_kernel_impl(output, TEMPERATURES, COUNTS, 0, 1)
    return output.tolist()

def top_k(rows):
    logits = torch.arange(4.0).repeat(rows, 1)
    try:
        kept = sampler.apply_top_k_top_p(logits, torch.full((rows,), 2), None)
    except Exception as error:
        return str(error)
    return torch.isfinite(kept).sum(dim=1).tolist()

found = {"stock": {"expand": expand(), "no rows": top_k(0)}}
stock = kernels._expand_kernel_impl

true_version = vllm.__version__
vllm.__version__ = "0.33.1"
sampling_fix.register()
found["replaced in another version"] = kernels._expand_kernel_impl is not stock
vllm.__version__ = true_version

is_cpu = type(current_platform).is_cpu
type(current_platform).is_cpu = lambda self: False
sampling_fix.register()
found["replaced on an accelerator"] = kernels._expand_kernel_impl is not stock
type(current_platform).is_cpu = is_cpu

from vllm.plugins import load_general_plugins
load_general_plugins()
sampling_fix.register()  # vLLM may load plugins more than once
current_platform.register_triton_kernel_overrides()
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens
found["fixed"] = {
    "expand": expand(), "no rows": top_k(0), "rows": top_k(3),
    "as the sampler calls it": expand_batch_to_tokens(TEMPERATURES, COUNTS, 6, replace_from=0, replace_to=1).tolist(),
    "integers": expand_batch_to_tokens(torch.tensor([5, 9, 7], dtype=torch.int32), COUNTS, 6).tolist(),
    "a request without drafts": expand_batch_to_tokens(
        torch.tensor([0.5, 0.6]), torch.tensor([0, 2], dtype=torch.int32), 2).tolist(),
}
print("RESULT" + json.dumps(found))
"""
EXPECTED = [pytest.approx(x) for x in (0.7, 0.7, 1.0, 0.3, 0.3, 0.3)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_in_vllm(SCRIPT)


def test_stock_functions_of_this_vllm_are_wrong(found: dict[str, Any]) -> None:
    assert found["stock"]["expand"] != EXPECTED, "vLLM repeats temperatures rightly now"
    assert "reduction dim" in found["stock"]["no rows"], "vLLM takes a step without draft tokens now"


def test_fix_repeats_each_requests_value_for_its_draft_tokens(found: dict[str, Any]) -> None:
    fixed = found["fixed"]
    assert fixed["expand"] == EXPECTED
    assert fixed["as the sampler calls it"] == EXPECTED
    assert fixed["integers"] == [5, 5, 9, 7, 7, 7]
    assert fixed["a request without drafts"] == [pytest.approx(0.6)] * 2


def test_fix_lets_a_step_without_draft_tokens_pass_and_cuts_the_others(found: dict[str, Any]) -> None:
    assert found["fixed"]["no rows"] == []
    assert found["fixed"]["rows"] == [2, 2, 2]


def test_other_versions_and_accelerators_are_left_alone(found: dict[str, Any]) -> None:
    assert not found["replaced in another version"]
    assert not found["replaced on an accelerator"]


def test_package_depends_on_nothing_that_could_change_the_locked_environment() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "containers/vllm/pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
