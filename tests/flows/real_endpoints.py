"""What tests of real endpoints do: make versions of a drafter, promote them, look at what serves."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from safetensors.torch import load_file, save_file

from drafter.files import write_text_atomically
from drafter.provenance import (
    CONFIG_NAME,
    FILE_NAME,
    WEIGHTS_NAME,
    digest_of_drafter,
    digests_of,
    read_provenance,
)
from flows.promote_drafter import promote_drafter
from tasks.endpoint_settings import (
    AlarmSettings,
    CaptureSettings,
    DeploySettings,
    ProbeSettings,
    RolloutSettings,
)
from tasks.promote_settings import ApprovalAnswer, PromoteSettings
from tasks.settings import Places
from tasks.version_record import VersionRecord
from tests.containers.control_plane import ROOT, ControlPlane
from tests.flows.endpoint_world import BUCKET, ENDPOINT, EndpointWorld, approve
from tests.flows.steady_load import PROMPTS, SteadyLoad
from tests.tasks.registered_versions import register_version

CATALOGUE_ENTRY: dict[str, Any] = {
    "title": "Tiny",
    "jumpstart_id": None,
    "hugging_face_id": None,
    "target": "targets/tiny",
    "num_layers": None,
    "hidden_size": None,
    "vocab_size": None,
    "auxiliary_layers": None,
    "mask_token_id": None,
    "published_head": None,
    "num_speculative_tokens": 3,
    "image": "fledge/vllm-cpu:0.32.0",
    "instance_types": ["ml.m5.xlarge"],
    "model_download_timeout_s": 600,
    "startup_timeout_s": 600,
    "network_isolation": True,
    "environment": {
        "SM_VLLM_DTYPE": "float32",
        "SM_VLLM_MAX_MODEL_LEN": "256",
        "SM_VLLM_MAX_NUM_SEQS": "8",
        "SM_VLLM_ENFORCE_EAGER": "true",
        # The load asks for no usage in its streams; captures tell acceptance all the same.
        "SM_VLLM_ENABLE_FORCE_INCLUDE_USAGE": "true",
    },
    "local": True,
}


def add_idle_layers(config_path: Path, tensors: dict[str, torch.Tensor], count: int) -> None:
    """Layers behind the last one whose projections are all zero: what enters them leaves them."""
    config = json.loads(config_path.read_text())
    last = config["num_hidden_layers"] - 1
    assert last > 0, "the first layer reads twice the width"
    own = {key: tensor for key, tensor in tensors.items() if key.startswith(f"layers.{last}.")}
    for index in range(last + 1, last + 1 + count):
        for key, tensor in own.items():
            still = torch.ones_like(tensor) if "layernorm" in key else torch.zeros_like(tensor)
            tensors[key.replace(f"layers.{last}.", f"layers.{index}.", 1)] = still
    config["num_hidden_layers"] += count
    config_path.write_text(json.dumps(config))


class SeenAlarms:
    """When CloudWatch's alarms first went off as a `with` block lasts: they are deleted with their update."""

    def __init__(self, cloudwatch: Any) -> None:
        self.at: dict[str, float] = {}  # seconds of time.monotonic()
        self._cloudwatch = cloudwatch
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._ended.wait(0.5):
            for alarm in self._cloudwatch.describe_alarms(StateValue="ALARM")["MetricAlarms"]:
                self.at.setdefault(alarm["AlarmName"], time.monotonic())


class RealEndpoints(EndpointWorld):
    """The real vLLM behind the local SageMaker, and drafters that differ in a way that shows or does not.

    Args:
        drafter: a trained drafter of `target`, the catalogue's one entry.
    """

    def __init__(
        self, places: Places, plane: ControlPlane, moto_url: str, target: Path, drafter: Path
    ) -> None:
        super().__init__(places, plane, moto_url)
        self._target, self._drafter = target, drafter
        plane.environment["FLEDGE_VLLM_PYTHON"] = str(ROOT / ".venv-vllm/bin/python")

    # Judged on whole periods of 10 s, the fastest there are. Beside another fleet that starts, latency on
    # a small machine says nothing about a drafter.
    alarms = AlarmSettings(period_s=10, evaluation_periods=2, datapoints=2, max_latency_ratio=None)

    def prepare(self, folder: Path) -> None:
        """A bucket, and a catalogue with one model of this machine."""
        self.s3.create_bucket(Bucket=BUCKET)
        shutil.copytree(self._target, folder / "targets" / "tiny")
        write_text_atomically(self.catalogue, yaml.safe_dump({"tiny": CATALOGUE_ENTRY}))

    def make(self, name: str, scrambled: bool = False, num_idle_layers: int = 0) -> VersionRecord:
        """A version that the gate let through.

        Args:
            name: one letter.
            scrambled: its weights are in disorder: it loads, and guesses nothing right.
            num_idle_layers: further layers that change nothing: its guesses are the same, and take longer.
        """
        folder = self.places.home / "made" / f"drafter-{name}"
        shutil.copytree(self._drafter, folder)
        tensors = load_file(folder / WEIGHTS_NAME)
        add_idle_layers(folder / CONFIG_NAME, tensors, num_idle_layers)
        generator = torch.Generator().manual_seed(ord(name))
        for key, tensor in tensors.items():
            if scrambled and tensor.is_floating_point():
                order = torch.randperm(tensor.numel(), generator=generator)
                tensors[key] = tensor.flatten()[order].view(tensor.shape)
            elif key == "norm.weight":
                tensor[0] += 1e-3 * ord(name)  # another file, the same guesses
        save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        files = digests_of(folder)
        provenance = read_provenance(folder)
        record = provenance.drafter.model_copy(
            update={"path": str(folder), "digest": digest_of_drafter(files)}
        )
        provenance.model_copy(update={"drafter": record, "files": files}).save(folder / FILE_NAME)
        return register_version(self.places, folder.parent, name)

    def real_settings(self, version: VersionRecord, **changes: Any) -> DeploySettings:
        """A quick canary of a version."""
        fields: dict[str, Any] = {
            "version": version.version,
            "endpoint_name": ENDPOINT,
            "model": "tiny",
            "rollout": RolloutSettings(percent=30, wait_s=30, termination_wait_s=5, max_execution_s=900),
            "alarms": self.alarms,
            "capture": CaptureSettings(),
            "probe": ProbeSettings(prompts=PROMPTS, max_tokens=32, interval_s=1.0, num_smoke=2),
        }
        return DeploySettings(**{**fields, **changes})

    def promote(self, version: VersionRecord, **changes: Any) -> Any:
        """Approved by alice, and deployed."""
        answer = ApprovalAnswer(decision="approve", approver="alice", reason="measured better")
        deployment = self.real_settings(version, **changes)
        return promote_drafter(PromoteSettings(version=version.version, deployment=deployment, answer=answer))

    def start_deployment(self, version: VersionRecord) -> subprocess.Popen[bytes]:
        """Approved, and being deployed by a process of its own."""
        approve(version)
        return self.start_flow(self.real_settings(version))

    def load(self, **changes: Any) -> SteadyLoad:
        return SteadyLoad(self.plane.url, ENDPOINT, **changes)

    def stage(self) -> str | None:
        """Where an update stands, in SageMaker's word; None when there is none."""
        pending = self.plane.describe(ENDPOINT).get("PendingDeploymentSummary")
        variants = pending["ProductionVariants"] if pending else []
        return str(variants[0]["VariantStatus"][0]["Status"]) if variants else None
