"""The benchmark of several ranks: it runs, and all ways compute the same loss."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_last_line_is_json_and_all_ways_find_the_same_loss() -> None:
    command = [sys.executable, "-m", "benchmarks.distributed_step", "--num-tokens", "160", "--repeats", "1"]
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    measured = json.loads(result.stdout.splitlines()[-1])
    alone, *others = measured["results"]
    assert (alone["num_ranks"], alone["distributed"], alone["ratio"]) == (1, None, 1.0)
    assert [(other["num_ranks"], other["distributed"]) for other in others] == [(2, "ddp"), (2, "fsdp2")]
    for other in others:
        assert other["loss"] == pytest.approx(alone["loss"], rel=0.01)
        assert other["tokens_per_s"] > 0
        assert 0.5 <= other["largest_share"] < 0.6
    assert measured["num_threads"] == 1
    assert measured["machine"]
