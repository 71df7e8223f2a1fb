"""The local SageMaker as a process of its own, its instances fake containers, S3 and CloudWatch in moto."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.containers.data_plane import CHAT
from tests.containers.fake_container import write_fake_python
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
ROLE = "arn:aws:iam::123456789012:role/fledge-local"
VARIANT = "AllTraffic"


class ControlPlane:
    """One `python -m containers.local serve`, to be killed and started again.

    Args:
        home: FLEDGE_HOME.
        moto_url: address of moto's server.
    """

    def __init__(self, home: Path, moto_url: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        self.home = home
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FLEDGE_"))},
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": moto_url,
            "AWS_ENDPOINT_URL_CLOUDWATCH": moto_url,
            "FLEDGE_VLLM_PYTHON": str(write_fake_python(home)),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.sagemaker = _client("sagemaker", self.url)
        self.runtime = _client("sagemaker-runtime", self.url)
        self.cloudwatch = _client("cloudwatch", moto_url)

    @property
    def log(self) -> str:
        return (self.home / "server.log").read_text()

    def start(self, **environment: str) -> None:
        """Start, and wait for its health."""
        command = [sys.executable, "-m", "containers.local", "serve", "--home", str(self.home)]
        limits = ["--port", str(self._port), "--memory-gb", "100", "--instance-memory-gb", "1"]
        with open(self.home / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, *limits],
                cwd=ROOT,
                env={**self.environment, **environment},
                stdout=log,
                stderr=log,
            )
        wait_until(self._is_healthy)

    def _is_healthy(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        try:
            return self._http("GET", "health").status_code == 200
        except httpx.TransportError:
            return False

    def _http(self, method: str, name: str, **request: Any) -> httpx.Response:
        """What is not SageMaker's: health, instances, faults."""
        url = f"{self.url}/_local/{name}"
        return httpx.request(method, url, trust_env=False, timeout=PATIENCE_S, **request)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait for the end."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(timeout=PATIENCE_S)

    def close(self) -> None:
        """Leave nothing running."""
        if self.process is not None and self.process.poll() is None:
            self.end()
        command = [sys.executable, "-m", "containers.local", "stop", "--home", str(self.home)]
        subprocess.run(command, cwd=ROOT, env=self.environment, check=True, capture_output=True)

    def delete_everything(self) -> None:
        """Back to a server that knows nothing, started if it was killed."""
        assert self.process is not None
        if self.process.poll() is not None:
            self.start()
        self._http("DELETE", "faults").raise_for_status()
        for endpoint in self.sagemaker.list_endpoints()["Endpoints"]:
            self.settled(endpoint["EndpointName"])
            self.sagemaker.delete_endpoint(EndpointName=endpoint["EndpointName"])
        wait_until(lambda: not self.sagemaker.list_endpoints()["Endpoints"])
        for config in self.sagemaker.list_endpoint_configs()["EndpointConfigs"]:
            self.sagemaker.delete_endpoint_config(EndpointConfigName=config["EndpointConfigName"])
        for model in self.sagemaker.list_models()["Models"]:
            self.sagemaker.delete_model(ModelName=model["ModelName"])
        alarms = self.cloudwatch.describe_alarms()["MetricAlarms"]
        self.cloudwatch.delete_alarms(AlarmNames=[alarm["AlarmName"] for alarm in alarms])

    def instances(self) -> list[dict[str, Any]]:
        return list(self._http("GET", "instances").json())

    def pids(self, config_name: str) -> list[int]:
        return [row["pid"] for row in self.instances() if row["config_name"] == config_name]

    def order_fault(self, **fault: Any) -> None:
        self._http("POST", "faults", json=fault).raise_for_status()

    def create_config(self, name: str, environment: Mapping[str, str] | None = None, **variant: Any) -> str:
        """A model and a config of one name; an answer's `model` says which config gave it."""
        self.sagemaker.create_model(
            ModelName=name,
            ExecutionRoleArn=ROLE,
            PrimaryContainer={
                "Image": "vllm:0.32.0-gpu-py312",
                "Environment": {
                    "SM_VLLM_MODEL": "m",
                    "SM_VLLM_SERVED_MODEL_NAME": name,
                    **(environment or {}),
                },
            },
        )
        fields = {
            "VariantName": VARIANT,
            "ModelName": name,
            "InitialInstanceCount": 1,
            "InitialVariantWeight": 1.0,
            **({} if "InstancePools" in variant else {"InstanceType": "ml.g7e.2xlarge"}),
        }
        self.sagemaker.create_endpoint_config(
            EndpointConfigName=name, ProductionVariants=[{**fields, **variant}]
        )
        return name

    def create_endpoint(self, name: str, config_name: str) -> None:
        """Create, and wait until it is in service."""
        self.sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=config_name)
        assert self.settled(name)["EndpointStatus"] == "InService", self.describe(name)

    def describe(self, name: str) -> dict[str, Any]:
        return dict(self.sagemaker.describe_endpoint(EndpointName=name))

    def settled(self, name: str) -> dict[str, Any]:
        """The description once nothing is under way."""
        wait_until(lambda: self.describe(name)["EndpointStatus"] in ("InService", "Failed"))
        return self.describe(name)

    def share(self, name: str, config_name: str, num_requests: int = 100) -> float:
        """Share of some requests that a config's fleet answers."""
        answers = Counter(self.answered_by(name) for _ in range(num_requests))
        return answers[config_name] / num_requests

    def answered_by(self, name: str) -> str:
        return ask(self.runtime, name)

    def create_alarm(self, name: str, endpoint_name: str, config_name: str, **changes: Any) -> None:
        """An alarm on 5xx of one fleet: any in a period of 10 s."""
        dimensions = {
            "EndpointName": endpoint_name,
            "VariantName": VARIANT,
            "EndpointConfigName": config_name,
        }
        fields = {
            "Namespace": "AWS/SageMaker",
            "MetricName": "Invocation5XXErrors",
            "Statistic": "Sum",
            "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
            "Period": 10,
            "EvaluationPeriods": 1,
            "Threshold": 0.0,
            "ComparisonOperator": "GreaterThanThreshold",
            "TreatMissingData": "notBreaching",
        }
        self.cloudwatch.put_metric_alarm(AlarmName=name, **{**fields, **changes})


def forget_everything(moto_url: str) -> None:
    """Empty moto: metrics of the test before would still be within an alarm's periods."""
    httpx.post(f"{moto_url}/moto-api/reset", trust_env=False, timeout=PATIENCE_S).raise_for_status()


@contextmanager
def steady_load(plane: ControlPlane, endpoint_name: str, every_s: float = 0.1) -> Iterator[list[str]]:
    """A client that asks all the time; yields who answered, or the error, one entry a request."""
    seen: list[str] = []
    ended = threading.Event()
    client = _client("sagemaker-runtime", plane.url)

    def ask_on() -> None:
        while not ended.wait(every_s):
            try:
                seen.append(ask(client, endpoint_name))
            except Exception as error:
                seen.append(f"failed: {error!r}")

    thread = threading.Thread(target=ask_on, daemon=True)
    thread.start()
    yield seen
    ended.set()
    thread.join(timeout=PATIENCE_S)


def ask(runtime: Any, endpoint_name: str) -> str:
    """One chat completion; the served name of the fleet that answered."""
    answer = runtime.invoke_endpoint(
        EndpointName=endpoint_name, ContentType="application/json", Body=json.dumps(CHAT)
    )
    return str(json.loads(answer["Body"].read())["model"])


def canary(percent: int = 20, wait_s: int = 5, alarms: tuple[str, ...] = (), **policy: Any) -> dict[str, Any]:
    """A DeploymentConfig."""
    size = {"Type": "CAPACITY_PERCENT", "Value": percent}
    routing = {"Type": "CANARY", "CanarySize": size, "WaitIntervalInSeconds": wait_s}
    settings: dict[str, Any] = {"BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": routing, **policy}}
    if alarms:
        settings["AutoRollbackConfiguration"] = {"Alarms": [{"AlarmName": name} for name in alarms]}
    return settings


def refusal(call: Callable[..., Any], **request: Any) -> tuple[str, str]:
    """Code and message that a call is refused with."""
    try:
        call(**request)
    except ClientError as error:
        return error.response["Error"]["Code"], error.response["Error"]["Message"]
    raise AssertionError("the call was not refused")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _client(service: str, url: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        # Each error shows, and minimums are the server's to check.
        config=Config(retries={"total_max_attempts": 1}, parameter_validation=False, read_timeout=70),
    )
