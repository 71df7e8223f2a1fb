"""Requests for AWS: held against what JumpStart publishes, against botocore's model, and against golden files.

FLEDGE_WRITE_GOLDEN=1 pytest tests/tasks/test_build_endpoint.py     writes the golden files anew
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session
from botocore.validate import ParamValidator

from drafter.provenance import Provenance, read_provenance
from tasks.build_endpoint import EndpointPlan, Sources, build_plan
from tasks.build_rollout import build_alarms, build_deployment, floor_of
from tasks.catalogue import find_entry
from tasks.check_drafter import check_drafter, check_hardware
from tasks.endpoint_settings import (
    AlarmSettings,
    AutoscalingSettings,
    CaptureSettings,
    DeploySettings,
    EndpointError,
    ParallelDraftingSpec,
    RolloutSettings,
)
from tasks.speculation import choose_speculation
from tasks.version_record import MeasuredAcceptance, VersionRecord
from tests.tasks.drafters_on_disk import export_drafter

GOLDEN = Path(__file__).parents[1] / "golden"
JUMPSTART = ("gpt-oss-120b", "gpt-oss-20b", "qwen3-coder-30b-a3b-instruct", "gemma-4-31b-it")
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/vllm:0.30.0-gpu-py312-cu130-ubuntu24.04-sagemaker"
SOURCES = Sources(
    drafter_uri="s3://fledge/drafters/0123456789abcdef/",
    target_uri="s3://models/target/",
    bucket="fledge",
    role_arn="arn:aws:iam::123456789012:role/fledge-execution",
)
SPECULATION = (
    '{"model": "/opt/ml/additional-model-data-sources/eagle", "method": "eagle3", '
    '"num_speculative_tokens": 3, "parallel_drafting": true}'
)


def version(**changes: Any) -> VersionRecord:
    fields: dict[str, Any] = dict.fromkeys(VersionRecord.model_fields)
    fields |= {
        "name": "fledge-drafter", "version": "7", "aliases": (), "decision": "approve", "reasons": (),
        "num_speculative_tokens": 3, "speed": (), "drafter_digest": "0123456789abcdef",
        "evaluation_digest": "e", "dataset_digest": "d", "target_fingerprint": "t", "train_domains": ("code",),
        "acceptance": tuple(
            MeasuredAcceptance(
                drafter="challenger", num_speculative_tokens=3, domain=domain, acceptance_length=length,
                lower=length, upper=length,
            )
            for domain, length in (("code", 2.0), ("general", 1.1))
        ),
    }  # fmt: skip
    return VersionRecord(**{**fields, **changes})


def plan(model: str = "gpt-oss-120b", **changes: Any) -> EndpointPlan:
    settings = DeploySettings(version="7", endpoint_name="birds", model=model, **changes)
    entry = find_entry(model)
    instance_type = settings.instance_type or entry.instance_types[0]
    return build_plan(settings, entry, version(), SOURCES, settings.image or IMAGE, instance_type, 1.4)


@pytest.mark.parametrize("model", JUMPSTART)
def test_requests_equal_the_golden_ones(model: str) -> None:
    made = plan(model, autoscaling=AutoscalingSettings(), capture=CaptureSettings(percent=20))
    text = json.dumps(made.model_dump(mode="json"), indent=2) + "\n"
    path = GOLDEN / f"{model}.json"
    if os.environ.get("FLEDGE_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("model", JUMPSTART)
def test_requests_carry_what_jumpstart_publishes_for_p_eagle(model: str) -> None:
    made = plan(model)
    container = made.create_model["PrimaryContainer"]
    assert container["AdditionalModelDataSources"][0]["ChannelName"] == "eagle"
    assert container["Environment"]["SM_VLLM_SPECULATIVE_CONFIG"] == SPECULATION
    assert made.create_model["EnableNetworkIsolation"] is True
    variant = made.create_config["ProductionVariants"][0]
    assert variant["InstanceType"] == "ml.g7e.2xlarge"
    assert variant["ModelDataDownloadTimeoutInSeconds"] == 3600
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 3600


@pytest.mark.parametrize("model", JUMPSTART)
def test_botocore_itself_accepts_every_request(model: str) -> None:
    made = plan(model, capture=CaptureSettings(), autoscaling=AutoscalingSettings())
    requests = [
        ("sagemaker", "CreateModel", made.create_model),
        ("sagemaker", "CreateEndpointConfig", made.create_config),
        ("sagemaker", "CreateEndpoint", made.create_endpoint),
        ("sagemaker", "UpdateEndpoint", made.update_endpoint),
        *(("cloudwatch", "PutMetricAlarm", alarm) for alarm in made.alarms),
    ]
    for service, operation, request in requests:
        shape = get_session().get_service_model(service).operation_model(operation).input_shape
        assert not ParamValidator().validate(request, shape).has_errors(), operation


def test_the_first_served_name_carries_the_version_and_the_second_is_the_models() -> None:
    environment = plan().create_model["PrimaryContainer"]["Environment"]
    first, second = json.loads(environment["SM_VLLM_SERVED_MODEL_NAME"])
    assert (first, second) == (plan().served_name, "gpt-oss-120b")
    assert re.fullmatch("fledge-drafter-v7-[0-9a-f]{6}", first)
    assert environment["PROCESS_AUTO_RECOVERY"] == "false"


def test_the_same_deployment_has_the_same_names_and_any_change_others() -> None:
    assert plan().config_name == plan().config_name
    others = [
        plan(instance_type="ml.g7e.4xlarge"),
        plan(environment={"SM_VLLM_MAX_MODEL_LEN": "4096"}),
        plan(num_speculative_tokens=5),
        plan(capture=CaptureSettings()),
        plan("gpt-oss-20b"),
    ]
    for name in ("model_name", "config_name", "served_name"):
        assert len({getattr(one, name) for one in (plan(), *others)}) == len(others) + 1


def test_how_traffic_moves_changes_no_name() -> None:
    slower = plan(rollout=RolloutSettings(wait_s=900), alarms=AlarmSettings(evaluation_periods=5))
    assert (slower.config_name, slower.served_name) == (plan().config_name, plan().served_name)


def test_rollout_and_alarms_change_no_name() -> None:
    assert plan(rollout=RolloutSettings(kind="linear")).config_name == plan().config_name


def test_the_short_form_gives_k_and_more_than_one_branch_is_refused() -> None:
    spec = {"num_speculative_tokens": 5, "num_branches": 1}
    settings = DeploySettings(parallel_drafting_spec=spec)
    assert choose_speculation(settings, version(), find_entry("gpt-oss-20b")).num_speculative_tokens == 5
    with pytest.raises(ValueError, match="vLLM verifies one chain"):
        DeploySettings(parallel_drafting_spec=ParallelDraftingSpec(num_speculative_tokens=5, num_branches=2))
    with pytest.raises(ValueError, match="give one of them"):
        DeploySettings(parallel_drafting_spec=spec, num_speculative_tokens=3)


@pytest.fixture
def provenance(tmp_path: Path) -> Provenance:
    """Of a drafter trained to depth 8 on the layers 2, 15 and 27 of `target0`."""
    export_drafter(tmp_path / "drafter")
    return read_provenance(tmp_path / "drafter").model_copy(update={"settings": {"num_depths": 8}})


@pytest.mark.parametrize("k", [0, -1, 9])
def test_a_k_outside_the_trained_depth_is_refused(provenance: Provenance, k: int) -> None:
    with pytest.raises(EndpointError, match=f"num_speculative_tokens is {k}\n.*1 to 8"):
        check_drafter(provenance, {}, find_entry("smollm2-135m-instruct"), k, None)


def test_a_head_of_another_target_is_refused(provenance: Provenance) -> None:
    smollm2 = find_entry("smollm2-135m-instruct")
    check_drafter(provenance, {"hidden_size": 576, "vocab_size": 49152}, smollm2, 8, "target0")
    with pytest.raises(EndpointError, match="fingerprint is target0, this one's is target1"):
        check_drafter(provenance, {}, smollm2, 3, "target1")
    with pytest.raises(EndpointError, match="its hidden size is 576, the target's is 2880"):
        check_drafter(provenance, {"hidden_size": 576}, find_entry("gpt-oss-120b"), 3, None)
    with pytest.raises(EndpointError, match="reads layer 27 of a target that has 24"):
        check_drafter(provenance, {"hidden_size": 2880}, find_entry("gpt-oss-20b"), 3, None)


@pytest.mark.parametrize("image", ["x/djl-inference:0.36.0-lmi20.0.0-cu128", "x/huggingface-pytorch-tgi:1"])
def test_an_image_that_ignores_the_variables_is_refused(image: str) -> None:
    entry = find_entry("gpt-oss-120b")
    with pytest.raises(EndpointError, match="without the drafter"):
        check_hardware(entry, image, entry.instance_types)


def test_an_instance_type_with_an_unknown_image_is_refused() -> None:
    with pytest.raises(EndpointError, match=r"ml\.p4d\.24xlarge.*\n.*ml\.g7e\.2xlarge"):
        check_hardware(find_entry("gpt-oss-120b"), IMAGE, ("ml.p4d.24xlarge",))


def test_an_environment_over_sagemakers_limits_is_refused() -> None:
    plan(environment={"SM_VLLM_X": "ü" * 512})
    with pytest.raises(EndpointError, match=r"SM_VLLM_X .* has 1026 bytes"):
        plan(environment={"SM_VLLM_X": "ü" * 513})
    with pytest.raises(EndpointError, match="104 entries"):
        plan(environment={f"X{i}": "1" for i in range(100)})
    with pytest.raises(EndpointError, match="environment sets SM_VLLM_SPECULATIVE_CONFIG"):
        plan(environment={"SM_VLLM_SPECULATIVE_CONFIG": "{}"})


def test_what_only_sagemaker_checks_is_refused_in_its_words() -> None:
    with pytest.raises(EndpointError, match="validation error"):
        plan(environment={"NOT-A-NAME": "1"})
    with pytest.raises(EndpointError, match="validation error"):
        plan(image="an image with spaces")


def test_a_canary_rolls_back_by_its_alarms() -> None:
    deployment = plan(rollout=RolloutSettings(percent=10, wait_s=120)).update_endpoint["DeploymentConfig"]
    routing = deployment["BlueGreenUpdatePolicy"]["TrafficRoutingConfiguration"]
    assert routing == {
        "Type": "CANARY",
        "WaitIntervalInSeconds": 120,
        "CanarySize": {"Type": "CAPACITY_PERCENT", "Value": 10},
    }
    assert len(deployment["AutoRollbackConfiguration"]["Alarms"]) == 4


def test_waits_that_do_not_fit_into_the_limit_are_refused() -> None:
    rollout = RolloutSettings(kind="linear", percent=10, wait_s=600, max_execution_s=3600)
    with pytest.raises(EndpointError, match="waits 6300 s in all"):
        build_deployment(rollout, AlarmSettings(), ())


def test_more_alarms_than_sagemaker_takes_are_refused() -> None:
    with pytest.raises(EndpointError, match="14 alarms"):
        plan(alarms=AlarmSettings(own=tuple(f"own-{i}" for i in range(10))))


def test_alarms_watch_the_new_fleet_alone() -> None:
    names = {"EndpointName": "birds", "EndpointConfigName": "birds-v7-0"}
    alarms = build_alarms(AlarmSettings(max_latency_ms=800), names, "fledge-drafter-v7", 1.4)
    by_metric = {alarm["MetricName"]: alarm for alarm in alarms}
    for metric in ("Invocation5XXErrors", "InvocationModelErrors", "ModelLatency"):
        assert {"Name": "EndpointConfigName", "Value": "birds-v7-0"} in by_metric[metric]["Dimensions"]
    for metric in ("AcceptanceLength", "ProbeLatencyRatio"):
        assert {"Name": "DrafterVersion", "Value": "fledge-drafter-v7"} in by_metric[metric]["Dimensions"]
    assert by_metric["ModelLatency"]["Threshold"] == 800_000  # CloudWatch has microseconds
    assert by_metric["AcceptanceLength"]["ComparisonOperator"] == "LessThanThreshold"


def test_fast_alarms_make_sagemaker_publish_as_often() -> None:
    assert "MetricsConfig" not in plan().create_config
    metrics = plan(alarms=AlarmSettings(period_s=10)).create_config["MetricsConfig"]
    assert metrics == {"EnableEnhancedMetrics": True, "MetricPublishFrequencyInSeconds": 10}


def test_the_floor_is_a_share_of_the_versions_own_evaluation() -> None:
    alarms = AlarmSettings(min_share_of_evaluation=0.8)
    assert floor_of(version(), 3, alarms, "code", derive=True) == pytest.approx(1.6)
    assert floor_of(version(), 3, alarms, None, derive=True) == pytest.approx(1.6)
    assert floor_of(version(), 3, alarms, "code", derive=False) is None
    assert floor_of(version(), 5, alarms, "code", derive=True) is None
    assert floor_of(version(), 3, AlarmSettings(min_acceptance_length=1.2), None, derive=False) == 1.2
