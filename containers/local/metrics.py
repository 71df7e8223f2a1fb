"""What SageMaker publishes of an endpoint's invocations in CloudWatch, namespace AWS/SageMaker.

Each metric goes out twice: by EndpointName and VariantName, and with EndpointConfigName besides, so that an alarm
can watch the new fleet alone. Counts of errors are 0 or 1 a request (Sum: how many; Average: the error rate);
latencies are in microseconds.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from containers.local.traffic import Route

logger = logging.getLogger(__name__)

NAMESPACE = "AWS/SageMaker"
FLUSH_EVERY_S = 1.0
_MOST_IN_ONE_CALL = 500
_KEPT_WHILE_UNREACHABLE = 5_000
_CONFIG = Config(connect_timeout=3, read_timeout=10, retries={"mode": "standard", "max_attempts": 2})

_Key = tuple[str, str, str, str]  # endpoint, variant, config, metric


@dataclass
class _Statistics:
    """What CloudWatch takes in place of single values."""

    unit: str
    count: float = 0.0
    total: float = 0.0
    smallest: float = float("inf")
    largest: float = float("-inf")

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)

    def as_request(self) -> dict[str, float]:
        return {
            "SampleCount": self.count,
            "Sum": self.total,
            "Minimum": self.smallest,
            "Maximum": self.largest,
        }


class Metrics:
    """Collects, and publishes about once a second.

    Args:
        cloudwatch: client; None makes one by the environment (AWS_ENDPOINT_URL_CLOUDWATCH) when first needed.
    """

    def __init__(self, cloudwatch: Any = None) -> None:
        self._cloudwatch = cloudwatch
        self._collected: dict[_Key, _Statistics] = {}
        self._unsent: list[dict[str, Any]] = []
        self._is_reachable = True
        self._flushing = asyncio.Lock()

    def record(
        self,
        route: Route,
        endpoint_name: str,
        status: int,
        model_s: float,
        overhead_s: float = 0.0,
        first_chunk_s: float | None = None,
    ) -> None:
        """Count one invocation.

        Args:
            status: what the container answered; 0 for no answer, which counts as a 5XX.
            model_s: seconds that the container took; ModelLatency.
            overhead_s: seconds that everything around it took; OverheadLatency.
            first_chunk_s: seconds until the first piece of a stream.
        """
        instances = max(1, len(route.fleet.in_service_instances()))
        values = [
            ("Invocations", 1.0, "None"),
            ("InvocationsPerInstance", 1.0 / instances, "None"),
            ("Invocation4XXErrors", float(400 <= status < 500), "None"),
            ("Invocation5XXErrors", float(status == 0 or status >= 500), "None"),
            ("InvocationModelErrors", float(not 200 <= status < 300), "None"),
        ]
        if status:
            values.append(("ModelLatency", model_s * 1e6, "Microseconds"))
            values.append(("OverheadLatency", overhead_s * 1e6, "Microseconds"))
        if first_chunk_s is not None:
            values.append(("FirstChunkModelLatency", first_chunk_s * 1e6, "Microseconds"))
        for name, value, unit in values:
            key = (endpoint_name, route.variant_name, route.config_name, name)
            self._collected.setdefault(key, _Statistics(unit)).add(value)

    async def run(self) -> None:
        """For ever: publish what came in; the rest on being cancelled."""
        try:
            while True:
                await asyncio.sleep(FLUSH_EVERY_S)
                await self.flush()
        finally:
            await self.flush()

    async def flush(self) -> None:
        """Publish what was collected. While CloudWatch cannot be reached it is kept, the newest of it."""
        async with self._flushing:
            await self._flush()

    async def _flush(self) -> None:
        collected, self._collected = self._collected, {}
        now = datetime.now(UTC)
        data = self._unsent
        for key, statistics in collected.items():
            data += _data_of(key, statistics, now)
        self._unsent = data[-_KEPT_WHILE_UNREACHABLE:]
        while self._unsent:
            # Taken out first: a cancellation meanwhile does not stop the thread that sends it.
            batch, self._unsent = self._unsent[:_MOST_IN_ONE_CALL], self._unsent[_MOST_IN_ONE_CALL:]
            try:
                await asyncio.to_thread(self._put, batch)
            except (BotoCoreError, ClientError) as error:
                if self._is_reachable:
                    logger.warning("CloudWatch takes no metrics: %s", error)
                self._is_reachable = False
                self._unsent = batch + self._unsent
                return
            self._is_reachable = True

    def _put(self, data: list[dict[str, Any]]) -> None:
        if self._cloudwatch is None:
            self._cloudwatch = boto3.client("cloudwatch", config=_CONFIG)
        self._cloudwatch.put_metric_data(Namespace=NAMESPACE, MetricData=data)


def _data_of(key: _Key, statistics: _Statistics, now: datetime) -> list[dict[str, Any]]:
    endpoint_name, variant_name, config_name, name = key
    dimensions = [
        {"Name": "EndpointName", "Value": endpoint_name},
        {"Name": "VariantName", "Value": variant_name},
    ]
    datum = {
        "MetricName": name,
        "Timestamp": now,
        "StatisticValues": statistics.as_request(),
        "Unit": statistics.unit,
        "StorageResolution": 1,
    }
    with_config = [*dimensions, {"Name": "EndpointConfigName", "Value": config_name}]
    return [{**datum, "Dimensions": dimensions}, {**datum, "Dimensions": with_config}]
