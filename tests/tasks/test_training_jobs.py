"""Training as a SageMaker job: what is asked for, what is found again, and how its endings are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from containers.train.entrypoint import read_value
from drafter.config import TrainSettings
from drafter.errors import CheckpointError, FledgeError
from drafter.records import StatesRecord, TrainingRecord
from drafter.target import load_target
from tasks.jobs import JobCrashed, JobError
from tasks.settings import Places
from tasks.stages import is_complete, train_drafter
from tasks.training_jobs import train_on_sagemaker
from tasks.training_request import TrainingJobSettings
from tests.containers.control_plane import forget_everything
from tests.containers.policies import allows
from tests.tasks.drafters_on_disk import export_drafter
from tests.tasks.training_platform import TrainingPlatform, send

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/fledge-train:1"
ROLE = "arn:aws:iam::123456789012:role/fledge-training"
CHOICES = TrainingJobSettings(poll_interval_s=0.1)


@pytest.fixture(scope="session")
def learned_from(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """States and target of a tiny training."""
    from tests.drafter.tiny import make_documents, make_target, write_states

    folder = tmp_path_factory.mktemp("learned_from")
    target = make_target(folder / "target")
    return write_states(folder / "states-ab12", target, make_documents(target, 40)), target


@pytest.fixture
def settings(learned_from: tuple[Path, Path], tmp_path: Path) -> TrainSettings:
    """A training of a few dozen steps."""
    from tests.drafter.tiny import training_settings

    return training_settings(*learned_from, tmp_path / "stages" / "training-ab12cd34ef56ab12", num_epochs=8)


@pytest.fixture
def bucket(places: Places, moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """S3 with the installation's bucket, and the environment that leads to it."""
    for name, value in {
        "AWS_ENDPOINT_URL_S3": moto,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "FLEDGE_BUCKET": "fledge",
        "FLEDGE_TRAINING_IMAGE": IMAGE,
        "FLEDGE_TRAINING_ROLE_ARN": ROLE,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_REGION", raising=False)
    forget_everything(moto)
    client = boto3.client("s3")
    client.create_bucket(Bucket="fledge")
    yield client
    for item in client.list_objects_v2(Bucket="fledge").get("Contents", []):
        client.delete_object(Bucket="fledge", Key=item["Key"])
    client.delete_bucket(Bucket="fledge")


@pytest.fixture
def platform(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingPlatform]:
    """SageMaker, where jobs stay in progress unless a test says otherwise."""
    platform = TrainingPlatform(tmp_path / "containers", ending=None)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", platform.url)
    yield platform
    platform.close()


def write_result(settings: TrainSettings, folder: Path, **changes: Any) -> None:
    """A finished training as a container leaves it."""
    states: StatesRecord = StatesRecord.load(settings.states / "manifest.json")
    values: dict[str, Any] = {
        "path": "/opt/ml/checkpoints/training",
        "fingerprint": "f",
        "states_digest": states.digest,
        "target_fingerprint": load_target(settings.target).fingerprint,
        "num_steps": 1,
        "num_tokens": 1,
        "num_epochs": 1,
        "final_loss": 1,
        "elapsed_s": 1,
        "tokens_per_s": 1,
        "peak_memory_gb": 1,
        "warm_start": None,
        **changes,
    }
    TrainingRecord.model_validate(values).save(folder / "training.json")
    for name in ("weights.safetensors", "drafter.json", "metrics.jsonl", "settings.json"):
        (folder / name).write_text(name)


def add_job(
    platform: TrainingPlatform, settings: TrainSettings, status: str, at: float = 1.0, **more: Any
) -> str:
    """A job of this training that an earlier run has started."""
    name = f"fledge-{settings.output.name}-2026010100000{int(at)}"
    platform.jobs[name] = {
        "TrainingJobName": name,
        "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}",
        "CreationTime": at,
        "TrainingJobStatus": status,
        "SecondaryStatus": status,
        "ModelArtifacts": {"S3ModelArtifacts": f"s3://fledge/training/x/output/{name}/output/model/"},
        **more,
    }
    return name


def complete(
    platform: TrainingPlatform, settings: TrainSettings, name: str, folder: Path, **changes: Any
) -> None:
    """End a job with its result in S3."""
    folder.mkdir()
    write_result(settings, folder, **changes)
    send(folder, platform.jobs[name]["ModelArtifacts"]["S3ModelArtifacts"])
    platform.jobs[name].update(TrainingJobStatus="Completed", SecondaryStatus="Completed")


@pytest.mark.slow
def test_the_request_is_what_sagemaker_accepts_and_the_settings_say(
    platform: TrainingPlatform, settings: TrainSettings, bucket: Any, tmp_path: Path
) -> None:
    predecessor = export_drafter(tmp_path / "predecessor")
    settings = settings.model_copy(update={"warm_start": tmp_path / "predecessor"})
    platform.ending = {"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxRuntimeExceeded"}
    with pytest.raises(JobError):
        train_on_sagemaker(settings, TrainingJobSettings(max_run_s=3600, max_wait_s=600, poll_interval_s=0.1))

    (request,) = [body for operation, body in platform.requests if operation == "CreateTrainingJob"]
    name, hyperparameters = request.pop("TrainingJobName"), request.pop("HyperParameters")
    assert name.startswith("fledge-training-ab12cd34ef56ab12-")
    prefix = "s3://fledge/training/training-ab12cd34ef56ab12"
    target = load_target(settings.target).fingerprint
    channels = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"] for c in request.pop("InputDataConfig")
    }
    assert channels == {
        "states": "s3://fledge/training/states-states-states-ab12/",
        "target": f"s3://fledge/targets/{target}/",
        "warm_start": f"s3://fledge/drafters/{predecessor.digest}/",
    }
    assert request == {
        # no entrypoint and no arguments: the image's own, which hands SIGTERM on
        "AlgorithmSpecification": {"TrainingImage": IMAGE, "TrainingInputMode": "File"},
        "RoleArn": ROLE,
        "OutputDataConfig": {"S3OutputPath": f"{prefix}/output/", "CompressionType": "NONE"},
        "ResourceConfig": {"InstanceType": "ml.g6e.2xlarge", "InstanceCount": 1, "VolumeSizeInGB": 100},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 4200},
        "CheckpointConfig": {"S3Uri": f"{prefix}/checkpoints/", "LocalPath": "/opt/ml/checkpoints"},
        "EnableManagedSpotTraining": True,
        "EnableNetworkIsolation": True,
        "Tags": [{"Key": "fledge.training", "Value": "training-ab12cd34ef56ab12"}],
    }
    read_back = {key: read_value(text) for key, text in hyperparameters.items()}
    paths = {name: getattr(settings, name) for name in ("states", "target", "output", "warm_start")}
    assert TrainSettings.model_validate({**read_back, **paths}) == settings

    keys = {item["Key"] for item in bucket.list_objects_v2(Bucket="fledge")["Contents"]}
    assert "training/states-states-states-ab12/manifest.json" in keys
    assert f"targets/{target}/model.safetensors" in keys
    granted = [
        allows(
            "deployer",
            f"sagemaker:{operation}",
            f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}",
        )
        for operation in set(platform.operations()) - {"ListTrainingJobs"}
    ]
    assert all(granted)
    assert all(allows("deployer", "s3:PutObject", f"arn:aws:s3:::fledge/{key}") for key in keys)
    assert all(allows("training-execution", "s3:GetObject", f"arn:aws:s3:::fledge/{key}") for key in keys)


@pytest.mark.slow
def test_without_spot_nothing_waits(platform: TrainingPlatform, settings: TrainSettings) -> None:
    platform.ending = {"TrainingJobStatus": "Stopped", "SecondaryStatus": "Stopped"}
    with pytest.raises(JobError):
        train_on_sagemaker(settings, TrainingJobSettings(spot=False, poll_interval_s=0.1))
    (request,) = [body for operation, body in platform.requests if operation == "CreateTrainingJob"]
    assert "MaxWaitTimeInSeconds" not in request["StoppingCondition"]
    assert not request.get("EnableManagedSpotTraining")


def test_a_job_that_still_runs_is_found_again_and_its_result_fetched(
    platform: TrainingPlatform, settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(platform, settings, "Failed", at=1)
    name = add_job(platform, settings, "InProgress", at=2)
    monkeypatch.setattr(
        "tasks.training_jobs.time.sleep", lambda _: complete(platform, settings, name, tmp_path / "result")
    )

    record = train_drafter.fn(settings, CHOICES)

    assert "CreateTrainingJob" not in platform.operations()
    assert record.path == str(settings.output)
    assert TrainingRecord.load(settings.output / "training.json") == record
    assert TrainSettings.model_validate_json((settings.output / "settings.json").read_text()) == settings
    assert is_complete(settings.output)


def test_a_finished_job_is_not_run_again(
    platform: TrainingPlatform, settings: TrainSettings, tmp_path: Path
) -> None:
    name = add_job(platform, settings, "InProgress")
    complete(platform, settings, name, tmp_path / "result")
    train_on_sagemaker(settings, CHOICES)
    assert set(platform.operations()) == {"ListTrainingJobs", "DescribeTrainingJob"}


@pytest.mark.slow
def test_a_new_job_is_started_where_the_old_result_is_gone_or_there_was_none(
    platform: TrainingPlatform, settings: TrainSettings
) -> None:
    platform.ending = {"TrainingJobStatus": "Failed", "FailureReason": "InternalServerError: sorry"}
    for status in ("Completed", "Stopped", "Failed"):
        platform.jobs.clear()
        platform.requests.clear()
        add_job(platform, settings, status)
        with pytest.raises(JobCrashed):
            train_on_sagemaker(settings, CHOICES)
        assert platform.operations().count("CreateTrainingJob") == 1


def test_a_result_of_other_states_is_refused(
    platform: TrainingPlatform, settings: TrainSettings, tmp_path: Path
) -> None:
    name = add_job(platform, settings, "InProgress")
    complete(platform, settings, name, tmp_path / "result", states_digest="others")
    with pytest.raises(CheckpointError, match="states others"):
        train_on_sagemaker(settings, CHOICES)
    assert not (settings.output / "training.json").exists()


@pytest.mark.parametrize(
    ("ending", "kind", "said"),
    [
        (
            {"FailureReason": "AlgorithmError: python -m drafter train: loss nan\n  expected: finite\n"
             "  what to do: lower the rate, exit code: 1"},
            JobError,
            r"^loss nan\n  expected: finite\n  what to do: lower the rate$",
        ),
        (
            {"FailureReason": "AlgorithmError: no channel 'states'\n  expected: it\n  what to do: name it"},
            JobError,
            r"^no channel 'states'\n  expected: it",
        ),
        (
            {"FailureReason": "AlgorithmError: the trainer was ended by signal 9, exit code: 1"},
            JobCrashed,
            "ended by signal 9.*continues from its checkpoint",
        ),
        ({"FailureReason": "InternalServerError: We encountered an error"}, JobCrashed, "InternalServerError"),
        ({"SecondaryStatus": "MaxWaitTimeExceeded"}, JobError, "MaxWaitTimeExceeded"),
    ],
    ids=["trainer's words", "entrypoint's words", "killed", "platform", "no capacity"],
)  # fmt: skip
def test_a_failed_job_is_told_with_its_reason(
    ending: dict[str, Any],
    kind: type[FledgeError],
    said: str,
    platform: TrainingPlatform,
    settings: TrainSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import re

    name = add_job(platform, settings, "InProgress")
    failed = {"TrainingJobStatus": "Failed", "SecondaryStatus": "Failed", **ending}
    monkeypatch.setattr("tasks.training_jobs.time.sleep", lambda _: platform.jobs[name].update(failed))
    with pytest.raises(kind) as caught:
        train_on_sagemaker(settings, CHOICES)
    assert re.search(said, str(caught.value), re.DOTALL)


def raiser(error: BaseException) -> Callable[[float], None]:
    def sleep(_: float) -> None:
        raise error

    return sleep


@pytest.mark.parametrize(
    ("error", "is_stopped"), [(KeyboardInterrupt(), True), (TimeoutError(), True), (OSError(), False)]
)
def test_who_cancels_the_run_stops_the_job_and_a_mishap_does_not(
    error: BaseException,
    is_stopped: bool,
    platform: TrainingPlatform,
    settings: TrainSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_job(platform, settings, "InProgress")
    monkeypatch.setattr("tasks.training_jobs.time.sleep", raiser(error))
    with pytest.raises(type(error)):
        train_on_sagemaker(settings, CHOICES)
    assert ("StopTrainingJob" in platform.operations()) == is_stopped


def test_a_missing_image_is_named_before_anything_is_sent(
    platform: TrainingPlatform, settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEDGE_TRAINING_IMAGE")
    with pytest.raises(FledgeError, match="FLEDGE_TRAINING_IMAGE is not set"):
        train_on_sagemaker(settings, CHOICES)
    assert platform.requests == []


@pytest.mark.slow
def test_a_spot_interruption_costs_an_instance_and_no_training(
    platform: TrainingPlatform, settings: TrainSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """The real container twice: interrupted after some steps, then to the end, with only S3 between them."""
    platform.ending = "run"
    platform.interrupt_after = lambda root: num_steps(root / "checkpoints" / "training") >= 5
    long = settings.model_copy(update={"num_epochs": 60.0})

    with caplog.at_level("INFO", logger="fledge"):
        record = train_on_sagemaker(long, CHOICES)

    assert platform.operations().count("CreateTrainingJob") == 1
    assert "Interrupted Spot capacity was taken back" in caplog.text
    assert is_complete(long.output)
    steps = [json.loads(line)["step"] for line in (long.output / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, record.num_steps + 1))
    first, second = sorted(platform.folder.glob("*/log"))
    assert "stopped at step" in first.read_text()
    assert num_steps(first.parent / "checkpoints" / "training") < record.num_steps
    assert not (first.parent / "model").exists()
    assert (second.parent / "model" / "training.json").is_file()

    from drafter.config import ExportSettings
    from drafter.export import export

    export(
        ExportSettings(training=long.output, target=long.target, output=long.output.with_name("drafter-1"))
    )


@pytest.mark.slow
def test_the_containers_refusal_reaches_the_flow(platform: TrainingPlatform, settings: TrainSettings) -> None:
    platform.ending = "run"
    with pytest.raises(JobError, match=r"--device|cuda") as caught:
        train_on_sagemaker(settings.model_copy(update={"device": "cuda:7"}), CHOICES)
    assert "exit code" not in caught.value.remedy
    assert not (settings.output / "training.json").exists()


def num_steps(training: Path) -> int:
    path = training / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
