"""What SageMaker is asked for when a training runs as its job: settings, places, and the SDK's ModelTrainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from drafter.config import Settings, TrainSettings
from tasks.settings import Places

CHECKPOINTS = "/opt/ml/checkpoints"
_GIVEN_BY_THE_JOB = {"states", "target", "output", "warm_start"}
_INSTANCE_TYPE = r"^ml\.[a-z0-9-]+\.[a-z0-9]+$"


class TrainingJobSettings(Settings):
    """Train as a SageMaker job. Image and role are the installation's: FLEDGE_TRAINING_IMAGE, _ROLE_ARN."""

    instance_type: str = Field(
        default="ml.g6e.2xlarge",
        pattern=_INSTANCE_TYPE,
        description="Instance type, with one GPU: the trainer is one process.",
    )
    spot: bool = Field(
        default=True,
        description="Use spare capacity, at a lower price; an interrupted training continues from its checkpoint.",
    )
    max_run_s: int = Field(
        default=24 * 3600, ge=60, le=28 * 24 * 3600, description="Limit of seconds spent training."
    )
    max_wait_s: int = Field(
        default=24 * 3600, ge=0, description="Limit of seconds spent waiting for spare capacity (spot only)."
    )
    volume_gb: int = Field(
        default=100, ge=1, le=16384, description="Disk of the instance: states, target and three checkpoints."
    )
    poll_interval_s: float = Field(default=30.0, gt=0, description="Seconds between two looks at the job.")


class TrainingPlaces(BaseSettings):
    """Where training jobs run, from the environment."""

    model_config = SettingsConfigDict(
        env_prefix="FLEDGE_TRAINING_", frozen=True, extra="ignore", env_ignore_empty=True
    )

    image: str | None = Field(
        default=None, description="URI in ECR of the image built from containers/train/Dockerfile."
    )
    role_arn: str | None = Field(
        default=None,
        pattern=r"^arn:aws[a-z-]*:iam::\d{12}:role/.+$",
        description="IAM role of the job (containers/policies/training-execution.json). None: that of endpoints.",
    )


@dataclass(frozen=True)
class TrainingJob:
    """Everything about one training that SageMaker must be told.

    Attributes:
        name: start of the job's name; SageMaker's SDK adds the time.
        prefix: S3 prefix of its checkpoints and results.
        inputs: channel -> S3 prefix.
    """

    name: str
    prefix: str
    inputs: dict[str, str]
    image: str
    role: str


def build_trainer(
    places: Places, job: TrainingJob, settings: TrainSettings, choices: TrainingJobSettings
) -> Any:
    """The SDK's ModelTrainer for this training.

    It is given no source code and no `Torchrun`: with these, the SDK would start a shell script as the first
    process, which keeps SIGTERM to itself, so a spot interruption would lose what came after the last
    checkpoint. The image's own entrypoint runs torchrun.
    """
    # Else the SDK asks IAM about the role first, which the worker's policy does not allow and needs not.
    os.environ.setdefault("SAGEMAKER_VALIDATE_ROLE", "false")
    import boto3
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.training import configs
    from sagemaker.train import ModelTrainer

    quiet = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
    session = Session(
        boto_session=boto3.Session(region_name=places.region),
        default_bucket=places.bucket,
        sagemaker_config=quiet,
    )
    return ModelTrainer(
        sagemaker_session=session,
        role=job.role,
        base_job_name=job.name,
        training_image=job.image,
        compute=configs.Compute(
            instance_type=choices.instance_type,
            instance_count=1,
            volume_size_in_gb=choices.volume_gb,
            enable_managed_spot_training=choices.spot,
        ),
        stopping_condition=configs.StoppingCondition(
            max_runtime_in_seconds=choices.max_run_s,
            max_wait_time_in_seconds=choices.max_run_s + choices.max_wait_s if choices.spot else None,
        ),
        checkpoint_config=configs.CheckpointConfig(
            s3_uri=f"{job.prefix}/checkpoints/", local_path=CHECKPOINTS
        ),
        output_data_config=configs.OutputDataConfig(
            s3_output_path=f"{job.prefix}/output/", compression_type="NONE"
        ),
        input_data_config=[
            configs.InputData(channel_name=channel, data_source=uri) for channel, uri in job.inputs.items()
        ],
        hyperparameters=hyperparameters_of(settings),
        networking=configs.Networking(enable_network_isolation=True),
        tags=[configs.Tag(key="fledge.training", value=settings.output.name)],
    )


def hyperparameters_of(settings: TrainSettings) -> dict[str, Any]:
    """The fields that are no path, as the container's entrypoint reads them back; absent is None."""
    return settings.model_dump(mode="json", exclude=_GIVEN_BY_THE_JOB, exclude_none=True)
