"""CloudWatch alarms of a deployment: put, waited for, read, deleted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.aws import Aws, connect_aws, may_pass
from tasks.build_endpoint import EndpointPlan
from tasks.endpoint_settings import EndpointError
from tasks.logs import flow_logger
from tasks.settings import Places

_POLL_S = 5.0
_MORE_PERIODS = 3


@task(
    name="put-alarms",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=5,
    retry_condition_fn=may_pass,
    timeout_seconds=900,
)
def put_alarms(plan: EndpointPlan, own: Sequence[str] = (), under_way: bool = False) -> tuple[str, ...]:
    """Put a deployment's alarms, and see that none of them already sounds; returns their names.

    Args:
        own: names of alarms that exist.
        under_way: the update runs already; then its alarms stay as they are.

    Raises:
        EndpointError: an alarm that does not exist, or one that sounds and stays so: SageMaker would take the
            update back at once.
    """
    aws = connect_aws(Places())
    names = (*(alarm["AlarmName"] for alarm in plan.alarms), *own)
    if under_way:
        return names
    _let_old_figures_pass(aws, plan.alarms)
    for alarm in plan.alarms:
        aws.cloudwatch.put_metric_alarm(**alarm)
    _require_known(aws, names)
    _wait_until_silent(aws, names, patience_s=2 * _longest_s(plan.alarms))
    return names


def describe_alarms(aws: Aws, names: Sequence[str]) -> list[dict[str, Any]]:
    """The alarms of these names that exist, as CloudWatch describes them."""
    if not names:
        return []
    return list(aws.cloudwatch.describe_alarms(AlarmNames=list(names))["MetricAlarms"])


def sounding(aws: Aws, names: Sequence[str]) -> list[str]:
    """Alarms that sound, each as `name: why`, the one that sounded first before the others."""
    alarms = [alarm for alarm in describe_alarms(aws, names) if alarm["StateValue"] == "ALARM"]
    alarms.sort(key=lambda alarm: str(alarm.get("StateUpdatedTimestamp", "")))
    return [
        f"{alarm.get('AlarmDescription') or alarm['AlarmName']}: {alarm.get('StateReason', 'it sounds')}"
        for alarm in alarms
    ]


def delete_alarms(aws: Aws, names: Sequence[str]) -> None:
    """Delete those that exist."""
    there = [alarm["AlarmName"] for alarm in describe_alarms(aws, names)]
    if there:
        aws.cloudwatch.delete_alarms(AlarmNames=there)


def alarms_of_configs(aws: Aws, config_names: Sequence[str]) -> list[str]:
    """Names of the alarms that deployments of these configs have put."""
    return [
        alarm["AlarmName"]
        for config_name in config_names
        for page in aws.cloudwatch.pages("describe_alarms", AlarmNamePrefix=f"{config_name}-")
        for alarm in page["MetricAlarms"]
    ]


def _require_known(aws: Aws, names: Sequence[str]) -> None:
    known = {alarm["AlarmName"] for alarm in describe_alarms(aws, names)}
    if missing := [name for name in names if name not in known]:
        raise EndpointError(
            f"CloudWatch has no alarm {', '.join(missing)}",
            "alarms that exist",
            "correct alarms.own, or create them",
        )


def _let_old_figures_pass(aws: Aws, alarms: Sequence[dict[str, Any]]) -> None:
    """Wait while a new alarm would judge what an earlier try of the same version has left."""
    window_s = _longest_s(alarms)
    deadline = time.monotonic() + window_s
    while _has_figures(aws, alarms, window_s) and time.monotonic() < deadline:
        flow_logger().info("waiting until figures of an earlier try are too old for the alarms")
        time.sleep(_POLL_S)


def _longest_s(alarms: Sequence[dict[str, Any]]) -> float:
    """How far back alarms look: CloudWatch judges some periods beyond those asked for, if these have data."""
    return float(
        max((alarm["Period"] * (alarm["EvaluationPeriods"] + _MORE_PERIODS) for alarm in alarms), default=60)
    )


def _has_figures(aws: Aws, alarms: Sequence[dict[str, Any]], window_s: float) -> bool:
    """Whether CloudWatch has anything for the alarms to judge."""
    now = datetime.now(UTC)
    queries = [
        {
            "Id": f"m{index}",
            "MetricStat": {
                "Metric": {name: alarm[name] for name in ("Namespace", "MetricName", "Dimensions")},
                "Period": alarm["Period"],
                "Stat": alarm["Statistic"],
            },
        }
        for index, alarm in enumerate(alarms)
    ]
    if not queries:
        return False
    found = aws.cloudwatch.get_metric_data(
        MetricDataQueries=queries, StartTime=now - timedelta(seconds=window_s), EndTime=now
    )
    return any(result["Values"] for result in found["MetricDataResults"])


def _wait_until_silent(aws: Aws, names: Sequence[str], patience_s: float) -> None:
    """An alarm of an earlier try of the same deployment goes silent once its metrics are old."""
    deadline = time.monotonic() + patience_s
    while loud := sounding(aws, names):
        if time.monotonic() > deadline:
            raise EndpointError(
                f"alarms sound before the update has begun: {'; '.join(loud)}",
                "silent alarms; SageMaker would take the update back at once",
                "wait until they are silent, or see what makes them sound",
            )
        flow_logger().info("waiting until no alarm sounds: %s", "; ".join(loud))
        time.sleep(_POLL_S)


@task(
    name="retire-alarms",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=may_pass,
    timeout_seconds=300,
)
def retire_alarms(config_name: str | None) -> None:
    """Delete the alarms of a config whose fleet is gone."""
    if config_name is not None:
        aws = connect_aws(Places())
        delete_alarms(aws, alarms_of_configs(aws, [config_name]))
