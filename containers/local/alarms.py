"""Evaluate the alarms that moto's CloudWatch stores but never judges, and write their states back.

Each tick reads all metric alarms, asks for the statistics of their last whole periods, judges them by
`alarm_rules`, and sets the state of those that changed. A deployment waits here for its alarms.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from containers.local.alarm_rules import INSUFFICIENT_DATA, evaluation_range, is_supported, judge

TICK_S = 1.0
# Metrics are published every second or so: a period is judged once its last values have arrived.
SETTLE_S = 2.0

_log = logging.getLogger(__name__)


class Alarms:
    """The alarms of this machine's CloudWatch.

    Args:
        cloudwatch: a boto3 client.
        clock: seconds since the epoch.
    """

    def __init__(self, cloudwatch: Any, clock: Callable[[], float] = time.time) -> None:
        self._cloudwatch = cloudwatch
        self._clock = clock
        self._in_alarm: frozenset[str] = frozenset()
        self._ticked = asyncio.Condition()
        self._works = True

    async def run(self, tick_s: float = TICK_S) -> None:
        """Evaluate for ever. What stops it is logged once, and tried again: rollbacks hang on it."""
        while True:
            try:
                await self.evaluate()
                self._works = True
            except Exception as error:
                if self._works:
                    expected = isinstance(error, (BotoCoreError, ClientError))
                    _log.warning("alarms are not evaluated: %s", error, exc_info=not expected)
                self._works = False
            await asyncio.sleep(tick_s)

    async def evaluate(self) -> None:
        """One tick."""
        in_alarm = await asyncio.to_thread(self._evaluate_all)
        async with self._ticked:
            self._in_alarm = in_alarm
            self._ticked.notify_all()

    async def wait_for_alarm(self, names: Sequence[str], timeout_s: float) -> str | None:
        """The first of these alarms to be in ALARM, at once if one is; None when time is up without."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)), self._ticked:
                while not (up := [name for name in names if name in self._in_alarm]):
                    await self._ticked.wait()
                return up[0]
        except TimeoutError:
            return next((name for name in names if name in self._in_alarm), None)

    async def missing(self, names: Sequence[str]) -> list[str]:
        """Which of these alarms CloudWatch does not know; none while it cannot be asked."""
        if not names:
            return []
        try:
            answer = await asyncio.to_thread(self._cloudwatch.describe_alarms, AlarmNames=list(names))
        except (BotoCoreError, ClientError) as error:
            _log.warning("alarms cannot be looked up: %s", error)
            return []
        known = {alarm["AlarmName"] for alarm in answer["MetricAlarms"] + answer.get("CompositeAlarms", [])}
        return [name for name in names if name not in known]

    def _evaluate_all(self) -> frozenset[str]:
        pages = self._cloudwatch.get_paginator("describe_alarms").paginate()
        alarms = [alarm for page in pages for alarm in page["MetricAlarms"]]
        states = {}
        for alarm, (state, reason) in self._judged(alarms):
            states[alarm["AlarmName"]] = state
            if state != alarm["StateValue"]:
                self._set_state(alarm, state, reason)
        return frozenset(name for name, state in states.items() if state == "ALARM")

    def _judged(self, alarms: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], tuple[str, str]]]:
        by_period: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for alarm in alarms:
            if (reason := is_supported(alarm)) is not None:
                yield alarm, (INSUFFICIENT_DATA, reason)
            else:
                by_period[int(alarm["Period"])].append(alarm)
        for period_s, group in by_period.items():
            for alarm, datapoints in zip(group, self._datapoints(group, period_s), strict=True):
                yield alarm, judge(alarm, datapoints)

    def _datapoints(self, alarms: list[dict[str, Any]], period_s: int) -> list[list[float | None]]:
        """One list an alarm: the statistic of each whole period of its evaluation range, oldest first."""
        end_s = (self._clock() - SETTLE_S) // period_s * period_s
        longest = max(evaluation_range(alarm) for alarm in alarms)
        answer = self._cloudwatch.get_metric_data(
            MetricDataQueries=[_query(f"a{number}", alarm) for number, alarm in enumerate(alarms)],
            StartTime=datetime.fromtimestamp(end_s - longest * period_s, UTC),
            EndTime=datetime.fromtimestamp(end_s, UTC),
        )
        results = {result["Id"]: result for result in answer["MetricDataResults"]}
        rows = []
        for number, alarm in enumerate(alarms):
            result = results[f"a{number}"]
            values = {
                round(at.timestamp()): value
                for at, value in zip(result["Timestamps"], result["Values"], strict=True)
            }
            first_s = end_s - evaluation_range(alarm) * period_s
            starts = [round(first_s + index * period_s) for index in range(evaluation_range(alarm))]
            rows.append([values.get(start) for start in starts])
        return rows

    def _set_state(self, alarm: dict[str, Any], state: str, reason: str) -> None:
        _log.info("alarm %s: %s -> %s (%s)", alarm["AlarmName"], alarm["StateValue"], state, reason)
        self._cloudwatch.set_alarm_state(
            AlarmName=alarm["AlarmName"],
            StateValue=state,
            StateReason=reason[:1023],
            StateReasonData=json.dumps({"version": "1.0", "queryDate": datetime.now(UTC).isoformat()}),
        )


def _query(query_id: str, alarm: dict[str, Any]) -> dict[str, Any]:
    statistic: dict[str, Any] = {
        "Metric": {
            "Namespace": alarm["Namespace"],
            "MetricName": alarm["MetricName"],
            "Dimensions": alarm.get("Dimensions", []),
        },
        "Period": int(alarm["Period"]),
        "Stat": alarm["Statistic"],
    }
    if alarm.get("Unit"):
        statistic["Unit"] = alarm["Unit"]
    return {"Id": query_id, "MetricStat": statistic}
