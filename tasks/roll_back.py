"""The steps of a rollback that a person or the monitor asks for. Where it leads stands on the endpoint first."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from drafter.errors import FledgeError
from drafter.records import Record
from tasks.alarms import alarms_of_configs, delete_alarms
from tasks.aws import Aws, connect_aws, may_pass
from tasks.build_endpoint import SERVED_NAME_TAG, VERSION_TAG
from tasks.endpoint_settings import EndpointError
from tasks.endpoints import Endpoint, find_config, read_tags, require_endpoint, wait_until_settled, write_tags
from tasks.probe import GENERAL_PROMPTS, chat
from tasks.promotion import read_version
from tasks.settings import Places
from tasks.shift_traffic import move_back

BACK_FROM_TAG = "fledge.back_from"
BACK_TO_TAG = "fledge.back_to"
_NUM_TRIES = 5


class WayBack(Record):
    """A rollback that has been decided on."""

    endpoint_name: str
    leaves: str = Field(description="Config that is left.")
    to: str = Field(description="Config that it goes back to.")
    version: str | None = Field(
        description="Registered version that is taken back; None: not ours, or it runs on with older settings."
    )


@task(
    name="open-roll-back",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=may_pass,
    timeout_seconds=300,
)
def open_roll_back(endpoint_name: str) -> WayBack:
    """Decide where to go back to and write it on the endpoint, or find what an interrupted run had decided.

    Raises:
        EndpointError: the endpoint is being changed by somebody else, or there is nothing to go back to.
    """
    aws = connect_aws(Places())
    endpoint = require_endpoint(aws, endpoint_name)
    leaves, to = endpoint.tags.get(BACK_FROM_TAG), endpoint.tags.get(BACK_TO_TAG)
    if not (leaves and to):
        _require_in_service(endpoint)
        leaves = endpoint.config_name
        to = endpoint.previous_config_name
    version = _version_of(aws, leaves)
    if not to and version is not None:
        to = read_version(version).previous_endpoint_config
    if not to or to == leaves:
        raise EndpointError(
            f"endpoint {endpoint_name} runs {leaves}, and nothing ran before it that is known",
            "a config to go back to",
            "deploy the version that you want, or delete the endpoint",
        )
    if find_config(aws, to) is None:
        raise EndpointError(
            f"config {to}, which {endpoint_name} ran before, has been deleted by hand",
            "the config that ran before",
            "deploy the version that you want anew; its config is made again",
        )
    write_tags(aws, endpoint.arn, {BACK_FROM_TAG: leaves, BACK_TO_TAG: to})
    # Where it was deployed again with other settings, only those are taken back.
    if version == _version_of(aws, to):
        version = None
    return WayBack(endpoint_name=endpoint_name, leaves=leaves, to=to, version=version)


def _version_of(aws: Aws, config_name: str) -> str | None:
    """The registered version that a config of ours runs."""
    config = find_config(aws, config_name)
    return read_tags(aws, config["EndpointConfigArn"]).get(VERSION_TAG) if config else None


def _require_in_service(endpoint: Endpoint) -> None:
    if endpoint.status != "InService":
        raise EndpointError(
            f"endpoint {endpoint.name} is {endpoint.status}",
            "an endpoint in service that nobody is changing",
            "wait until it is InService (`fledge status`), then roll back",
        )


@task(name="move-traffic-back", cache_policy=NO_CACHE)
def move_traffic_back(way: WayBack, termination_wait_s: int) -> None:
    """All traffic at once to the config of before; goes on with an interrupted run's update.

    Raises:
        EndpointError: the endpoint does not end there.
    """
    aws = connect_aws(Places())
    endpoint = wait_until_settled(aws, way.endpoint_name, deadline_s=3600)
    move_back(aws, endpoint, way.to, termination_wait_s)


@task(name="verify-fleet", cache_policy=NO_CACHE, timeout_seconds=600)
def verify_fleet(way: WayBack) -> None:
    """Make sure by a chat that the fleet of the config of before answers.

    Raises:
        EndpointError: it does not.
    """
    aws = connect_aws(Places())
    config = find_config(aws, way.to)
    expected = read_tags(aws, config["EndpointConfigArn"]).get(SERVED_NAME_TAG) if config else None
    problem = ""
    for prompt in GENERAL_PROMPTS[:1] * _NUM_TRIES:
        try:
            answer = chat(
                way.endpoint_name, [{"role": "user", "content": prompt}], max_tokens=8, aws=aws, probe=True
            )
        except FledgeError as error:
            problem = error.given
            continue
        if expected in (None, answer.served_name):
            return
        problem = f"{answer.served_name} answers"
    raise EndpointError(
        f"after the rollback of {way.endpoint_name} to {way.to}: {problem}",
        f"answers of {expected or 'its fleet'}",
        "see the instances' logs, then run this again",
    )


@task(
    name="close-roll-back",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=may_pass,
    timeout_seconds=300,
)
def close_roll_back(way: WayBack) -> None:
    """Nothing is left to complete; the alarms of the config that was left go."""
    aws = connect_aws(Places())
    delete_alarms(aws, alarms_of_configs(aws, [way.leaves]))
    endpoint = require_endpoint(aws, way.endpoint_name)
    write_tags(aws, endpoint.arn, {BACK_FROM_TAG: "", BACK_TO_TAG: ""})
