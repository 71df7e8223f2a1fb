"""Data capture: a share of the requests and answers, to S3, in SageMaker's JSON lines.

One line an invocation, in objects `PREFIX/ENDPOINT/VARIANT/yyyy/mm/dd/hh/mm-ss-mmm-UUID.jsonl` (UTC):

    {"captureData": {"endpointInput": {"observedContentType": ..., "mode": "INPUT", "data": ..., "encoding": ...},
                     "endpointOutput": {..., "mode": "OUTPUT", ...}},
     "eventMetadata": {"eventId": ..., "inferenceId": ..., "customAttributes": [...], "inferenceTime": ...},
     "eventVersion": "0"}

`encoding` is JSON or CSV for the content types that the endpoint config lists as such, else BASE64. Of a stream,
the data is every piece of it, joined.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from containers.local.traffic import Route

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 2.0
_MOST_LINES_IN_ONE_OBJECT = 500
_LINES_KEPT_WHILE_UNREACHABLE = 2_000
_CONFIG = Config(connect_timeout=3, read_timeout=10, retries={"mode": "standard", "max_attempts": 2})

_Destination = tuple[str, str, str]  # S3 URI, endpoint, variant


@dataclass(frozen=True)
class Captured:
    """One answered invocation."""

    endpoint_name: str
    request_body: bytes
    request_type: str
    answer_body: bytes
    answer_type: str
    inference_id: str | None = None
    custom_attributes: str | None = None


class CaptureWriter:
    """Samples, collects, and writes every few seconds.

    Args:
        s3: client; None makes one by the environment (AWS_ENDPOINT_URL_S3) when first needed.
    """

    def __init__(self, s3: Any = None) -> None:
        self._s3 = s3
        self._random = random.Random()
        self._lines: dict[_Destination, list[str]] = {}
        self._is_reachable = True
        self._flushing = asyncio.Lock()

    def wants(self, route: Route) -> bool:
        """Whether this invocation is one of the share to capture. Ask once an invocation."""
        config = route.capture
        if not config or not config.get("EnableCapture", True):
            return False
        return self._random.random() * 100 < config["InitialSamplingPercentage"]

    def add(self, route: Route, captured: Captured) -> None:
        """Take an invocation that `wants` chose; the next flush writes it."""
        assert route.capture is not None, "wants() said yes"
        key = (route.capture["DestinationS3Uri"], captured.endpoint_name, route.variant_name)
        line = json.dumps(_line(route.capture, captured), ensure_ascii=False)
        self._lines.setdefault(key, []).append(line)

    async def run(self) -> None:
        """For ever: write what came in; the rest on being cancelled."""
        try:
            while True:
                await asyncio.sleep(FLUSH_EVERY_S)
                await self.flush()
        finally:
            await self.flush()

    async def flush(self) -> None:
        """Write what was collected. What cannot be written is kept, the newest of it, and tried again."""
        async with self._flushing:
            for destination in list(self._lines):
                await self._flush_to(destination)

    async def _flush_to(self, destination: _Destination) -> None:
        while lines := self._lines.get(destination):
            # Taken out first: a cancellation meanwhile does not stop the thread that writes it.
            batch, self._lines[destination] = (
                lines[:_MOST_LINES_IN_ONE_OBJECT],
                lines[_MOST_LINES_IN_ONE_OBJECT:],
            )
            try:
                await asyncio.to_thread(self._put, destination, batch)
            except (BotoCoreError, ClientError) as error:
                if self._is_reachable:
                    logger.warning("no data capture to %s: %s", destination[0], error)
                self._is_reachable = False
                newest = batch + self._lines.get(destination, [])
                self._lines[destination] = newest[-_LINES_KEPT_WHILE_UNREACHABLE:]
                return
            self._is_reachable = True
        self._lines.pop(destination, None)

    def _put(self, destination: _Destination, lines: list[str]) -> None:
        if self._s3 is None:
            self._s3 = boto3.client("s3", config=_CONFIG)
        uri, endpoint_name, variant_name = destination
        parts = urlsplit(uri)
        prefix = "/".join([*filter(None, [parts.path.strip("/")]), endpoint_name, variant_name])
        now = datetime.now(UTC)
        name = f"{now:%M-%S}-{now.microsecond // 1000:03d}-{uuid.uuid4()}.jsonl"
        body = "".join(line + "\n" for line in lines)
        self._s3.put_object(
            Bucket=parts.netloc,
            Key=f"{prefix}/{now:%Y/%m/%d/%H}/{name}",
            Body=body.encode(),
            ContentType="application/jsonlines",
        )


def _line(config: dict[str, Any], captured: Captured) -> dict[str, Any]:
    modes = {option["CaptureMode"] for option in config["CaptureOptions"]}
    data = {}
    if modes & {"Input", "InputAndOutput"}:
        data["endpointInput"] = _payload(config, "INPUT", captured.request_body, captured.request_type)
    if modes & {"Output", "InputAndOutput"}:
        data["endpointOutput"] = _payload(config, "OUTPUT", captured.answer_body, captured.answer_type)
    metadata: dict[str, Any] = {"eventId": str(uuid.uuid4())}
    if captured.custom_attributes is not None:
        metadata["customAttributes"] = [captured.custom_attributes]
    if captured.inference_id is not None:
        metadata["inferenceId"] = captured.inference_id
    metadata["inferenceTime"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {"captureData": data, "eventMetadata": metadata, "eventVersion": "0"}


def _payload(config: dict[str, Any], mode: str, body: bytes, content_type: str) -> dict[str, str]:
    encoding = _encoding(config.get("CaptureContentTypeHeader") or {}, content_type)
    try:
        text = body.decode() if encoding != "BASE64" else base64.b64encode(body).decode()
    except UnicodeDecodeError:  # declared as text, but none
        encoding, text = "BASE64", base64.b64encode(body).decode()
    return {"observedContentType": content_type, "mode": mode, "data": text, "encoding": encoding}


def _encoding(header: dict[str, list[str]], content_type: str) -> str:
    """How SageMaker writes a body of this type: as text only where the config says so."""
    bare = content_type.partition(";")[0].strip().lower()
    for name, encoding in (("JsonContentTypes", "JSON"), ("CsvContentTypes", "CSV")):
        if bare in {known.lower() for known in header.get(name, ())}:
            return encoding
    return "BASE64"
