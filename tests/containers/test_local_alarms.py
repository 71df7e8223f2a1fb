"""When an alarm is up: CloudWatch's documented cases, then real alarms and metrics in moto."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import boto3
import pytest

from containers.local.alarm_rules import judge
from containers.local.alarms import Alarms

BREACH, FINE, GAP = 1.0, 0.0, None
_POINTS = {"X": BREACH, "0": FINE, "-": GAP}


def alarm(**changes: Any) -> dict[str, Any]:
    """Above 0.5 in 3 of 3 periods."""
    return {
        "EvaluationPeriods": 3,
        "DatapointsToAlarm": 3,
        "ComparisonOperator": "GreaterThanThreshold",
        "Threshold": 0.5,
        "StateValue": "KEPT",
        **changes,
    }


# https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/alarms-and-missing-data.html
# Five periods, oldest first; then the state under missing, ignore, breaching, notBreaching.
@pytest.mark.parametrize(
    ("to_alarm", "points", "missing", "ignore", "breaching", "not_breaching"),
    [
        (3, "0-X-X", "OK", "OK", "OK", "OK"),
        (3, "----0", "OK", "OK", "OK", "OK"),
        (3, "-----", "INSUFFICIENT_DATA", "KEPT", "ALARM", "OK"),
        (3, "0XX-X", "ALARM", "ALARM", "ALARM", "ALARM"),
        (3, "--X--", "ALARM", "KEPT", "ALARM", "OK"),
        (2, "0-X-X", "ALARM", "ALARM", "ALARM", "ALARM"),
        (2, "00X0X", "ALARM", "ALARM", "ALARM", "ALARM"),
        (2, "0-X--", "OK", "OK", "ALARM", "OK"),
        (2, "----0", "OK", "OK", "ALARM", "OK"),
        (2, "---X-", "ALARM", "KEPT", "ALARM", "OK"),
    ],
)
def test_cloudwatchs_own_examples(
    to_alarm: int, points: str, missing: str, ignore: str, breaching: str, not_breaching: str
) -> None:
    datapoints = [_POINTS[point] for point in points]
    states = {
        treatment: judge(alarm(DatapointsToAlarm=to_alarm, TreatMissingData=treatment), datapoints)[0]
        for treatment in ("missing", "ignore", "breaching", "notBreaching")
    }
    assert states == {
        "missing": missing,
        "ignore": ignore,
        "breaching": breaching,
        "notBreaching": not_breaching,
    }


def test_a_single_fresh_breach_does_not_raise_an_alarm_too_early() -> None:
    assert judge(alarm(), [GAP, GAP, GAP, GAP, BREACH])[0] == "KEPT"


@pytest.mark.parametrize(
    ("comparison", "up"),
    [
        ("GreaterThanThreshold", False),
        ("GreaterThanOrEqualToThreshold", True),
        ("LessThanThreshold", False),
        ("LessThanOrEqualToThreshold", True),
    ],
)
def test_comparisons_at_the_threshold(comparison: str, up: bool) -> None:
    state, _ = judge(alarm(ComparisonOperator=comparison), [0.5, 0.5, 0.5])
    assert state == ("ALARM" if up else "OK")


class Clock:
    """Now, until moved."""

    def __init__(self) -> None:
        self.now_s = time.time() // 60 * 60 + 30.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def cloudwatch(aws: str) -> Any:
    client = boto3.client("cloudwatch")
    found = client.describe_alarms()["MetricAlarms"]
    client.delete_alarms(AlarmNames=[item["AlarmName"] for item in found])
    return client


class Metric:
    """One metric of its own, its alarm, and their evaluation at a time of the test's choosing."""

    def __init__(self, cloudwatch: Any, **changes: Any) -> None:
        self.cloudwatch = cloudwatch
        self.clock = Clock()
        self.name = f"metric-{uuid.uuid4().hex[:8]}"
        self.alarms = Alarms(cloudwatch, self.clock)
        fields = {
            "AlarmName": self.name,
            "Namespace": "AWS/SageMaker",
            "MetricName": self.name,
            "Dimensions": self.dimensions("v2"),
            "Statistic": "Sum",
            "Period": 10,
            "EvaluationPeriods": 1,
            "Threshold": 0.0,
            "ComparisonOperator": "GreaterThanThreshold",
        }
        cloudwatch.put_metric_alarm(**{**fields, **changes})

    @staticmethod
    def dimensions(config_name: str) -> list[dict[str, str]]:
        pairs = {"EndpointName": "e", "VariantName": "v", "EndpointConfigName": config_name}
        return [{"Name": name, "Value": value} for name, value in pairs.items()]

    def put(self, value: float, seconds_ago: float, config_name: str = "v2") -> None:
        datum = {
            "MetricName": self.name,
            "Dimensions": self.dimensions(config_name),
            "Value": value,
            "Timestamp": self.clock.now_s - seconds_ago,
        }
        self.cloudwatch.put_metric_data(Namespace="AWS/SageMaker", MetricData=[datum])

    def state(self) -> str:
        asyncio.run(self.alarms.evaluate())
        found = self.cloudwatch.describe_alarms(AlarmNames=[self.name])["MetricAlarms"]
        return str(found[0]["StateValue"])


def test_no_data_is_insufficient_data(cloudwatch: Any) -> None:
    assert Metric(cloudwatch).state() == "INSUFFICIENT_DATA"


def test_the_fleet_of_another_config_does_not_raise_it(cloudwatch: Any) -> None:
    metric = Metric(cloudwatch)
    metric.put(1.0, seconds_ago=15, config_name="v1")
    assert metric.state() == "INSUFFICIENT_DATA"
    metric.put(1.0, seconds_ago=15, config_name="v2")
    assert metric.state() == "ALARM"


def test_only_whole_periods_are_judged(cloudwatch: Any) -> None:
    metric = Metric(cloudwatch)
    metric.clock.now_s += 5
    metric.put(1.0, seconds_ago=1)  # in the period that is still running
    assert metric.state() == "INSUFFICIENT_DATA"
    metric.clock.now_s += 10
    assert metric.state() == "ALARM"


def test_it_is_over_when_the_metric_is_fine_again(cloudwatch: Any) -> None:
    metric = Metric(cloudwatch)
    metric.put(1.0, seconds_ago=15)
    assert metric.state() == "ALARM"
    metric.clock.now_s += 10
    metric.put(0.0, seconds_ago=15)
    assert metric.state() == "OK"


@pytest.mark.parametrize(
    ("statistic", "threshold"),
    [("Sum", 8.5), ("Average", 2.5), ("Maximum", 4.5), ("Minimum", 0.5), ("SampleCount", 2.5)],
)
def test_statistics(cloudwatch: Any, statistic: str, threshold: float) -> None:
    """Of 1, 3 and 5: each statistic just above its threshold, none of the others' values would be."""
    metric = Metric(cloudwatch, Statistic=statistic, Threshold=threshold)
    for value in (1.0, 3.0, 5.0):
        metric.put(value, seconds_ago=15)
    assert metric.state() == "ALARM"
    above = {"Sum": 9.0, "Average": 3.0, "Maximum": 5.0, "Minimum": 1.0, "SampleCount": 3.0}[statistic]
    higher = Metric(cloudwatch, Statistic=statistic, Threshold=above)
    for value in (1.0, 3.0, 5.0):
        higher.put(value, seconds_ago=15)
    assert higher.state() == "OK"


def test_a_percentile_is_refused_in_words(cloudwatch: Any) -> None:
    metric = Metric(cloudwatch)
    cloudwatch.put_metric_alarm(
        AlarmName=metric.name,
        Namespace="AWS/SageMaker",
        MetricName=metric.name,
        ExtendedStatistic="p99",
        Period=10,
        EvaluationPeriods=1,
        Threshold=0.0,
        ComparisonOperator="GreaterThanThreshold",
    )
    assert metric.state() == "INSUFFICIENT_DATA"
    found = cloudwatch.describe_alarms(AlarmNames=[metric.name])["MetricAlarms"][0]
    assert "percentiles" in found["StateReason"]


def test_who_waits_for_an_alarm_hears_of_it_at_the_next_evaluation(cloudwatch: Any) -> None:
    metric = Metric(cloudwatch)

    async def wait_and_evaluate() -> tuple[str | None, str | None]:
        nothing = await metric.alarms.wait_for_alarm([metric.name], 0.1)
        waiting = asyncio.create_task(metric.alarms.wait_for_alarm(["other", metric.name], 30))
        metric.put(1.0, seconds_ago=15)
        await metric.alarms.evaluate()
        return nothing, await asyncio.wait_for(waiting, 1)

    assert asyncio.run(wait_and_evaluate()) == (None, metric.name)


def test_alarms_that_do_not_exist_are_named(cloudwatch: Any) -> None:
    metric = Metric(cloudwatch)
    assert asyncio.run(metric.alarms.missing([metric.name, "no-such-alarm"])) == ["no-such-alarm"]
