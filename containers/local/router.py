"""SageMaker's runtime: InvokeEndpoint and InvokeEndpointWithResponseStream, relayed to an instance's /invocations.

A request is lost only with the instance that is answering it. An instance that refuses the connection has seen
nothing of the request, so that another one gets it, of another fleet if need be. One that dies while it answers
gives the caller the ModelError that AWS gives; nobody can know how far it came, so nobody tries again.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as HttpRoute
from starlette.types import Receive, Scope, Send

from containers.local import event_stream
from containers.local.arn import ACCOUNT, region
from containers.local.capture import Captured, CaptureWriter
from containers.local.instance import Instance
from containers.local.metrics import Metrics
from containers.local.traffic import Route, Traffic

MAX_BODY_BYTES = 6 * 2**20
INVOCATION_TIMEOUT_S = 60.0
STREAM_TIMEOUT_S = 480.0
_CONNECT_TIMEOUT_S = 5.0

_CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_INFERENCE_ID = "X-Amzn-SageMaker-Inference-Id"
_TARGET_VARIANT = "X-Amzn-SageMaker-Target-Variant"
_SESSION_ID = "X-Amzn-SageMaker-Session-Id"
_FORWARDED = ("Content-Type", "Accept", _CUSTOM_ATTRIBUTES, _INFERENCE_ID, _SESSION_ID)
# For endpoints of another kind: several models, several containers, inference components.
_REFUSED = (
    "X-Amzn-SageMaker-Target-Model",
    "X-Amzn-SageMaker-Target-Container-Hostname",
    "X-Amzn-SageMaker-Inference-Component",
)
_TIMED_OUT = (
    "Your invocation timed out while waiting for a response from container primary. Review the latency metrics for "
    "each container in Amazon CloudWatch, resolve the issue, and try again."
)


class InvocationRefused(Exception):
    """An error answer of the runtime.

    Args:
        code: its name in the service model.
        status: HTTP status.
        fields: members of the error besides its message.
    """

    def __init__(self, code: str, status: int, message: str, **fields: Any) -> None:
        self.code = code
        self.status = status
        self.fields = {"Message": message, **fields}
        super().__init__(message)

    def response(self) -> Response:
        """As rest-json writes it."""
        headers = {"x-amzn-ErrorType": self.code, "x-amzn-RequestId": str(uuid.uuid4())}
        body = json.dumps(self.fields)
        return Response(body, self.status, headers, media_type="application/json")


@dataclass(frozen=True)
class _Call:
    """A request as it came in."""

    endpoint_name: str
    body: bytes
    headers: Mapping[str, str]
    started: float


@dataclass
class _Exchange:
    """A request on its way through one instance. `close` ends it, whatever happened."""

    call: _Call
    route: Route
    instance: Instance
    answer: httpx.Response | None = None
    sent: float = field(default_factory=time.perf_counter)
    is_open: bool = True

    def __post_init__(self) -> None:
        self.instance.in_flight += 1

    async def close(self) -> None:
        """The instance is free again; the container notices when its answer is not wanted any more."""
        if not self.is_open:
            return
        self.is_open = False
        self.instance.in_flight -= 1
        if self.answer is not None:
            with anyio.CancelScope(shield=True):
                await self.answer.aclose()


class Router:
    """Answers the runtime's two calls.

    Args:
        traffic: who answers for which endpoint.
        metrics: counts what happens.
        capture_writer: keeps a share of it.
    """

    def __init__(self, traffic: Traffic, metrics: Metrics, capture_writer: CaptureWriter) -> None:
        self._traffic = traffic
        self._metrics = metrics
        self._capture_writer = capture_writer
        # A connection for each request: one kept from before may be closed by the instance in the same moment, and
        # then nobody knows whether it saw the request. On loopback a new one costs next to nothing.
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    @property
    def http_routes(self) -> list[HttpRoute]:
        """For a Starlette application."""
        return [
            HttpRoute("/endpoints/{name}/invocations", self.invocations, methods=["POST"]),
            HttpRoute(
                "/endpoints/{name}/invocations-response-stream",
                self.invocations_response_stream,
                methods=["POST"],
            ),
        ]

    async def aclose(self) -> None:
        """Close what is open to the instances."""
        await self._client.aclose()

    async def invocations(self, request: Request) -> Response:
        """InvokeEndpoint."""
        try:
            call = await _read(request)
            exchange = await self._open(call)
            try:
                body = await self._whole_answer(exchange)
            finally:
                await exchange.close()
        except InvocationRefused as refused:
            return refused.response()
        assert exchange.answer is not None
        content_type = exchange.answer.headers.get("content-type", "application/octet-stream")
        if self._capture_writer.wants(exchange.route):
            self._capture_writer.add(exchange.route, _captured(call, body, content_type))
        headers = _answer_headers(exchange)
        return Response(body, 200, headers, media_type=content_type)

    async def invocations_response_stream(self, request: Request) -> Response:
        """InvokeEndpointWithResponseStream."""
        try:
            call = await _read(request)
            exchange = await self._open(call)
            try:
                await self._require_success(exchange)
            except BaseException:
                await exchange.close()
                raise
        except InvocationRefused as refused:
            return refused.response()
        return _StreamedAnswer(exchange, self._parts(exchange))

    async def _open(self, call: _Call) -> _Exchange:
        """Hand the request to an instance and wait for the head of its answer.

        Raises:
            InvocationRefused: the endpoint or variant is unknown, nobody is in service, or the container died
                or took too long.
        """
        for number, route in enumerate(self._require_routes(call)):
            for instance in route.fleet.in_service_instances():
                exchange = _Exchange(call, route, instance)
                try:
                    exchange.answer = await self._send(exchange)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    await exchange.close()
                    route.fleet.report_unreachable(instance)
                    continue
                except BaseException:
                    await exchange.close()
                    raise
                return exchange
            if number == 0 and route.weight > 0:
                # Counted against the fleet that should have answered, so that its alarms see that it is gone.
                self._metrics.record(route, call.endpoint_name, status=0, model_s=0.0)
        raise InvocationRefused("ServiceUnavailable", 503, "The service is unavailable. Try your call again.")

    def _require_routes(self, call: _Call) -> list[Route]:
        name = call.endpoint_name
        if not self._traffic.routes(name):
            raise InvocationRefused(
                "ValidationError", 400, f"Endpoint {name} of account {ACCOUNT} not found."
            )
        variant = call.headers.get(_TARGET_VARIANT)
        routes = self._traffic.order(name, variant)
        if not routes:
            raise InvocationRefused("ValidationError", 400, f"Variant {variant} not found for Request")
        return routes

    async def _send(self, exchange: _Exchange) -> httpx.Response:
        call = exchange.call
        headers = {name: call.headers[name] for name in _FORWARDED if name in call.headers}
        if "X-Amzn-SageMaker-Accept" in call.headers:
            headers["Accept"] = call.headers["X-Amzn-SageMaker-Accept"]
        outgoing = self._client.build_request(
            "POST", f"{exchange.instance.url}/invocations", content=call.body, headers=headers
        )
        try:
            async with asyncio.timeout(INVOCATION_TIMEOUT_S):
                return await self._client.send(outgoing, stream=True)
        except TimeoutError:
            raise self._model_error(exchange, 0, _TIMED_OUT) from None
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except httpx.TransportError:
            raise self._gone(exchange) from None

    async def _whole_answer(self, exchange: _Exchange) -> bytes:
        """The body of an answer of status 2xx.

        Raises:
            InvocationRefused: another status, or it broke off, or took too long.
        """
        await self._require_success(exchange)
        assert exchange.answer is not None
        delay_s, factor = exchange.route.fleet.latency_fault()
        left_s = INVOCATION_TIMEOUT_S - (time.perf_counter() - exchange.sent)
        try:
            async with asyncio.timeout(left_s):
                body = await exchange.answer.aread()
                await asyncio.sleep(delay_s + (factor - 1) * (time.perf_counter() - exchange.sent))
        except TimeoutError:
            raise self._model_error(exchange, 0, _TIMED_OUT) from None
        except httpx.TransportError:
            raise self._gone(exchange) from None
        self._record_success(exchange)
        return body

    async def _parts(self, exchange: _Exchange) -> AsyncIterator[bytes]:
        """The answer as an event stream; it ends with an exception event where the answer breaks off."""
        assert exchange.answer is not None
        delay_s, factor = exchange.route.fleet.latency_fault()
        is_captured = self._capture_writer.wants(exchange.route)
        pieces: list[bytes] = []
        first_chunk_s: float | None = None
        last = exchange.sent
        deadline = asyncio.get_running_loop().time() + STREAM_TIMEOUT_S
        iterator = exchange.answer.aiter_raw()
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await anext(iterator, None)
                    if piece is not None:
                        pause_s = delay_s + (factor - 1) * (time.perf_counter() - last)
                        await asyncio.sleep(pause_s)
                        delay_s = 0.0
            except TimeoutError:
                self._record_failure(exchange)
                yield event_stream.model_stream_error(
                    "ModelInvocationTimeExceeded",
                    "The model did not finish its response within the time allowed.",
                )
                return
            except httpx.TransportError:
                self._record_failure(exchange)
                yield event_stream.model_stream_error(
                    "StreamBroken", "The connection between the client and the model was reset or closed."
                )
                return
            if piece is None:
                break
            last = time.perf_counter()
            if first_chunk_s is None:
                first_chunk_s = last - exchange.sent
            if is_captured:
                pieces.append(piece)
            yield event_stream.payload_part(piece)
        self._record_success(exchange, first_chunk_s)
        if is_captured:
            content_type = exchange.answer.headers.get("content-type", "application/octet-stream")
            body = b"".join(pieces)
            self._capture_writer.add(exchange.route, _captured(exchange.call, body, content_type))

    async def _require_success(self, exchange: _Exchange) -> None:
        """Turn a container's error into the runtime's.

        Raises:
            InvocationRefused: ModelError, with the container's status and words.
        """
        assert exchange.answer is not None
        if exchange.answer.is_success:
            return
        try:
            async with asyncio.timeout(INVOCATION_TIMEOUT_S):
                text = (await exchange.answer.aread()).decode(errors="replace")
        except (TimeoutError, httpx.TransportError):
            raise self._gone(exchange) from None
        raise self._model_error(exchange, exchange.answer.status_code, text)

    def _gone(self, exchange: _Exchange) -> InvocationRefused:
        """The instance died, or closed the connection, with this request in flight."""
        exchange.route.fleet.report_unreachable(exchange.instance)
        return self._model_error(
            exchange,
            0,
            f"Amazon SageMaker could not get a response from the {exchange.call.endpoint_name} endpoint. This can "
            "occur when CPU or memory utilization is high. To check your utilization, see Amazon CloudWatch. To fix "
            "this problem, use an instance type with more CPU capacity or memory.",
        )

    def _model_error(self, exchange: _Exchange, status: int, text: str) -> InvocationRefused:
        """Count the failure and word it as SageMaker does."""
        self._record_failure(exchange, status)
        name = exchange.call.endpoint_name
        group = f"/aws/sagemaker/Endpoints/{name}"
        side = "client" if 400 <= status < 500 else "server"
        message = (
            f'Received {side} error ({status}) from primary with message "{text}". See '
            f"https://{region()}.console.aws.amazon.com/cloudwatch/home?region={region()}#logEventViewer:group={group} "
            f"in account {ACCOUNT} for more information. (On this machine: {exchange.instance.record.log_path}.)"
        )
        return InvocationRefused(
            "ModelError",
            424,
            message,
            OriginalStatusCode=status,
            OriginalMessage=text,
            LogStreamArn=f"arn:aws:logs:{region()}:{ACCOUNT}:log-group:{group}",
        )

    def _record_success(self, exchange: _Exchange, first_chunk_s: float | None = None) -> None:
        assert exchange.answer is not None
        self._record(exchange, exchange.answer.status_code, first_chunk_s)

    def _record_failure(self, exchange: _Exchange, status: int = 0) -> None:
        self._record(exchange, status, None)

    def _record(self, exchange: _Exchange, status: int, first_chunk_s: float | None) -> None:
        now = time.perf_counter()
        self._metrics.record(
            exchange.route,
            exchange.call.endpoint_name,
            status=status,
            model_s=now - exchange.sent,
            overhead_s=exchange.sent - exchange.call.started,
            first_chunk_s=first_chunk_s,
        )


class _StreamedAnswer(StreamingResponse):
    """Closes the exchange when the caller has everything, or has gone away."""

    def __init__(self, exchange: _Exchange, parts: AsyncIterator[bytes]) -> None:
        headers = _answer_headers(exchange)
        assert exchange.answer is not None
        headers["X-Amzn-SageMaker-Content-Type"] = exchange.answer.headers.get(
            "content-type", "application/octet-stream"
        )
        super().__init__(parts, 200, headers, media_type=event_stream.CONTENT_TYPE)
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._exchange.close()


async def _read(request: Request) -> _Call:
    """The whole request.

    Raises:
        InvocationRefused: it is too long, or for an endpoint of another kind.
    """
    started = time.perf_counter()
    for name in _REFUSED:
        if name in request.headers:
            raise InvocationRefused("ValidationError", 400, f"{name} is not supported for this endpoint.")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise InvocationRefused(
                "ValidationError",
                400,
                "1 validation error detected: Value at 'body' failed to satisfy constraint: Member must have length "
                f"less than or equal to {MAX_BODY_BYTES}",
            )
    return _Call(request.path_params["name"], bytes(body), request.headers, started)


def _answer_headers(exchange: _Exchange) -> dict[str, str]:
    headers = {
        "x-Amzn-Invoked-Production-Variant": exchange.route.variant_name,
        "x-amzn-RequestId": str(uuid.uuid4()),
    }
    assert exchange.answer is not None
    if (attributes := exchange.answer.headers.get(_CUSTOM_ATTRIBUTES)) is not None:
        headers[_CUSTOM_ATTRIBUTES] = attributes
    return headers


def _captured(call: _Call, body: bytes, content_type: str) -> Captured:
    return Captured(
        endpoint_name=call.endpoint_name,
        request_body=call.body,
        request_type=call.headers.get("Content-Type", "application/octet-stream"),
        answer_body=body,
        answer_type=content_type,
        inference_id=call.headers.get(_INFERENCE_ID),
        custom_attributes=call.headers.get(_CUSTOM_ATTRIBUTES),
    )
