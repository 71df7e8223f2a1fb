"""The training step's benchmark: what it counts, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import training_step
from benchmarks.training_step import CONFIG, needed_operations, parse, run_peer
from drafter.chains import Chains


def test_needed_operations_are_counted_by_hand() -> None:
    """Three slots, one chain of two placeholders from slot 0."""
    chains = Chains(torch.tensor([0]), torch.tensor([2]), num_depths=3)
    qkv, output, feed_forward = 576 * 960, 576 * 576, 3 * 576 * 1536
    head, fuse = 576 * 8192, 3 * 576 * 576
    real = 3 * (4 * (qkv + output + feed_forward) + qkv + head)
    placeholders = 2 * (3 * qkv + 4 * (output + feed_forward) + head)
    weights = 3 * (real + placeholders) + 2 * 3 * fuse + 3 * head
    pairs = (1 + 2 + 3) + (1 + 1) + (1 + 2)
    attention = 6 * 4 * pairs * 576
    assert needed_operations(CONFIG, chains, 3) == 2 * (weights + attention)


def test_a_peer_that_would_not_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "available_memory_gb", lambda: 8.0)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("begun"))
    for peer in ("speculators", "flat"):
        reason = run_peer(peer, 20_000, parse(["--device", "cpu"]))["reason"]
        assert "7 GiB are available" in str(reason)


def test_a_peer_that_takes_the_machines_memory_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(training_step, "available_memory_gb", lambda: 0.1)
    reason = training_step._watch(process, timeout_s=60)  # type: ignore[arg-type]
    assert reason is not None
    assert "no more memory" in reason
    assert process.wait(timeout=10) != 0


@pytest.mark.slow
def test_the_last_line_is_json() -> None:
    command = [sys.executable, "-m", "benchmarks.training_step", "--num-tokens", "64", "--repeats", "1"]
    command += ["--no-warm-up", "--device", "cpu", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(result.stdout.splitlines()[-1])
    for peer in ("fledge", "speculators"):
        assert measured[peer]["tokens_per_s"] > 0
        assert measured[peer]["peak_memory_gb"] > 0.1
    fledge = measured["fledge"]
    assert fledge["loss"] == pytest.approx(measured["speculators"]["loss"], rel=0.02)
    assert measured["ratio"] == pytest.approx(
        fledge["tokens_per_s"] / measured["speculators"]["tokens_per_s"]
    )
    # No bound above: one short step beside a rate that was measured a moment earlier may come out ahead of it.
    assert measured["matmul_gflop_per_s"] > 0
    assert measured["share_of_matmul_rate"] == pytest.approx(
        fledge["needed_gflop"] * fledge["tokens_per_s"] / 64 / measured["matmul_gflop_per_s"]
    )
    assert measured["machine"]
    assert measured["versions"]["speculators"] == "0.9.0"
    assert measured["flat"] is None
    assert measured["flat_reason"] == "not asked for"
