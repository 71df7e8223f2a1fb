"""A tiny exported drafter and its evaluation on disk, for tests that train and serve nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from drafter.provenance import Provenance, digest_of_drafter, digests_of
from drafter.records import DrafterRecord, EvaluationReport, ReleaseDecision, TrainingRecord


def export_drafter(
    directory: Path, target_fingerprint: str = "target0", weight: float = 0.0
) -> DrafterRecord:
    """A directory with the three files of an export; the weights are one number."""
    directory.mkdir(parents=True)
    config = {"num_hidden_layers": 2, "draft_vocab_size": 16, "vocab_size": 64, "norm_before_residual": False}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": numpy.full((1,), weight)}, directory / "model.safetensors")
    files = digests_of(directory)
    record = DrafterRecord(
        path=str(directory),
        digest=digest_of_drafter(files),
        num_parameters=1,
        target_fingerprint=target_fingerprint,
    )
    training = TrainingRecord(
        path=str(directory),
        fingerprint="training0",
        states_digest="states0",
        target_fingerprint=target_fingerprint,
        num_steps=1,
        num_tokens=1,
        num_epochs=1,
        final_loss=1,
        elapsed_s=1,
        tokens_per_s=1,
        peak_memory_gb=1,
        warm_start=None,
    )
    Provenance(
        drafter=record,
        files=files,
        training=training,
        settings={},
        states_digest="states0",
        dataset_digest="dataset0",
        target_fingerprint=target_fingerprint,
        auxiliary_layers=(2, 15, 27),
        mask_token_id=0,
        code_version="0",
        versions={},
    ).save(directory / "provenance.json")
    return record


def evaluation_of(drafter: DrafterRecord, path: Path) -> EvaluationReport:
    """A report without cells: what registration reads of one."""
    path.mkdir(parents=True, exist_ok=True)
    report = EvaluationReport(
        path=str(path),
        digest="evaluation0",
        target_fingerprint=drafter.target_fingerprint,
        dataset_digest="dataset0",
        drafters={"challenger": drafter.digest},
        cells=(),
        prompts=(),
        acceptance=(),
        greedy_identical_share={},
        train_domains=("code",),
        machine="",
        versions={},
        elapsed_s=1,
    )
    report.save(path / "evaluation.json")
    return report


APPROVED = ReleaseDecision(outcome="approve", reasons=("AL 2.0 is above 1.5",), num_speculative_tokens=3)
REJECTED = ReleaseDecision(outcome="reject", reasons=("AL 1.1 is below 1.5",))
