"""A drafter and its target into S3, under a prefix that is named by their content.

A prefix is complete when it has `config.json`: that file is written last. What is already there with the
same size and checksum is not sent again, so a killed upload continues and a repeated one sends nothing.
"""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from drafter.errors import CheckpointError
from drafter.files import sha256_of_file
from drafter.provenance import CONFIG_NAME, FILE_NAME, WEIGHTS_NAME, read_provenance
from drafter.target import load_target
from tasks.aws import Aws, AwsError, connect_aws, may_pass, require_bucket
from tasks.logs import flow_logger
from tasks.settings import Places

CHECKSUM = "sha256"  # name of the object's metadata


def drafter_prefix(directory: Path) -> str:
    """Where a drafter lies in the bucket."""
    return f"drafters/{read_provenance(directory).drafter.digest}/"


def target_prefix(directory: Path) -> str:
    """Where a target lies in the bucket."""
    return f"targets/{load_target(directory).fingerprint}/"


@task(
    name="upload-drafter",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=may_pass,
    timeout_seconds=7200,
)
def upload_drafter(directory: Path) -> str:
    """Put an exported drafter into the bucket; returns its S3 prefix.

    Raises:
        CheckpointError: its files are not those that were exported.
        AwsError: no bucket, or no permission to write it.
    """
    provenance = read_provenance(directory)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if provenance.files.get(name) != sha256_of_file(directory / name):
            raise CheckpointError(
                f"{directory / name} is not the file that was exported (sha256 differs)",
                "an unchanged export",
                "fetch the version from the registry again, or export it again",
            )
    files = [directory / name for name in (WEIGHTS_NAME, FILE_NAME, CONFIG_NAME)]
    return upload_files(files, drafter_prefix(directory))


@task(
    name="upload-target",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=may_pass,
    timeout_seconds=7200,
)
def upload_target(directory: Path) -> str:
    """Put a target's files into the bucket; returns their S3 prefix."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    last = directory / CONFIG_NAME
    return upload_files([*(path for path in files if path != last), last], target_prefix(directory))


def upload_files(files: list[Path], prefix: str) -> str:
    """Send what is missing, in this order; returns the prefix as SageMaker takes it."""
    places = Places()
    aws = connect_aws(places)
    require_bucket(aws, places.bucket)
    num_sent = sum(_upload_file(aws, places.bucket, f"{prefix}{path.name}", path) for path in files)
    uri = f"s3://{places.bucket}/{prefix}"
    flow_logger().info("%s: %d files, %d of them sent now", uri, len(files), num_sent)
    return uri


def _upload_file(aws: Aws, bucket: str, key: str, path: Path) -> bool:
    """Send one file unless it is there; whether it was sent."""
    checksum = sha256_of_file(path)
    if _is_there(aws, bucket, key, path.stat().st_size, checksum):
        return False
    # With the checksum algorithm, S3 refuses what did not arrive as it was sent.
    extra = {"Metadata": {CHECKSUM: checksum}, "ChecksumAlgorithm": "SHA256"}
    aws.s3.upload_file(str(path), bucket, key, ExtraArgs=extra)
    return True


def _is_there(aws: Aws, bucket: str, key: str, size: int, checksum: str) -> bool:
    try:
        found = aws.s3.head_object(Bucket=bucket, Key=key)
    except AwsError as error:
        if error.is_not_found:
            return False
        raise
    return bool(found["ContentLength"] == size and found["Metadata"].get(CHECKSUM) == checksum)
