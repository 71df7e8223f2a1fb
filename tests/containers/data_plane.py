"""The data plane in a thread: real instances (fake containers), the router in a real uvicorn, S3 and CloudWatch in moto."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import boto3
import uvicorn
from botocore.config import Config
from starlette.applications import Starlette

from containers.local.__main__ import KEEP_ALIVE_S
from containers.local.capture import CaptureWriter
from containers.local.faults import Faults
from containers.local.fleet import Fleet, FleetSpec
from containers.local.machine import Machine
from containers.local.metrics import Metrics
from containers.local.router import Router
from containers.local.traffic import Route, Traffic
from tests.containers.fake_container import write_fake_python
from tests.waiting import PATIENCE_S, wait_until

Result = TypeVar("Result")
BUCKET = "fledge-test"
ENDPOINT = "fledge"
CHAT = {"messages": [{"role": "user", "content": "Fledge?"}]}


def fleet_spec(**changes: Any) -> FleetSpec:
    """A fleet of one fake container that needs no model data."""
    name = f"fleet-{uuid.uuid4().hex[:8]}"
    fields: dict[str, Any] = {
        "fleet_id": name,
        "endpoint_name": ENDPOINT,
        "config_name": "config-1",
        "variant_name": "AllTraffic",
        "instance_type": "ml.g7e.2xlarge",
        "instance_count": 1,
        "image": "vllm:0.32.0-gpu-py312",
        "environment": {"SM_VLLM_MODEL": "m", "SM_VLLM_SERVED_MODEL_NAME": "drafter-v1"},
        "download_timeout_s": PATIENCE_S,
        "startup_timeout_s": PATIENCE_S,
    }
    return FleetSpec(**{**fields, **changes})


class DataPlane:
    """Everything behind the API, run by an event loop in a thread of its own.

    Args:
        home: folder of the local SageMaker.
        memory_gb: what instances may take together; each counts 4.5.
    """

    def __init__(self, home: Path, memory_gb: float = 100.0) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.faults = Faults()
        self.machine = Machine(home, memory_gb=memory_gb, vllm_python=write_fake_python(home))
        self.traffic = Traffic()
        self.metrics = Metrics()
        self.capture_writer = CaptureWriter()
        self.fleets: list[Fleet] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.router = Router(self.traffic, self.metrics, self.capture_writer)
        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=self.router.http_routes),
                log_level="warning",
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._serving = self.start(self._server.serve(sockets=[self._socket]))
        wait_until(lambda: self._server.started)

    def run(self, work: Coroutine[Any, Any, Result], timeout_s: float = PATIENCE_S) -> Result:
        """Run a coroutine in the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def start(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop without waiting; the future of it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def fleet(self, spec: FleetSpec | None = None, **changes: Any) -> Fleet:
        """A fleet that `close` stops."""

        async def make() -> Fleet:
            return Fleet(spec or fleet_spec(**changes), self.machine, self.faults)

        fleet = self.run(make())
        self.fleets.append(fleet)
        return fleet

    def launched(self, **changes: Any) -> Fleet:
        """A fleet in service."""
        fleet = self.fleet(**changes)
        self.run(fleet.launch())
        return fleet

    def route(self, *fleets_and_weights: tuple[Fleet, float], capture: dict[str, Any] | None = None) -> None:
        """Make these the endpoint's fleets."""
        self.traffic.set(
            ENDPOINT,
            [
                Route(
                    fleet=fleet,
                    weight=weight,
                    variant_name=fleet.spec.variant_name,
                    config_name=fleet.spec.config_name,
                    capture=capture,
                )
                for fleet, weight in fleets_and_weights
            ],
        )

    def client(self) -> Any:
        """boto3's client, without retries so that every error shows."""
        return boto3.client(
            "sagemaker-runtime",
            endpoint_url=self.url,
            config=Config(retries={"total_max_attempts": 1}, read_timeout=70, max_pool_connections=50),
        )

    def close(self) -> None:
        """End every process and the loop."""
        for fleet in self.fleets:
            self.run(fleet.stop(drain_s=0))
        self._server.should_exit = True
        self._serving.result(PATIENCE_S)
        self.run(self.router.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=PATIENCE_S)


def chat(client: Any, **request: Any) -> dict[str, Any]:
    """One plain chat completion, parsed."""
    answer = client.invoke_endpoint(
        EndpointName=ENDPOINT, ContentType="application/json", Body=json.dumps({**CHAT, **request})
    )
    return json.loads(answer["Body"].read())


def stream(client: Any, **request: Any) -> Any:
    """The event stream of a streamed chat completion."""
    body = json.dumps({**CHAT, "stream": True, **request})
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName=ENDPOINT, ContentType="application/json", Body=body
    )
    return answer["Body"]
