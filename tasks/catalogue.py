"""The targets that can be deployed: what JumpStart publishes of each, and what Fledge adds. Data in catalogue.yaml."""

from __future__ import annotations

import json
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from drafter.config import Settings
from tasks.aws import Aws, AwsError
from tasks.endpoint_settings import EndpointError
from tasks.settings import Places

CATALOGUE = Path(__file__).with_name("catalogue.yaml")
PUBLIC_HUB = "SageMakerPublicHub"


class PublishedHead(Settings):
    """A P-EAGLE head that somebody has published for this target."""

    hugging_face_id: str
    num_layers: int | None = Field(description="Transformer layers of the head.")
    trained_depth: int | None = Field(description="K of its training.")
    license: str | None


class Price(Settings):
    """What an instance costs, as read on a day."""

    usd_per_hour: float = Field(gt=0, description="On demand, one instance.")
    region: str
    source: str = Field(description="Address of the page that said so.")
    read_on: date


class CatalogueEntry(Settings):
    """One target. `None` means unknown: then nothing is checked against it, and nothing claimed."""

    title: str
    jumpstart_id: str | None = Field(description="Model id of SageMaker JumpStart.")
    hugging_face_id: str | None
    target: Path | None = Field(
        default=None, description="Directory of the target, relative to FLEDGE_HOME; uploaded when deployed."
    )
    num_layers: int | None = Field(description="Transformer layers of the target.")
    hidden_size: int | None
    vocab_size: int | None
    auxiliary_layers: tuple[int, int, int] | None = Field(
        description="Layers whose entering states a head for this target reads."
    )
    mask_token_id: int | None = Field(description="Token that a head's placeholders read.")
    published_head: PublishedHead | None
    num_speculative_tokens: int = Field(ge=1, description="K where neither settings nor evaluation say one.")
    image: str | None = Field(
        default=None, description="Serving image; None: AWS's vLLM image of `vllm_version`."
    )
    vllm_version: str | None = Field(default=None, description="Version of AWS's vLLM image.")
    instance_types: tuple[str, ...] = Field(
        min_length=1,
        description="Types on which the image is vLLM's own, so that SM_VLLM_* count. The first is the default.",
    )
    fallback_instance_types: tuple[str, ...] = Field(
        default=(), description="Tried in turn where AWS has no capacity."
    )
    instance_count: int = Field(default=1, ge=1)
    ami_version: str | None = Field(
        default=None, description="InferenceAmiVersion; None: SageMaker's default."
    )
    model_download_timeout_s: int = Field(ge=60, le=3600)
    startup_timeout_s: int = Field(ge=60, le=3600)
    network_isolation: bool = Field(description="The container reaches nothing outside.")
    environment: dict[str, str] = Field(default_factory=dict, description="Container environment.")
    prices: dict[str, Price] = Field(default_factory=dict, description="Instance type -> price.")
    local: bool = Field(default=False, description="For this machine's own SageMaker only.")
    notes: tuple[str, ...] = Field(default=(), description="Where the facts are from, and what is not known.")

    def usd_per_hour(self, instance_type: str | None, region: str) -> float | None:
        """Price of one instance in a region; None: not known."""
        price = self.prices.get(instance_type or "")
        return price.usd_per_hour if price is not None and price.region == region else None


def read_catalogue() -> dict[str, CatalogueEntry]:
    """Every entry by its key.

    Raises:
        EndpointError: an entry is not complete, or has fields that there are not.
    """
    return _read(CATALOGUE)


@cache
def _read(path: Path) -> dict[str, CatalogueEntry]:
    entries: dict[str, CatalogueEntry] = {}
    for key, fields in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        try:
            entries[key] = CatalogueEntry.model_validate(fields)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise EndpointError(
                f"{path.name}, entry {key}: {problems}",
                "the fields that tasks/catalogue.py describes",
                "correct the entry; an existing one is a pattern",
            ) from None
    return entries


def find_entry(key: str) -> CatalogueEntry:
    """The entry of a key.

    Raises:
        EndpointError: there is none.
    """
    catalogue = read_catalogue()
    if key not in catalogue:
        raise EndpointError(
            f"model {key!r} is not in the catalogue",
            f"one of {', '.join(catalogue)}",
            "choose one (`fledge models`), or add an entry to tasks/catalogue.yaml",
        )
    return catalogue[key]


def resolve_image(entry: CatalogueEntry, region: str, instance_type: str) -> str:
    """The serving image in a region's registry."""
    if entry.image is not None:
        return entry.image
    from sagemaker.core import image_uris  # here, because it takes 6 s that no other step should pay

    return str(
        image_uris.retrieve(
            "vllm",
            region=region,
            version=entry.vllm_version,
            instance_type=instance_type,
            image_scope="inference",
        )
    )


def local_target(entry: CatalogueEntry, places: Places) -> Path | None:
    """The target's directory on this machine, if the entry has one.

    Raises:
        EndpointError: the entry names one, and it is not there.
    """
    if entry.target is None:
        return None
    path = places.home / entry.target
    if not (path / "config.json").is_file():
        raise EndpointError(
            f"{path} holds no model",
            f"{entry.title} in Hugging Face format",
            "run `make demo`, which fetches it, or give target_uri",
        )
    return path


def jumpstart_target(aws: Aws, entry: CatalogueEntry) -> str:
    """The S3 prefix of the target's weights, as JumpStart's hub publishes it.

    Raises:
        EndpointError: the entry has no JumpStart id, or the hub names no uncompressed files.
    """
    remedy = "give target_uri: an S3 prefix of yours, ending in /, with the model's files"
    if entry.jumpstart_id is None:
        raise EndpointError(f"the JumpStart id of {entry.title} is not known", "where its files are", remedy)
    try:
        content = aws.sagemaker.describe_hub_content(
            HubName=PUBLIC_HUB, HubContentType="Model", HubContentName=entry.jumpstart_id
        )
    except AwsError as error:
        if not error.is_not_found:
            raise
        raise EndpointError(
            f"JumpStart has no model {entry.jumpstart_id} in {aws.region}", "a model of its hub", remedy
        ) from None
    document: dict[str, Any] = json.loads(content["HubContentDocument"])
    uri = document.get("HostingPrepackedArtifactUri") or document.get("HostingArtifactUri") or ""
    if not uri.startswith("s3://") or uri.endswith(".gz"):
        raise EndpointError(
            f"JumpStart names {uri or 'no files'} for {entry.jumpstart_id}",
            "an S3 prefix of plain files",
            remedy,
        )
    return uri if uri.endswith("/") else f"{uri}/"
