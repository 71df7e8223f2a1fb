"""The catalogue for people: what a model is, and what its endpoint would be told about its drafter."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from drafter.records import Record
from tasks.build_endpoint import CHANNEL, build_environment
from tasks.catalogue import CatalogueEntry, find_entry, read_catalogue
from tasks.endpoint_settings import DeploySettings
from tasks.settings import Places
from tasks.speculation import choose_speculation


class ModelCard(Record):
    """A model of the catalogue, and the settings that its endpoint gets."""

    name: str = Field(description="Key in the catalogue; --model of fledge deploy.")
    entry: CatalogueEntry
    channel: str = Field(description="Channel of the model data that holds the drafter.")
    served_name: str = Field(description="What answers will carry.")
    speculative_config: dict[str, Any] = Field(description="SM_VLLM_SPECULATIVE_CONFIG, parsed.")
    advice: str | None = Field(description="How the named version is to be served; None: nothing is known.")
    environment: dict[str, str] = Field(description="The container's environment, word for word.")
    usd_per_hour: float | None = Field(description="Default instances of one fleet; None: no price is known.")


def list_cards(places: Places) -> list[ModelCard]:
    """Every model of the catalogue."""
    return [_card(places, name, entry, None, None) for name, entry in read_catalogue().items()]


def model_card(
    places: Places, name: str, version: str | None = None, num_speculative_tokens: int | None = None
) -> ModelCard:
    """One model, with the K of a registered version if one is named.

    Raises:
        EndpointError: no such model in the catalogue.
        PromotionError: no such version in the registry.
    """
    return _card(places, name, find_entry(name), version, num_speculative_tokens)


def _card(places: Places, name: str, entry: CatalogueEntry, version: str | None, k: int | None) -> ModelCard:
    served_name, record = f"{places.model_name}-vVERSION", None
    if version is not None:
        from tasks.promotion import read_version  # here, because MLflow takes 7 s

        record = read_version(version)
        served_name = record.served_name
    settings = DeploySettings(model=name, num_speculative_tokens=k)
    speculation = choose_speculation(settings, record, entry)
    # Where the target's files are does not change the environment, only that they are in S3.
    in_s3 = "s3://" if entry.target or entry.jumpstart_id or entry.network_isolation else None
    environment = build_environment(settings, entry, served_name, speculation, in_s3)
    price = entry.usd_per_hour(entry.instance_types[0], places.region)
    return ModelCard(
        name=name,
        entry=entry,
        channel=CHANNEL,
        served_name=served_name,
        speculative_config=json.loads(environment["SM_VLLM_SPECULATIVE_CONFIG"]),
        advice=" ".join(filter(None, (speculation.advice, speculation.note))) or None,
        environment=environment,
        usd_per_hour=None if price is None else price * entry.instance_count,
    )
