"""SageMaker's runtime: InvokeEndpoint and InvokeEndpointWithResponseStream, relayed to an instance's /invocations.

A request is lost only with the instance that is answering it. An instance that refuses the connection has seen
nothing of the request, so that another one gets it, of another fleet if need be. One that dies while it answers
gives the caller the ModelError that AWS gives; nobody can know how far it came, so nobody tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import anyio
import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as HttpRoute
from starlette.types import Receive, Scope, Send

from containers.local import event_stream, runtime_errors
from containers.local.arn import ACCOUNT
from containers.local.capture import Captured, CaptureWriter
from containers.local.instance import Instance
from containers.local.late_answers import late_pieces
from containers.local.metrics import Metrics
from containers.local.runtime_errors import InvocationRefused
from containers.local.traffic import Route, Traffic

MAX_BODY_BYTES = 6 * 2**20
INVOCATION_TIMEOUT_S = 60.0
STREAM_TIMEOUT_S = 480.0
_CONNECT_TIMEOUT_S = 5.0

_CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_INFERENCE_ID = "X-Amzn-SageMaker-Inference-Id"
_TARGET_VARIANT = "X-Amzn-SageMaker-Target-Variant"
_SESSION_ID = "X-Amzn-SageMaker-Session-Id"
_STREAM_ACCEPT = "X-Amzn-SageMaker-Accept"
_FORWARDED = ("Content-Type", "Accept", _CUSTOM_ATTRIBUTES, _INFERENCE_ID, _SESSION_ID)
# For endpoints of another kind: several models, several containers, inference components.
_REFUSED = (
    "X-Amzn-SageMaker-Target-Model",
    "X-Amzn-SageMaker-Target-Container-Hostname",
    "X-Amzn-SageMaker-Inference-Component",
)
_UNTYPED = "application/octet-stream"
_REFUSED_CONNECTION = (httpx.ConnectError, httpx.ConnectTimeout)


@dataclass(frozen=True)
class _Call:
    """A request as it came in, `started` on time.perf_counter()."""

    endpoint_name: str
    body: bytes
    headers: Mapping[str, str]
    started: float

    def forwarded_headers(self) -> dict[str, str]:
        """What SageMaker lets through to the container; everything else it strips."""
        headers = {name: self.headers[name] for name in _FORWARDED if name in self.headers}
        if _STREAM_ACCEPT in self.headers:
            headers["Accept"] = self.headers[_STREAM_ACCEPT]
        return headers


@dataclass
class _Exchange:
    """A request on its way through one instance. `close` ends it, whatever happened."""

    call: _Call
    route: Route
    instance: Instance
    sent: float = field(default_factory=time.perf_counter)
    _answer: httpx.Response | None = None
    _is_open: bool = True

    def __post_init__(self) -> None:
        self.instance.in_flight += 1

    @property
    def answer(self) -> httpx.Response:
        """The container's answer, its head at least."""
        assert self._answer is not None, "not sent yet"
        return self._answer

    @property
    def content_type(self) -> str:
        return self.answer.headers.get("content-type", _UNTYPED)

    async def send(self, client: httpx.AsyncClient) -> None:
        """Hand the request over and wait for the head of the answer."""
        url = f"{self.instance.url}/invocations"
        outgoing = client.build_request(
            "POST", url, content=self.call.body, headers=self.call.forwarded_headers()
        )
        self._answer = await client.send(outgoing, stream=True)

    async def close(self) -> None:
        """The instance is free again; the container notices when its answer is not wanted any more."""
        if not self._is_open:
            return
        self._is_open = False
        self.instance.in_flight -= 1
        if self._answer is not None:
            with anyio.CancelScope(shield=True):
                await self._answer.aclose()

    def answer_headers(self) -> dict[str, str]:
        """What the caller gets besides the body."""
        headers = {
            "x-Amzn-Invoked-Production-Variant": self.route.variant_name,
            "x-amzn-RequestId": str(uuid.uuid4()),
        }
        if (attributes := self.answer.headers.get(_CUSTOM_ATTRIBUTES)) is not None:
            headers[_CUSTOM_ATTRIBUTES] = attributes
        return headers

    def captured(self, body: bytes) -> Captured:
        """Request and answer, for data capture."""
        call = self.call
        return Captured(
            endpoint_name=call.endpoint_name,
            request_body=call.body,
            request_type=call.headers.get("Content-Type", _UNTYPED),
            answer_body=body,
            answer_type=self.content_type,
            inference_id=call.headers.get(_INFERENCE_ID),
            custom_attributes=call.headers.get(_CUSTOM_ATTRIBUTES),
        )


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
            headers={"Accept-Encoding": "identity"},  # a stream's pieces go out as they come in
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    @property
    def http_routes(self) -> list[HttpRoute]:
        """For a Starlette application."""
        streamed = "/endpoints/{name}/invocations-response-stream"
        return [
            HttpRoute("/endpoints/{name}/invocations", self.invocations, methods=["POST"]),
            HttpRoute(streamed, self.invocations_response_stream, methods=["POST"]),
        ]

    async def aclose(self) -> None:
        """Close what is open to the instances."""
        await self._client.aclose()

    async def invocations(self, request: Request) -> Response:
        """InvokeEndpoint."""
        try:
            exchange = await self._open(await _read(request))
            try:
                body = await self._whole_answer(exchange)
            finally:
                await exchange.close()
        except InvocationRefused as refused:
            return refused.response()
        if self._capture_writer.wants(exchange.route):
            self._capture_writer.add(exchange.route, exchange.captured(body))
        return Response(body, 200, exchange.answer_headers(), media_type=exchange.content_type)

    async def invocations_response_stream(self, request: Request) -> Response:
        """InvokeEndpointWithResponseStream."""
        try:
            exchange = await self._open(await _read(request))
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
                    await self._send(exchange)
                except _REFUSED_CONNECTION:
                    await exchange.close()
                    route.fleet.report_unreachable(instance)
                except BaseException:
                    await exchange.close()
                    raise
                else:
                    return exchange
            if number == 0 and route.weight > 0:
                # Counted against the fleet that should have answered, so that its alarms see that it is gone.
                self._metrics.record(route, call.endpoint_name, status=0, model_s=0.0)
        raise runtime_errors.unavailable()

    def _require_routes(self, call: _Call) -> list[Route]:
        name, variant = call.endpoint_name, call.headers.get(_TARGET_VARIANT)
        if not self._traffic.routes(name):
            raise runtime_errors.invalid(f"Endpoint {name} of account {ACCOUNT} not found.")
        routes = self._traffic.order(name, variant)
        if not routes:
            raise runtime_errors.invalid(f"Variant {variant} not found for Request")
        return routes

    async def _send(self, exchange: _Exchange) -> None:
        """
        Raises:
            InvocationRefused: no answer in time, or the instance died with the request.
            httpx.ConnectError, httpx.ConnectTimeout: the request never reached it.
        """
        try:
            async with asyncio.timeout(INVOCATION_TIMEOUT_S):
                await exchange.send(self._client)
        except TimeoutError:
            raise self._failed(exchange, 0, runtime_errors.TIMED_OUT) from None
        except _REFUSED_CONNECTION:
            raise
        except httpx.TransportError:
            raise self._gone(exchange) from None

    async def _whole_answer(self, exchange: _Exchange) -> bytes:
        """The body of an answer of status 2xx.

        Raises:
            InvocationRefused: another status, or it broke off, or took too long.
        """
        await self._require_success(exchange)
        delay_s, factor = exchange.route.fleet.latency_fault()
        left_s = INVOCATION_TIMEOUT_S - (time.perf_counter() - exchange.sent)
        try:
            async with asyncio.timeout(left_s):
                body = await exchange.answer.aread()
                await asyncio.sleep(delay_s + (factor - 1) * (time.perf_counter() - exchange.sent))
        except TimeoutError:
            raise self._failed(exchange, 0, runtime_errors.TIMED_OUT) from None
        except httpx.TransportError:
            raise self._gone(exchange) from None
        self._record(exchange, exchange.answer.status_code)
        return body

    async def _parts(self, exchange: _Exchange) -> AsyncIterator[bytes]:
        """The answer as an event stream; it ends with an exception event where the answer breaks off."""
        is_captured = self._capture_writer.wants(exchange.route)
        captured = bytearray()
        first_chunk_s: float | None = None
        pieces = late_pieces(exchange.answer, exchange.sent, *exchange.route.fleet.latency_fault())
        deadline = asyncio.get_running_loop().time() + STREAM_TIMEOUT_S
        try:
            async with contextlib.aclosing(pieces):
                while (piece := await _next(pieces, deadline)) is not None:
                    first_chunk_s = first_chunk_s or time.perf_counter() - exchange.sent
                    if is_captured:
                        captured += piece
                    yield event_stream.payload_part(piece)
        except (TimeoutError, httpx.TransportError) as error:
            self._record(exchange, status=0)
            code = "ModelInvocationTimeExceeded" if isinstance(error, TimeoutError) else "StreamBroken"
            yield event_stream.model_stream_error(code, runtime_errors.STREAM_ERRORS[code])
            return
        self._record(exchange, exchange.answer.status_code, first_chunk_s)
        if is_captured:
            self._capture_writer.add(exchange.route, exchange.captured(bytes(captured)))

    async def _require_success(self, exchange: _Exchange) -> None:
        """Turn a container's error into the runtime's.

        Raises:
            InvocationRefused: ModelError, with the container's status and words.
        """
        if exchange.answer.is_success:
            return
        try:
            async with asyncio.timeout(INVOCATION_TIMEOUT_S):
                text = (await exchange.answer.aread()).decode(errors="replace")
        except (TimeoutError, httpx.TransportError):
            raise self._gone(exchange) from None
        raise self._failed(exchange, exchange.answer.status_code, text)

    def _gone(self, exchange: _Exchange) -> InvocationRefused:
        """The instance died, or closed the connection, with this request in flight."""
        exchange.route.fleet.report_unreachable(exchange.instance)
        return self._failed(exchange, 0, runtime_errors.NO_RESPONSE.format(exchange.call.endpoint_name))

    def _failed(self, exchange: _Exchange, status: int, text: str) -> InvocationRefused:
        """Count a failure of the container; what to raise for it."""
        self._record(exchange, status)
        log = exchange.instance.record.log_path
        return runtime_errors.model_error(exchange.call.endpoint_name, status, text, log)

    def _record(self, exchange: _Exchange, status: int, first_chunk_s: float | None = None) -> None:
        self._metrics.record(
            exchange.route,
            exchange.call.endpoint_name,
            status=status,
            model_s=time.perf_counter() - exchange.sent,
            overhead_s=exchange.sent - exchange.call.started,
            first_chunk_s=first_chunk_s,
        )


class _StreamedAnswer(StreamingResponse):
    """Closes the exchange when the caller has everything, or has gone away."""

    def __init__(self, exchange: _Exchange, parts: AsyncIterator[bytes]) -> None:
        headers = {**exchange.answer_headers(), "X-Amzn-SageMaker-Content-Type": exchange.content_type}
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
            raise runtime_errors.invalid(f"{name} is not supported for this endpoint.")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise runtime_errors.invalid(
                "1 validation error detected: Value at 'body' failed to satisfy constraint: Member must have length "
                f"less than or equal to {MAX_BODY_BYTES}"
            )
    return _Call(request.path_params["name"], bytes(body), request.headers, started)


async def _next(pieces: AsyncIterator[bytes], deadline: float) -> bytes | None:
    """The next piece, None after the last.

    Raises:
        TimeoutError: it did not come before the deadline, on the event loop's clock.
    """
    async with asyncio.timeout_at(deadline):
        return await anext(pieces, None)
