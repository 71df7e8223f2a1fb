"""Drafters in the registry: the one of a fingerprint, and the champion, as directories on this machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from drafter.config import DrafterSettings
from drafter.errors import CheckpointError
from drafter.files import sha256_of_file
from drafter.provenance import CONFIG_NAME, WEIGHTS_NAME, read_provenance
from drafter.records import DrafterRecord, Record
from tasks.logs import flow_logger
from tasks.settings import Places
from tasks.track_runs import connect

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

FINGERPRINT_TAG = "fledge.fingerprint"
ATTEMPT_TAG = "fledge.attempt"
TARGET_TAG = "fledge.target_fingerprint"
DIGEST_TAG = "fledge.drafter_digest"
ADVICE_TAG = "fledge.serving_advice"
Alias = Literal["challenger", "champion"]


class RegisteredDrafter(Record):
    """A registered version and its files on this machine."""

    name: str
    version: str
    fingerprint: str
    attempt: str = Field(description="`first`, or the flow run that trained it again with `force`.")
    drafter: DrafterRecord = Field(description="Its `path` is the local copy.")

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.version}"


@task(
    name="find-by-fingerprint", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5, timeout_seconds=1800
)
def find_by_fingerprint(fingerprint: str) -> RegisteredDrafter | None:
    """The newest version of the same data, target and settings, or None."""
    places = Places()
    client = connect(places)
    versions = client.search_model_versions(
        f"name = '{places.model_name}' and tags.`{FINGERPRINT_TAG}` = '{fingerprint}'"
    )
    if not versions:
        return None
    return _fetched(client, places, max(versions, key=lambda version: int(version.version)))


@task(name="find-champion", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5, timeout_seconds=1800)
def find_champion(target_fingerprint: str) -> RegisteredDrafter | None:
    """The version in production, or None when there is none yet.

    Raises:
        CheckpointError: it was trained on another target.
    """
    places = Places()
    client = connect(places)
    version = version_of_alias(client, places, "champion")
    if version is None:
        return None
    trained_on = version.tags.get(TARGET_TAG)
    if trained_on != target_fingerprint:
        raise CheckpointError(
            f"champion {places.model_name} version {version.version} was trained on target {trained_on}",
            f"a champion trained on this run's target, {target_fingerprint}",
            "give drafters of this target a registered model of their own (FLEDGE_MODEL_NAME), "
            "or set this run's target to the champion's",
        )
    return _fetched(client, places, version)


@task(name="fetch-drafter", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5, timeout_seconds=1800)
def fetch_drafter(version: str) -> RegisteredDrafter:
    """A version by number, with its files on this machine, checked against their digests."""
    places = Places()
    client = connect(places)
    return _fetched(client, places, client.get_model_version(places.model_name, version))


def version_of_alias(client: MlflowClient, places: Places, alias: Alias) -> ModelVersion | None:
    """The version that an alias points to; None without the alias or the model."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(places.model_name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def warm_start_of(champion: RegisteredDrafter | None, shape: DrafterSettings) -> DrafterRecord | None:
    """The champion's drafter if training can continue from it; else None, with the reason in the log."""
    if champion is None:
        return None
    config = json.loads((Path(champion.drafter.path) / CONFIG_NAME).read_text(encoding="utf-8"))
    differences = [
        f"{name} is {config.get(key)}, asked for {asked}"
        for name, key, asked in (
            ("number of layers", "num_hidden_layers", shape.num_layers),
            ("draft vocabulary", "draft_vocab_size", min(shape.draft_vocab_size, config["vocab_size"])),
            ("norm before residual", "norm_before_residual", shape.norm_before_residual),
        )
        if config.get(key) != asked
    ]
    if differences:
        flow_logger().warning("training from scratch: the champion's %s", "; ".join(differences))
        return None
    return champion.drafter


def _fetched(client: MlflowClient, places: Places, version: ModelVersion) -> RegisteredDrafter:
    """The version with its files on this machine, fetched once and checked against their digests."""
    digest = version.tags[DIGEST_TAG]
    directory = places.stages.resolve() / f"fetched-{digest}"
    if not (directory / CONFIG_NAME).is_file():
        _download(client, version, directory)
    return RegisteredDrafter(
        name=version.name,
        version=str(version.version),
        fingerprint=version.tags[FINGERPRINT_TAG],
        attempt=version.tags[ATTEMPT_TAG],
        drafter=read_provenance(directory).drafter.model_copy(update={"path": str(directory)}),
    )


def _download(client: MlflowClient, version: ModelVersion, directory: Path) -> None:
    """Fetch into a directory beside, check, and rename: a killed download does not count as done."""
    from mlflow.artifacts import download_artifacts

    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    source = client.get_model_version_download_uri(version.name, version.version)
    root = Path(download_artifacts(artifact_uri=source, dst_path=str(partial)))
    _check_files(root, f"{version.name} version {version.version}")
    shutil.rmtree(directory, ignore_errors=True)
    root.rename(directory)
    shutil.rmtree(partial, ignore_errors=True)


def _check_files(root: Path, name: str) -> None:
    files: dict[str, Any] = read_provenance(root).files
    for file in (CONFIG_NAME, WEIGHTS_NAME):
        if files.get(file) != sha256_of_file(root / file):
            raise CheckpointError(
                f"{file} of {name} is not the file that was registered (sha256 differs)",
                "the registry's artifacts unchanged",
                "restore the artifact, or delete this version and train anew",
            )
