"""prefect.yaml: every deployment names a flow that is there and takes the values that stand there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.events import DeploymentEventTrigger, Resource
from prefect.flows import load_flow_from_entrypoint

from tasks.approval import EXPIRE_DEPLOYMENT, PROMOTE_FLOW
from tasks.endpoint_health import STALE_EVENT

DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]
BY_NAME = {deployment["name"]: deployment for deployment in DEPLOYMENTS}


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    return load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_deployment_has_its_flow_and_the_values_are_those_it_takes(name: str) -> None:
    deployment = BY_NAME[name]
    flow = flow_of(deployment)

    assert flow.name == name
    if parameters := deployment.get("parameters"):
        flow.validate_parameters(parameters)
    assert deployment["work_pool"] == {"name": "fledge"}


def test_a_run_that_waits_is_under_no_concurrency_limit() -> None:
    assert "concurrency_limit" not in BY_NAME[PROMOTE_FLOW]
    assert EXPIRE_DEPLOYMENT.rpartition("/")[2] in BY_NAME


def test_every_schedule_is_paused_until_a_person_switches_it_on() -> None:
    schedules = [schedule for one in DEPLOYMENTS for schedule in one.get("schedules", ())]

    assert len(schedules) == 2
    assert not any(schedule["active"] for schedule in schedules)


def test_the_monitors_event_starts_a_retrain() -> None:
    (written,) = BY_NAME["retrain-drafter"]["triggers"]
    trigger = DeploymentEventTrigger.model_validate(written)

    assert trigger.enabled
    assert trigger.expect == {STALE_EVENT}
    assert trigger.match.matches(Resource({"prefect.resource.id": "fledge.drafter.fledge-drafter.2"}))
    assert not trigger.match.matches(Resource({"prefect.resource.id": "fledge.endpoint.birds"}))
