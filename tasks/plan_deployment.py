"""Everything that can be refused before anything exists: a deployment is planned whole, then made.

Names and addresses follow from content, so the plan knows where model data will be before it is there.
"""

from __future__ import annotations

import json
from pathlib import Path

from prefect import task
from prefect.cache_policies import INPUTS, NO_CACHE, RUN_ID
from pydantic import Field

from drafter.provenance import CONFIG_NAME, read_provenance
from drafter.records import Record
from drafter.target import load_target
from tasks.aws import Aws, connect_aws, may_pass, require_bucket, require_role
from tasks.build_endpoint import EndpointPlan, Sources, build_plan
from tasks.build_rollout import floor_of
from tasks.catalogue import CatalogueEntry, find_entry, jumpstart_target, local_target, resolve_image
from tasks.check_drafter import check_drafter, check_hardware
from tasks.endpoint_settings import DeploySettings
from tasks.find_drafters import RegisteredDrafter
from tasks.logs import flow_logger
from tasks.probe import ProbePrompts, choose_prompts
from tasks.promotion import require_approved
from tasks.settings import Places
from tasks.speculation import choose_speculation
from tasks.upload_drafter import drafter_prefix, target_prefix
from tasks.version_record import VersionRecord


class Deployment(Record):
    """A deployment as it will be made."""

    plans: tuple[EndpointPlan, ...] = Field(description="One for each instance type, in the order of trying.")
    drafter: Path
    target: Path | None = Field(description="Directory to upload; None: the target is in S3 already.")
    prompts: ProbePrompts
    creation_deadline_s: float

    @property
    def config_names(self) -> tuple[str, ...]:
        return tuple(plan.config_name for plan in self.plans)

    def plans_from(self, config_name: str | None) -> tuple[EndpointPlan, ...]:
        """The plans, beginning with the one that an earlier run has got to."""
        first = next((i for i, plan in enumerate(self.plans) if plan.config_name == config_name), 0)
        return self.plans[first:]


@task(
    name="resolve-version",
    cache_policy=INPUTS + RUN_ID,
    persist_result=True,
    result_serializer="json",
    timeout_seconds=300,
)
def resolve_version(version: str) -> str:
    """The number of an approved version. A run that is taken up again keeps it, wherever the alias is by then.

    Raises:
        PromotionError: unknown, rejected by the gate or by a person, or not yet approved.
    """
    return require_approved(version).version


@task(
    name="plan-deployment",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=may_pass,
    timeout_seconds=900,
)
def plan_deployment(
    settings: DeploySettings, version: VersionRecord, registered: RegisteredDrafter, flow_run: str
) -> Deployment:
    """Check everything, resolve everything, build every request.

    Raises:
        EndpointError: settings, drafter, target or hardware do not go together, or SageMaker would refuse.
        AwsError: no role, bucket, region or permission.
    """
    places, entry = Places(), find_entry(settings.model)
    drafter, speculation = Path(registered.drafter.path), choose_speculation(settings, version, entry)
    for words in filter(None, (speculation.advice, speculation.note)):
        flow_logger().info("%s", words)
    k = speculation.num_speculative_tokens
    target = local_target(entry, places) if settings.target_uri is None else None
    check_drafter(
        read_provenance(drafter),
        json.loads((drafter / CONFIG_NAME).read_text(encoding="utf-8")),
        entry,
        k,
        load_target(target).fingerprint if target else None,
    )
    types = _instance_types(settings, entry)
    image = settings.image
    check_hardware(entry, image or "", types)
    aws, role = connect_aws(places), require_role(places)
    require_bucket(aws, places.bucket)
    sources = Sources(
        drafter_uri=f"s3://{places.bucket}/{drafter_prefix(drafter)}",
        target_uri=_target_uri(aws, places, settings, entry, target),
        bucket=places.bucket,
        role_arn=role,
    )
    prompts = choose_prompts(places, settings.probe, version, k)
    floor = floor_of(version, k, settings.alarms, prompts.domain, derive=prompts.comparable)
    return Deployment(
        plans=tuple(
            build_plan(
                settings, entry, version, sources, image or resolve_image(entry, places.region, instance_type),
                instance_type, floor, flow_run,
            )
            for instance_type in types
        ),
        drafter=drafter,
        target=target,
        prompts=prompts,
        creation_deadline_s=1800
        + (settings.model_download_timeout_s or entry.model_download_timeout_s)
        + (settings.startup_timeout_s or entry.startup_timeout_s),
    )  # fmt: skip


def _instance_types(settings: DeploySettings, entry: CatalogueEntry) -> tuple[str, ...]:
    """What is tried, in order. Without a type of one's own, the catalogue's fallbacks follow its default."""
    first = settings.instance_type or entry.instance_types[0]
    others = settings.fallback_instance_types
    if others is None:
        others = entry.fallback_instance_types if settings.instance_type is None else ()
    return (first, *(other for other in others if other != first))


def _target_uri(
    aws: Aws, places: Places, settings: DeploySettings, entry: CatalogueEntry, target: Path | None
) -> str | None:
    """Where the target's files are, or will be."""
    if settings.target_uri is not None:
        return settings.target_uri
    if target is not None:
        return f"s3://{places.bucket}/{target_prefix(target)}"
    if entry.jumpstart_id is None and not entry.network_isolation:
        return None  # the container fetches it from its hub
    return jumpstart_target(aws, entry)
