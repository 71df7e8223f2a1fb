"""When a CloudWatch alarm is in ALARM, as a pure function of its settings and the datapoints.

CloudWatch looks at more periods than EvaluationPeriods (the evaluation range). If enough of them hold data, the
newest EvaluationPeriods datapoints are judged and gaps do not matter; else TreatMissingData fills what is
missing. An alarm is up when DatapointsToAlarm of them breach. With `missing`, a few breaching datapoints and no
other still raise it once the oldest is DatapointsToAlarm periods old.
https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/alarms-and-missing-data.html
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

EXTRA_PERIODS = 2  # CloudWatch's own example: 3 evaluation periods are looked for among 5

OK, ALARM, INSUFFICIENT_DATA = "OK", "ALARM", "INSUFFICIENT_DATA"

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "GreaterThanOrEqualToThreshold": operator.ge,
    "GreaterThanThreshold": operator.gt,
    "LessThanThreshold": operator.lt,
    "LessThanOrEqualToThreshold": operator.le,
}


def evaluation_range(alarm: Mapping[str, Any]) -> int:
    """How many periods back the datapoints of an alarm are looked for."""
    return int(alarm["EvaluationPeriods"]) + EXTRA_PERIODS


def judge(alarm: Mapping[str, Any], datapoints: Sequence[float | None]) -> tuple[str, str]:
    """The state that an alarm goes to, and the reason in words.

    Args:
        alarm: a MetricAlarm as DescribeAlarms gives it.
        datapoints: one per whole period of the evaluation range, oldest first; None where there is no data.

    Example: 3 of 3, `0 - X - X` (X breaches) is OK; `- - X - -` is ALARM, `- - - - -` is INSUFFICIENT_DATA.
    """
    needed = int(alarm["EvaluationPeriods"])
    to_alarm = int(alarm.get("DatapointsToAlarm") or needed)
    breaches = [None if value is None else _breaches(alarm, value) for value in datapoints]
    found = [breach for breach in breaches if breach is not None][-needed:]
    num_missing = needed - len(found)
    treatment = alarm.get("TreatMissingData") or "missing"
    words = _reason(alarm, datapoints)

    if not found and treatment == "missing":
        return INSUFFICIENT_DATA, "Insufficient Data: no datapoints were received for the evaluated periods"
    num_breaching = sum(found) + (num_missing if treatment == "breaching" else 0)
    if num_breaching >= to_alarm:
        return ALARM, words
    only_breaching = all(found) and num_missing > 0
    if treatment in {"missing", "ignore"} and only_breaching:
        oldest_age = len(breaches) - breaches.index(True) if found else 0
        if treatment == "missing" and oldest_age >= to_alarm:
            return ALARM, words
        return str(alarm["StateValue"]), str(alarm.get("StateReason", ""))
    return OK, words


def _breaches(alarm: Mapping[str, Any], value: float) -> bool:
    return _COMPARISONS[alarm["ComparisonOperator"]](value, float(alarm["Threshold"]))


def is_supported(alarm: Mapping[str, Any]) -> str | None:
    """Why an alarm cannot be evaluated here; None when it can."""
    if alarm.get("ExtendedStatistic"):
        return "percentiles are not evaluated on this machine: moto keeps none"
    if alarm.get("Metrics"):
        return "metric math is not evaluated on this machine: name one metric and a Statistic"
    if not alarm.get("Statistic"):
        return "an alarm without Statistic is not evaluated on this machine"
    if alarm.get("ComparisonOperator") not in _COMPARISONS:
        return f"the comparison {alarm.get('ComparisonOperator')} is not evaluated on this machine"
    return None


def _reason(alarm: Mapping[str, Any], datapoints: Sequence[float | None]) -> str:
    shown = ", ".join(f"{value:g}" for value in datapoints if value is not None) or "none"
    needed = alarm.get("DatapointsToAlarm") or alarm["EvaluationPeriods"]
    return (
        f"Threshold Crossed: {needed} out of the last {alarm['EvaluationPeriods']} datapoints are needed; "
        f"{alarm['ComparisonOperator']} {float(alarm['Threshold']):g}; datapoints, oldest first: {shown}"
    )
