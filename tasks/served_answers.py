"""Production's own acceptance, from captured answers: vLLM counts it and tells it in each answer.

A streamed answer tells it in its last event, and only where the client asked for usage
(`stream_options.include_usage`) or the server gives it unasked (`--enable-force-include-usage`); others are
left out.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from drafter.captures import PROBE_PREFIX, is_capture
from tasks.aws import Aws
from tasks.build_endpoint import VARIANT
from tasks.endpoints import Endpoint

# Captures are written some time after the requests that they hold.
_LATEST_WRITE = timedelta(hours=1)


@dataclass(frozen=True)
class ServedAnswer:
    """One answer of production, with what was accepted of its drafts."""

    at: datetime
    served_name: str
    num_steps: int
    acceptance_length: float


def read_served_answers(
    aws: Aws, endpoint: Endpoint, since: datetime, until: datetime, max_answers: int
) -> list[ServedAnswer]:
    """The newest captured answers within a stretch of time; empty where the endpoint captures nothing."""
    answers: list[ServedAnswer] = []
    for key in _keys(aws, endpoint, since, until):
        bucket = _destination(endpoint)[0]
        body = aws.s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode("utf-8", errors="replace")
        found = [read_line(line) for line in body.splitlines()]
        answers += [answer for answer in found if answer is not None and since <= answer.at < until]
        if len(answers) >= max_answers:
            break
    return answers


def captures(endpoint: Endpoint) -> bool:
    """Whether the endpoint keeps requests and answers in S3."""
    return bool((endpoint.description.get("DataCaptureConfig") or {}).get("EnableCapture"))


def read_line(line: str) -> ServedAnswer | None:
    """A captured line; None: a probe, a failed request, or an answer that tells no acceptance."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not is_capture(value):
        return None
    event = value.get("eventMetadata") or {}
    if str(event.get("inferenceId") or "").startswith(PROBE_PREFIX):
        return None
    try:
        at = datetime.fromisoformat(event["inferenceTime"])
        answer = _with_metrics(_body(value["captureData"]["endpointOutput"]))
        if answer is None:
            return None
        speculation = answer["metrics"]["speculative_decoding"]
        return ServedAnswer(
            at=at if at.tzinfo else at.replace(tzinfo=UTC),
            served_name=str(answer["model"]),
            num_steps=int(speculation["num_spec_steps"]),
            acceptance_length=float(speculation["mean_acceptance_length"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def mean_acceptance(answers: list[ServedAnswer]) -> float | None:
    """Mean tokens a verification step over all steps; None without any."""
    steps = sum(answer.num_steps for answer in answers)
    if not steps:
        return None
    return sum(answer.acceptance_length * answer.num_steps for answer in answers) / steps


def _destination(endpoint: Endpoint) -> tuple[str, str]:
    """Bucket and prefix of the endpoint's captures."""
    parts = urlsplit(endpoint.description["DataCaptureConfig"]["DestinationS3Uri"])
    prefix = "/".join([*filter(None, [parts.path.strip("/")]), endpoint.name, VARIANT])
    return parts.netloc, prefix


def _keys(aws: Aws, endpoint: Endpoint, since: datetime, until: datetime) -> Iterator[str]:
    """Objects that may hold answers of that time, newest first."""
    if not captures(endpoint):
        return
    bucket, prefix = _destination(endpoint)
    hour = until.astimezone(UTC).replace(minute=0, second=0, microsecond=0) + _LATEST_WRITE
    while hour > since - _LATEST_WRITE:
        pages = aws.s3.pages("list_objects_v2", Bucket=bucket, Prefix=f"{prefix}/{hour:%Y/%m/%d/%H}/")
        found = [one for page in pages for one in page.get("Contents", ())]
        for one in sorted(found, key=lambda one: one["LastModified"], reverse=True):
            if one["LastModified"] >= since:
                yield one["Key"]
        hour -= timedelta(hours=1)


def _body(part: dict[str, Any]) -> str:
    data = part["data"]
    if str(part.get("encoding", "")).upper() != "BASE64":
        return str(data)
    try:
        return base64.b64decode(data, validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _with_metrics(body: str) -> dict[str, Any] | None:
    """The answer, or the event of a streamed one, that carries vLLM's figures."""
    if body.lstrip().startswith("{"):
        documents = [body]
    else:
        events = (
            line.removeprefix("data:").strip() for line in body.splitlines() if line.startswith("data:")
        )
        documents = [event for event in events if event.startswith("{") and '"metrics"' in event]
    for document in reversed(documents):
        answer = json.loads(document)
        if answer.get("metrics"):
            return dict(answer)
    return None
