"""Everything of the local SageMaker in one ASGI application: API, runtime, alarms, and routes of its own.

POST   /                                              SageMaker's API (X-Amz-Target)
POST   /endpoints/NAME/invocations                    InvokeEndpoint
POST   /endpoints/NAME/invocations-response-stream    InvokeEndpointWithResponseStream
GET    /_local/health                                 200 once endpoints are being looked after
GET    /_local/instances                              processes: pid, port, state, log
GET, POST, DELETE /_local/faults                      what is ordered to fail; see faults.py
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from containers.local.alarms import Alarms
from containers.local.capture import CaptureWriter
from containers.local.deployment import Deployments
from containers.local.endpoint_operations import EndpointOperations
from containers.local.faults import Fault, Faults
from containers.local.fleet import Fleet
from containers.local.fleet_spec import FleetSpec
from containers.local.metrics import Metrics
from containers.local.operations import Operations
from containers.local.resource_operations import ResourceOperations
from containers.local.router import Router
from containers.local.running import RunningFleets
from containers.local.store import Store
from containers.local.traffic import Traffic
from tasks.service_model import service_model

# A page in a browser must not reach this server under a name of its own (DNS rebinding).
_HOSTS = ["127.0.0.1", "localhost"]

_log = logging.getLogger(__name__)


@dataclass
class LocalSageMaker:
    """The parts of one local SageMaker, wired together but not started.

    Args:
        folder: where its state lives.
        cloudwatch: boto3 client of the CloudWatch that alarms and metrics are kept in.
        s3: boto3 client for data capture.
        new_fleet: makes the fleet of a spec.
        faults: failures to order.
    """

    folder: Path
    cloudwatch: Any
    s3: Any
    new_fleet: Callable[[FleetSpec], Fleet]
    faults: Faults

    def __post_init__(self) -> None:
        self.store = Store(self.folder / "state.db")
        self.fleets = RunningFleets(self.new_fleet)
        self.traffic = Traffic()
        self.alarms = Alarms(self.cloudwatch)
        self.metrics = Metrics(self.cloudwatch)
        self.capture = CaptureWriter(self.s3)
        self.router = Router(self.traffic, self.metrics, self.capture)
        self.deployments = Deployments(self.store, self.fleets, self.traffic, self.alarms)
        resources = ResourceOperations(self.store)
        endpoints = EndpointOperations(
            self.store, resources, self.deployments, self.fleets, self.alarms, self.faults
        )
        self.operations = Operations(resources, endpoints, self.faults)

    def app(self) -> Starlette:
        """The application; its lifespan finds endpoints again, and ends their processes."""
        return Starlette(
            routes=[
                HttpRoute("/", self.operations.handle, methods=["POST"]),
                *self.router.http_routes,
                HttpRoute("/_local/health", self._health),
                HttpRoute("/_local/instances", self._instances),
                HttpRoute("/_local/faults", self._faults, methods=["GET", "POST", "DELETE"]),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS)],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await asyncio.to_thread(service_model, "sagemaker")  # seconds on a busy machine; not in a first call
        background = [
            asyncio.create_task(work.run(), name=type(work).__name__)
            for work in (self.alarms, self.metrics, self.capture)
        ]
        for task in background:
            task.add_done_callback(_log_failure)
        self.deployments.resume()
        try:
            yield
        finally:
            await self.deployments.shut_down()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self.router.aclose()
            self.store.close()

    async def _health(self, request: Request) -> Response:
        endpoints = {item.name: item.body["status"] for item in self.store.all("endpoint")}
        return JSONResponse({"status": "ok", "endpoints": endpoints})

    async def _instances(self, request: Request) -> Response:
        return JSONResponse([row for fleet in self.fleets for row in fleet.describe()])

    async def _faults(self, request: Request) -> Response:
        if request.method == "POST":
            try:
                self.faults.order(Fault.model_validate_json(await request.body()))
            except ValidationError as error:
                return JSONResponse({"message": str(error)}, 400)
        elif request.method == "DELETE":
            self.faults.clear()
        return JSONResponse([fault.model_dump() for fault in self.faults.orders()])


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("%s ended", task.get_name(), exc_info=task.exception())
