"""From a registered version, a catalogue entry and settings to the requests that make an endpoint. Pure.

Names carry a digest of the whole request, so the same deployment finds what it has made before, and
another one never meets it. Every request is held against botocore's own model before anything is created.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from drafter.files import digest_of
from drafter.records import Record
from drafter.serving import speculative_config
from tasks.build_rollout import METRICS as METRICS
from tasks.build_rollout import VARIANT as VARIANT
from tasks.build_rollout import build_alarms, build_deployment
from tasks.catalogue import CatalogueEntry
from tasks.endpoint_settings import DeploySettings, EndpointError
from tasks.service_model import problems, validation_message
from tasks.speculation import Speculation, choose_speculation
from tasks.version_record import VersionRecord

CHANNEL = "eagle"
CHANNEL_PATH = f"/opt/ml/additional-model-data-sources/{CHANNEL}"
VERSION_TAG = "fledge.version"
MODEL_TAG = "fledge.model"
SERVED_NAME_TAG = "fledge.served_name"
DIGEST_TAG = "fledge.drafter_digest"
FLOW_RUN_TAG = "fledge.flow_run"
MAX_ENVIRONMENT_ENTRIES = 100
MAX_ENVIRONMENT_BYTES = 1024
_OURS = frozenset({"SM_VLLM_SPECULATIVE_CONFIG", "SM_VLLM_SERVED_MODEL_NAME"})


class Sources(Record):
    """Where an endpoint's parts are, resolved for one region."""

    drafter_uri: str = Field(description="S3 prefix of the drafter, ending in /.")
    target_uri: str | None = Field(
        description="S3 prefix of the target; None: its hub id, from the internet."
    )
    bucket: str
    role_arn: str


class EndpointPlan(Record):
    """The requests of one deployment on one instance type."""

    endpoint_name: str
    version: str
    model: str = Field(description="Catalogue entry of the target.")
    served_name: str
    num_speculative_tokens: int
    instance_type: str
    model_name: str
    config_name: str
    create_model: dict[str, Any]
    create_config: dict[str, Any]
    create_endpoint: dict[str, Any]
    update_endpoint: dict[str, Any]
    alarms: tuple[dict[str, Any], ...] = Field(description="PutMetricAlarm requests.")
    acceptance_floor: float | None = Field(description="Acceptance length below which it is taken back.")


def build_environment(
    settings: DeploySettings,
    entry: CatalogueEntry,
    served_name: str,
    speculation: Speculation,
    target_uri: str | None,
) -> dict[str, str]:
    """The container's environment: the catalogue's, then the settings', then what speculation needs.

    Raises:
        EndpointError: over SageMaker's limits, or a variable that Fledge sets itself.
    """
    for name in settings.environment:
        if name in _OURS:
            raise EndpointError(
                f"environment sets {name}",
                "settings of yours; this variable follows from version, K and model",
                "leave it out, and set num_speculative_tokens or model instead",
            )
    environment = {**entry.environment, **settings.environment}
    if target_uri is None:
        environment.setdefault("SM_VLLM_MODEL", entry.hugging_face_id or "")
    environment |= {
        "SM_VLLM_SPECULATIVE_CONFIG": json.dumps(
            speculative_config(
                CHANNEL_PATH, speculation.num_speculative_tokens, schedule=speculation.schedule
            )
        ),
        # Answers carry the first name, which tells fleets apart; clients may go on asking for the second.
        "SM_VLLM_SERVED_MODEL_NAME": json.dumps([served_name, settings.model]),
        "SM_VLLM_PER_REQUEST_SPEC_DECODE_METRICS": "summary",
        # The process supervisor of some images loses the quotes of the JSON above.
        "PROCESS_AUTO_RECOVERY": "false",
    }
    _check_environment(environment)
    return environment


def _check_environment(environment: Mapping[str, str]) -> None:
    if len(environment) > MAX_ENVIRONMENT_ENTRIES:
        raise EndpointError(
            f"the container's environment has {len(environment)} entries",
            f"at most {MAX_ENVIRONMENT_ENTRIES}, SageMaker's limit",
            "leave some out of `environment`",
        )
    for name, value in environment.items():
        for what, text in (("name", name), ("value", value)):
            size = len(text.encode())
            if size > MAX_ENVIRONMENT_BYTES:
                raise EndpointError(
                    f"the {what} of {name[:60]} in the container's environment has {size} bytes",
                    f"at most {MAX_ENVIRONMENT_BYTES}, SageMaker's limit",
                    "shorten it, or put long content into a file of the target's S3 prefix",
                )


def build_plan(
    settings: DeploySettings,
    entry: CatalogueEntry,
    version: VersionRecord,
    sources: Sources,
    image: str,
    instance_type: str,
    acceptance_floor: float | None = None,
    flow_run: str = "",
) -> EndpointPlan:
    """Every request of a deployment on one instance type.

    Raises:
        EndpointError: what botocore's model, SageMaker's limits or the catalogue do not allow.
    """
    speculation = choose_speculation(settings, version, entry)
    served_name = _served_name(settings, entry, version, sources, image, instance_type, speculation)
    tags = _tags(settings, version, served_name, flow_run)
    model = _create_model(settings, entry, served_name, sources, image, speculation)
    model_name = f"{settings.endpoint_name}-v{version.version}-{digest_of(model)[:8]}"
    config = _create_config(settings, entry, sources, model_name, instance_type)
    config_name = f"{settings.endpoint_name}-v{version.version}-{digest_of(config)[:8]}"
    names = {"EndpointName": settings.endpoint_name, "EndpointConfigName": config_name}
    alarms = build_alarms(settings.alarms, names, served_name, acceptance_floor)
    plan = EndpointPlan(
        endpoint_name=settings.endpoint_name,
        version=version.version,
        model=settings.model,
        served_name=served_name,
        num_speculative_tokens=speculation.num_speculative_tokens,
        instance_type=instance_type,
        model_name=model_name,
        config_name=config_name,
        create_model={"ModelName": model_name, **model, "Tags": tags},
        create_config={"EndpointConfigName": config_name, **config, "Tags": tags},
        create_endpoint={**names, "Tags": tags},
        update_endpoint={
            **names,
            **_retained(settings),
            "DeploymentConfig": build_deployment(settings.rollout, settings.alarms, alarms),
        },
        alarms=alarms,
        acceptance_floor=acceptance_floor,
    )
    check_plan(plan)
    return plan


def _served_name(
    settings: DeploySettings,
    entry: CatalogueEntry,
    version: VersionRecord,
    sources: Sources,
    image: str,
    instance_type: str,
    speculation: Speculation,
) -> str:
    """The version's name and a digest of everything else that makes the fleet.

    A version that is deployed again with other settings stands beside itself: probes, alarms and the monitor
    tell the two fleets apart by this name.
    """
    model = _create_model(settings, entry, version.served_name, sources, image, speculation)
    config = _create_config(settings, entry, sources, version.served_name, instance_type)
    return f"{version.served_name}-{digest_of([model, config])[:6]}"


def _create_model(
    settings: DeploySettings,
    entry: CatalogueEntry,
    served_name: str,
    sources: Sources,
    image: str,
    speculation: Speculation,
) -> dict[str, Any]:
    if sources.target_uri is None and (entry.network_isolation or not entry.hugging_face_id):
        raise EndpointError(
            f"no files of {entry.title}", "an S3 prefix with the target's files", "give target_uri"
        )
    container: dict[str, Any] = {
        "Image": image,
        "AdditionalModelDataSources": [{"ChannelName": CHANNEL, **_s3_prefix(sources.drafter_uri)}],
        "Environment": build_environment(settings, entry, served_name, speculation, sources.target_uri),
    }
    if sources.target_uri is not None:
        container["ModelDataSource"] = _s3_prefix(sources.target_uri)
    return {
        "PrimaryContainer": container,
        "ExecutionRoleArn": sources.role_arn,
        "EnableNetworkIsolation": entry.network_isolation,
    }


def _s3_prefix(uri: str) -> dict[str, Any]:
    """SageMaker asks for the slash at the end of a prefix."""
    assert uri.startswith("s3://"), uri
    assert uri.endswith("/"), uri
    return {"S3DataSource": {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}}


def _create_config(
    settings: DeploySettings,
    entry: CatalogueEntry,
    sources: Sources,
    model_name: str,
    instance_type: str,
) -> dict[str, Any]:
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "ModelName": model_name,
        "InstanceType": instance_type,
        "InitialInstanceCount": settings.instance_count or entry.instance_count,
        "InitialVariantWeight": 1.0,
        "ModelDataDownloadTimeoutInSeconds": settings.model_download_timeout_s
        or entry.model_download_timeout_s,
        "ContainerStartupHealthCheckTimeoutInSeconds": settings.startup_timeout_s or entry.startup_timeout_s,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    if entry.ami_version is not None:
        variant["InferenceAmiVersion"] = entry.ami_version
    config: dict[str, Any] = {"ProductionVariants": [variant]}
    if settings.alarms.period_s < 60:
        # Without it, invocation metrics come once a minute and a faster alarm would see nothing.
        config["MetricsConfig"] = {
            "EnableEnhancedMetrics": True,
            "MetricPublishFrequencyInSeconds": settings.alarms.period_s,
        }
    if settings.capture is not None:
        config["DataCaptureConfig"] = {
            "EnableCapture": True,
            "InitialSamplingPercentage": settings.capture.percent,
            "DestinationS3Uri": settings.capture.destination
            or f"s3://{sources.bucket}/captures/{settings.endpoint_name}/",
            "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
            "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
        }
    return config


def _tags(
    settings: DeploySettings, version: VersionRecord, served_name: str, flow_run: str
) -> list[dict[str, str]]:
    tags = {
        VERSION_TAG: version.version,
        MODEL_TAG: settings.model,
        SERVED_NAME_TAG: served_name,
        DIGEST_TAG: version.drafter_digest,
        FLOW_RUN_TAG: flow_run,
    }
    return [{"Key": key, "Value": value} for key, value in tags.items() if value]


def _retained(settings: DeploySettings) -> dict[str, Any]:
    """Under autoscaling the new fleet starts with as many instances as the old one has grown to."""
    if settings.autoscaling is None:
        return {}
    return {
        "RetainAllVariantProperties": True,
        "ExcludeRetainedVariantProperties": [{"VariantPropertyType": "DataCaptureConfig"}],
    }


def check_plan(plan: EndpointPlan) -> None:
    """Hold every request against botocore's model of the service.

    Raises:
        EndpointError: with the service's own words.
    """
    requests = [
        ("sagemaker", "CreateModel", plan.create_model),
        ("sagemaker", "CreateEndpointConfig", plan.create_config),
        ("sagemaker", "CreateEndpoint", plan.create_endpoint),
        ("sagemaker", "UpdateEndpoint", plan.update_endpoint),
        *(("cloudwatch", "PutMetricAlarm", alarm) for alarm in plan.alarms),
    ]
    for service, operation, request in requests:
        found = problems(service, operation, request)
        if found:
            raise EndpointError(
                f"{operation}: {validation_message(found)}",
                "a request that AWS accepts",
                "correct the setting or the catalogue entry that this value comes from",
            )
