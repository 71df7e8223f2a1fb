"""Training as a SageMaker job: the same `python -m drafter train`, on another machine, with the same record.

States and target go to S3 under their digests; the job trains in the image of `containers/train`, whose
checkpoints SageMaker keeps in S3; its result comes back into the directory where a training on this machine
would have written it. A job is found again by its name: a run that was killed meets the job that still runs,
and one that starts after a spot interruption continues from its checkpoint.
"""

from __future__ import annotations

import re
import time
from typing import Any

from drafter.config import TrainSettings
from drafter.errors import CheckpointError, FledgeError
from drafter.files import atomic_path, write_text_atomically
from drafter.records import StatesRecord, TrainingRecord
from drafter.target import load_target
from tasks.aws import Aws, AwsError, connect_aws, explained, require_bucket, require_role
from tasks.jobs import JobCrashed, JobError, locked
from tasks.logs import flow_logger
from tasks.settings import Places
from tasks.training_request import TrainingJob, TrainingJobSettings, TrainingPlaces, build_trainer
from tasks.upload_drafter import upload_drafter, upload_files, upload_target

MANIFEST = "manifest.json"
RECORD = "training.json"
SETTINGS = "settings.json"
RESULT = ("weights.safetensors", "drafter.json", "metrics.jsonl", RECORD)  # the record last
_ENDED = ("Completed", "Failed", "Stopped")
# What the container left in /opt/ml/output/failure, as SageMaker passes it on.
_SAID_ERROR = re.compile(
    r"^(?:AlgorithmError: )?(?:python -m drafter \w+: )?(?P<given>.*?)\s+expected: (?P<expected>.*?)"
    r"\s+what to do: (?P<remedy>.*?)(?:, exit code: -?\d+)?$",
    re.DOTALL,
)


def train_on_sagemaker(settings: TrainSettings, choices: TrainingJobSettings) -> TrainingRecord:
    """Train as a SageMaker job and bring the result into `settings.output`.

    Raises:
        JobError: the job refused its input, or ended as its limits say.
        JobCrashed: the job failed for another reason; running again continues from its checkpoint.
        AwsError: AWS refused a call.
    """
    places = Places()
    image, role = _require_image(), TrainingPlaces().role_arn or require_role(places)
    aws = connect_aws(places)
    require_bucket(aws, places.bucket)
    settings.output.mkdir(parents=True, exist_ok=True)
    with locked(settings.output):  # two runs of the same training start one job
        base = re.sub(r"[^a-zA-Z0-9]+", "-", f"fledge-{settings.output.name}")[:48]
        name = _usable(aws, base, choices.poll_interval_s)
        if name is None:
            job = TrainingJob(
                name=base,
                prefix=f"s3://{places.bucket}/training/{settings.output.name}",
                inputs=_upload_inputs(settings),
                image=image,
                role=role,
            )
            name = _start(places, job, settings, choices)
        ended = _follow(aws, name, choices.poll_interval_s)
        _raise_if_failed(ended)
        return _fetch(aws, ended, settings)


def _require_image() -> str:
    image = TrainingPlaces().image
    if image is None:
        raise FledgeError(
            "FLEDGE_TRAINING_IMAGE is not set",
            "the image that training jobs run, in ECR",
            "build and push containers/train/Dockerfile (containers/train/README.md), then set "
            "FLEDGE_TRAINING_IMAGE=ACCOUNT.dkr.ecr.REGION.amazonaws.com/fledge-train:TAG",
        )
    return image


def _upload_inputs(settings: TrainSettings) -> dict[str, str]:
    """Channel -> S3 prefix, each named by the digest of what it holds, its record written last."""
    states: StatesRecord = StatesRecord.load(settings.states / MANIFEST)
    shards = [settings.states / shard.file for shard in states.shards]
    inputs = {
        "states": upload_files([*shards, settings.states / MANIFEST], f"training/states-{states.digest}/"),
        "target": upload_target.fn(settings.target),
    }
    if settings.warm_start is not None:
        inputs["warm_start"] = upload_drafter.fn(settings.warm_start)
    return inputs


def _usable(aws: Aws, base: str, interval_s: float) -> str | None:
    """Name of this training's job that runs, or has ended with a result that is still there; or None."""
    newest = _newest(aws, base)
    if newest is not None and newest["TrainingJobStatus"] == "Stopping":
        newest = _follow(aws, newest["TrainingJobName"], interval_s)  # it may still write its checkpoint
    if newest is None:
        return None
    if newest["TrainingJobStatus"] == "Completed":
        bucket, prefix = _result_of(newest)
        return newest["TrainingJobName"] if _is_there(aws, bucket, prefix + RECORD) else None
    return newest["TrainingJobName"] if newest["TrainingJobStatus"] == "InProgress" else None


def _newest(aws: Aws, base: str) -> dict[str, Any] | None:
    """Description of the job of this training that was started last, or None."""
    pages = aws.sagemaker.pages(
        "list_training_jobs", NameContains=base, SortBy="CreationTime", SortOrder="Descending"
    )
    for page in pages:
        for summary in page["TrainingJobSummaries"]:
            return dict(aws.sagemaker.describe_training_job(TrainingJobName=summary["TrainingJobName"]))
    return None


def _start(places: Places, job: TrainingJob, settings: TrainSettings, choices: TrainingJobSettings) -> str:
    """Start the job through SageMaker's SDK; its name."""
    with explained():
        trainer = build_trainer(places, job, settings, choices)
        trainer.train(wait=False, logs=False)
    name = str(trainer._latest_training_job.training_job_name)
    flow_logger().info("training as SageMaker job %s on %s", name, choices.instance_type)
    return name


def _follow(aws: Aws, name: str, interval_s: float) -> dict[str, Any]:
    """Log what the job says until it has ended, and return its description.

    Whoever cancels the run stops the job as well. A run that is killed does not: the next one finds the job.
    """
    num_said = 0
    try:
        while True:
            description = dict(aws.sagemaker.describe_training_job(TrainingJobName=name))
            transitions = description.get("SecondaryStatusTransitions", [])
            for transition in transitions[num_said:]:
                message = transition.get("StatusMessage") or ""
                flow_logger().info("%s: %s %s", name, transition["Status"], message)
            num_said = len(transitions)
            if description["TrainingJobStatus"] in _ENDED:
                return description
            time.sleep(interval_s)
    except BaseException as error:
        # Cancelled, interrupted or out of time. A look that failed is no reason to stop a job.
        if isinstance(error, TimeoutError) or not isinstance(error, Exception):
            _stop(aws, name)
        raise


def _stop(aws: Aws, name: str) -> None:
    flow_logger().warning("stopping SageMaker job %s; running again continues from its checkpoint", name)
    try:
        aws.sagemaker.stop_training_job(TrainingJobName=name)
    except AwsError as error:
        flow_logger().error("%s may still run: %s", name, error)


def _raise_if_failed(description: dict[str, Any]) -> None:
    """Say why a job ended without a result.

    Raises:
        JobError: for a reason that running it again will not change.
        JobCrashed: for another one.
    """
    status, name = description["TrainingJobStatus"], description["TrainingJobName"]
    if status == "Completed":
        return
    reason = description.get("FailureReason") or description.get("SecondaryStatus", "no reason given")
    error = _SAID_ERROR.search(reason)
    if error is not None:
        raise JobError(error["given"], error["expected"], error["remedy"])
    if status == "Stopped" or description.get("SecondaryStatus") in (
        "MaxRuntimeExceeded",
        "MaxWaitTimeExceeded",
    ):
        raise JobError(
            f"SageMaker job {name} was stopped: {reason}",
            "a training that ends within its limits",
            "run again, it continues from its checkpoint; raise training_job.max_run_s or max_wait_s, "
            "or turn training_job.spot off",
        )
    raise JobCrashed(
        f"SageMaker job {name} failed: {reason}",
        "a finished training",
        f"see the job's log (CloudWatch, /aws/sagemaker/TrainingJobs, {name}); running again continues from its "
        "checkpoint",
    )


def _fetch(aws: Aws, description: dict[str, Any], settings: TrainSettings) -> TrainingRecord:
    """Download the result; its record, with the paths of this machine, is written last.

    Raises:
        CheckpointError: it is of other states or another target.
    """
    bucket, prefix = _result_of(description)
    record: TrainingRecord | None = None
    for name in RESULT:
        with atomic_path(settings.output / name) as temporary:
            aws.s3.download_file(bucket, prefix + name, str(temporary))
            if name == RECORD:
                record = _own(TrainingRecord.load(temporary), settings)
                write_text_atomically(settings.output / SETTINGS, settings.model_dump_json(indent=2) + "\n")
                temporary.write_text(record.model_dump_json(indent=2) + "\n")
    assert record is not None
    return record


def _own(record: TrainingRecord, settings: TrainSettings) -> TrainingRecord:
    """The job's record as this machine's: its paths were those of the container."""
    states: StatesRecord = StatesRecord.load(settings.states / MANIFEST)
    expected = (states.digest, load_target(settings.target).fingerprint)
    found = (record.states_digest, record.target_fingerprint)
    if found != expected:
        raise CheckpointError(
            f"the job trained on states {found[0]} of target {found[1]}",
            f"states {expected[0]} of target {expected[1]}",
            f"delete the objects under training/{settings.output.name} in the bucket and run again",
        )
    return record.model_copy(update={"path": str(settings.output)})


def _result_of(description: dict[str, Any]) -> tuple[str, str]:
    """Bucket and prefix, ending in `/`, of an ended job's files."""
    uri = description["ModelArtifacts"]["S3ModelArtifacts"].removeprefix("s3://")
    bucket, _, prefix = uri.partition("/")
    return bucket, prefix.rstrip("/") + "/"


def _is_there(aws: Aws, bucket: str, key: str) -> bool:
    try:
        aws.s3.head_object(Bucket=bucket, Key=key)
    except AwsError as error:
        if error.is_not_found:
            return False
        raise
    return True
