"""The catalogue: complete, honest about what is not known, extended by one entry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tasks.aws import Aws, connect_aws
from tasks.catalogue import (
    CATALOGUE,
    find_entry,
    jumpstart_target,
    local_target,
    read_catalogue,
    resolve_image,
)
from tasks.endpoint_settings import EndpointError
from tasks.service_model import service_model
from tasks.settings import Places
from tests.tasks.aws_server import refusing


def test_it_has_the_jumpstart_models_and_the_local_one() -> None:
    assert list(read_catalogue()) == [
        "gpt-oss-120b",
        "gpt-oss-20b",
        "qwen3-coder-30b-a3b-instruct",
        "gemma-4-31b-it",
        "smollm2-135m-instruct",
    ]


@pytest.mark.parametrize("key", list(read_catalogue()))
def test_sagemaker_knows_every_instance_type_and_ami(key: str) -> None:
    entry, model = find_entry(key), service_model("sagemaker")
    types = set(model.shape_for("ProductionVariantInstanceType").enum)
    assert {*entry.instance_types, *entry.fallback_instance_types} <= types
    assert entry.ami_version in {None, *model.shape_for("ProductionVariantInferenceAmiVersion").enum}
    assert set(entry.fallback_instance_types) <= set(entry.instance_types)


@pytest.mark.parametrize("key", list(read_catalogue()))
def test_what_is_not_known_is_said(key: str) -> None:
    entry = find_entry(key)
    assert entry.notes, "where the facts are from"
    assert entry.image or entry.vllm_version


def test_an_entry_of_ones_own_is_all_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = yaml.safe_load(CATALOGUE.read_text())
    catalogue["mine"] = {**catalogue["gpt-oss-20b"], "title": "Mine", "jumpstart_id": None}
    (tmp_path / "catalogue.yaml").write_text(yaml.safe_dump(catalogue))
    monkeypatch.setattr("tasks.catalogue.CATALOGUE", tmp_path / "catalogue.yaml")
    assert find_entry("mine").title == "Mine"


def test_a_typo_in_an_entry_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = CATALOGUE.read_text().replace("ami_version: null", "amy_version: null")
    (tmp_path / "catalogue.yaml").write_text(broken)
    monkeypatch.setattr("tasks.catalogue.CATALOGUE", tmp_path / "catalogue.yaml")
    with pytest.raises(EndpointError, match=r"smollm2-135m-instruct: .*amy_version"):
        read_catalogue()


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    with pytest.raises(EndpointError, match=r"'gpt-4' is not in the catalogue\n.*gpt-oss-120b"):
        find_entry("gpt-4")


def test_a_missing_local_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=r"smollm2-135m-instruct holds no model\n.*\n.*make demo"):
        local_target(find_entry("smollm2-135m-instruct"), Places(home=tmp_path))


@pytest.mark.parametrize("name", ["HostingPrepackedArtifactUri", "HostingArtifactUri"])
def test_a_jumpstart_target_is_where_the_hub_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.dumps({name: "s3://jumpstart-cache/gpt-oss-120b/v1"})
    with refusing((200, {"HubContentDocument": document})) as hub:
        uri = jumpstart_target(connected(hub.url, monkeypatch), find_entry("gpt-oss-120b"))
    assert uri == "s3://jumpstart-cache/gpt-oss-120b/v1/"
    assert hub.asked == ["SageMaker.DescribeHubContent"]


def test_a_target_that_nobody_knows_the_place_of_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EndpointError, match=r"JumpStart id of Qwen3.* is not known\n.*\n.*target_uri"):
        jumpstart_target(
            connected("http://127.0.0.1:9", monkeypatch), find_entry("qwen3-coder-30b-a3b-instruct")
        )
    tarball = json.dumps({"HostingArtifactUri": "s3://jumpstart-cache/model.tar.gz"})
    with (
        refusing((200, {"HubContentDocument": tarball})) as hub,
        pytest.raises(EndpointError, match="plain files"),
    ):
        jumpstart_target(connected(hub.url, monkeypatch), find_entry("gpt-oss-120b"))


def connected(url: str, monkeypatch: pytest.MonkeyPatch) -> Aws:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_SAGEMAKER": url,
    }.items():
        monkeypatch.setenv(name, value)
    return connect_aws(Places())


@pytest.mark.slow
def test_the_image_is_awss_vllm_in_the_regions_registry() -> None:
    image = resolve_image(find_entry("gpt-oss-120b"), "eu-west-1", "ml.g7e.2xlarge")
    assert image.startswith("763104351884.dkr.ecr.eu-west-1.amazonaws.com/vllm:0.30.0-gpu-")
