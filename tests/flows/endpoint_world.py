"""SageMaker of this machine with fake containers, S3 and CloudWatch in moto, a registry: where flows deploy in tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import yaml

from drafter.files import write_text_atomically
from tasks.endpoint_settings import AlarmSettings, DeploySettings, ProbeSettings, RolloutSettings
from tasks.promotion import champion, record_approval
from tasks.settings import Places
from tasks.version_record import Approval, VersionRecord
from tests.containers.control_plane import ROLE, ROOT, ControlPlane
from tests.tasks.registered_versions import register_version

BUCKET = "fledge"
ENDPOINT = "birds"
TARGET_URI = f"s3://{BUCKET}/targets/tiny/"
TINY = {
    "title": "Tiny",
    "jumpstart_id": None,
    "hugging_face_id": None,
    "num_layers": 30,
    "hidden_size": None,
    "vocab_size": 64,
    "auxiliary_layers": [2, 15, 27],
    "mask_token_id": None,
    "published_head": None,
    "num_speculative_tokens": 3,
    "image": "vllm:tiny",
    "instance_types": ["ml.m5.xlarge", "ml.c5.2xlarge"],
    "fallback_instance_types": ["ml.c5.2xlarge"],
    "model_download_timeout_s": 600,
    "startup_timeout_s": 600,
    "network_isolation": True,
    "prices": {
        "ml.m5.xlarge": {
            "usd_per_hour": 0.25,
            "region": "us-east-1",
            "source": "a test",
            "read_on": "2026-11-29",
        }
    },
}
# Alarms are judged on whole periods of 10 s, so these are the fastest that there are.
FAST_ALARMS = AlarmSettings(period_s=10, evaluation_periods=1, datapoints=1, max_latency_ratio=None)


class EndpointWorld:
    """Everything that a deployment touches, and what tests ask of it."""

    def __init__(self, places: Places, plane: ControlPlane, moto_url: str) -> None:
        self.places = places
        self.plane = plane
        self.moto_url = moto_url
        self.cloudwatch = plane.cloudwatch
        self.s3 = boto3.client("s3", endpoint_url=moto_url, region_name="us-east-1")

    @staticmethod
    def environment(home: Path, plane: ControlPlane, moto_url: str) -> dict[str, str]:
        """What `fledge up` would set."""
        return {
            "FLEDGE_HOME": str(home),
            "FLEDGE_BUCKET": BUCKET,
            "FLEDGE_EXECUTION_ROLE_ARN": ROLE,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_ENDPOINT_URL_SAGEMAKER": plane.url,
            "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": plane.url,
            **{
                f"AWS_ENDPOINT_URL_{name}": moto_url
                for name in ("S3", "CLOUDWATCH", "APPLICATION_AUTO_SCALING", "STS")
            },
        }

    def prepare(self, folder: Path) -> None:
        """A bucket with a target in it, and a catalogue with one model."""
        self.s3.create_bucket(Bucket=BUCKET)
        self.s3.put_object(Bucket=BUCKET, Key="targets/tiny/config.json", Body=b"{}")
        write_text_atomically(folder / "catalogue.yaml", yaml.safe_dump({"tiny": TINY}))

    def register(self, folder: Path, name: str) -> VersionRecord:
        """An approved version whose fleet answers under its own name."""
        version = register_version(self.places, folder, name)
        approve(version)
        return version

    def settings(self, version: VersionRecord, /, **changes: Any) -> DeploySettings:
        """A quick canary of a version."""
        fields: dict[str, Any] = {
            "version": version.version,
            "endpoint_name": ENDPOINT,
            "model": "tiny",
            "target_uri": TARGET_URI,
            "rollout": RolloutSettings(percent=50, wait_s=2, termination_wait_s=1, max_execution_s=600),
            "alarms": FAST_ALARMS,
            "probe": ProbeSettings(prompts=("Fledge?",), interval_s=0.2, num_smoke=2),
        }
        return DeploySettings(**{**fields, **changes})

    def champion(self) -> str | None:
        found = champion()
        return found.version if found else None

    def config_name(self) -> str:
        return str(self.plane.describe(ENDPOINT)["EndpointConfigName"])

    def start_flow(self, settings: DeploySettings) -> subprocess.Popen[bytes]:
        """The deployment as a process of its own, to be killed."""
        from prefect.settings import get_current_settings

        server = get_current_settings().api.url  # the tests' own, instead of another one for this process
        code = (
            "import sys; from pathlib import Path; import tasks.catalogue as c; "
            "c.CATALOGUE = Path(sys.argv[2]); from flows.deploy_endpoint import deploy_endpoint; "
            "from tasks.endpoint_settings import DeploySettings; "
            "deploy_endpoint(DeploySettings.model_validate_json(sys.argv[1]))"
        )
        log = open(self.places.home / "flow.log", "ab")  # noqa: SIM115 - the process keeps it
        return subprocess.Popen(
            [sys.executable, "-c", code, settings.model_dump_json(), str(self.catalogue)],
            cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "PREFECT_API_URL": str(server)}, start_new_session=True,
        )  # fmt: skip

    @property
    def catalogue(self) -> Path:
        return self.places.home / "catalogue.yaml"

    def delete_endpoint_by_hand(self) -> None:
        """Whatever the test has left, gone; configs stay."""
        names = [one["EndpointName"] for one in self.plane.sagemaker.list_endpoints()["Endpoints"]]
        for name in names:
            self.plane.settled(name)
            self.plane.sagemaker.delete_endpoint(EndpointName=name)


def approve(version: VersionRecord) -> None:
    """Record that somebody approved it."""
    from datetime import UTC, datetime

    record_approval.fn(
        version.version,
        Approval(
            outcome="approved",
            approver="alice",
            reason="a test",
            at=datetime.now(UTC),
            flow_run="test",
            previous_champion=version.champion,
        ),
    )


def copy_database(empty_mlflow: Path, home: Path) -> None:
    """MLflow's tables, which take seconds to make."""
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(empty_mlflow, home / "mlflow.db")
