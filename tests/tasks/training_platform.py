"""SageMaker's training jobs for tests: the API on a port of this machine, and the real container as a process.

Requests are checked against botocore's model of the service, maxima and patterns included. Channels come from
S3, checkpoints are kept equal with S3 and the model directory goes there, as SageMaker does it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3

from tasks.service_model import problems, validation_message
from tests.containers.training_container import failure_of, set_up, start
from tests.waiting import PATIENCE_S

ARN = "arn:aws:sagemaker:us-east-1:123456789012:training-job/"


class TrainingPlatform:
    """Jobs by name, and every request as (operation, body).

    Args:
        folder: directory for the containers' files.
        ending: what becomes of a job: `run` starts the container, a description is merged into the job at once,
            None leaves it in progress.
    """

    def __init__(self, folder: Path, ending: dict[str, Any] | str | None = "run") -> None:
        self.folder = folder
        self.ending = ending
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.containers: list[threading.Thread] = []
        self.interrupt_after: Callable[[Path], bool] | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for container in self.containers:
            container.join(timeout=PATIENCE_S)

    def operations(self) -> list[str]:
        return [operation for operation, _ in self.requests]

    def answer(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            ValueError: SageMaker would refuse it, in its words.
        """
        self.requests.append((operation, body))
        found = problems("sagemaker", operation, body)
        if found:
            raise ValueError(validation_message(found))
        return getattr(self, f"_{operation}")(body)  # type: ignore[no-any-return]

    def _CreateTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["TrainingJobName"]
        if name in self.jobs:
            raise ValueError("Training job names must be unique within an AWS account")
        self.jobs[name] = {
            **{key: value for key, value in body.items() if key != "Tags"},
            "TrainingJobArn": ARN + name,
            "TrainingJobStatus": "InProgress",
            "SecondaryStatus": "Starting",
            "CreationTime": time.time(),
            "ModelArtifacts": {
                "S3ModelArtifacts": f"{body['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{name}/output/model/"
            },
            "SecondaryStatusTransitions": [
                {"Status": "Starting", "StartTime": time.time(), "StatusMessage": "Preparing the instances"}
            ],
        }
        if self.ending == "run":
            thread = threading.Thread(target=self._run, args=(self.jobs[name],))
            self.containers.append(thread)
            thread.start()
        elif isinstance(self.ending, dict):
            self.jobs[name].update(self.ending)
        return {"TrainingJobArn": ARN + name}

    def _DescribeTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.jobs[body["TrainingJobName"]]

    def _ListTrainingJobs(self, body: dict[str, Any]) -> dict[str, Any]:
        found = [job for name, job in self.jobs.items() if body["NameContains"] in name]
        found.sort(key=lambda job: job["CreationTime"], reverse=body["SortOrder"] == "Descending")
        keys = ("TrainingJobName", "TrainingJobArn", "CreationTime", "TrainingJobStatus")
        return {"TrainingJobSummaries": [{key: job[key] for key in keys} for job in found]}

    def _StopTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        self.jobs[body["TrainingJobName"]].update(TrainingJobStatus="Stopped", SecondaryStatus="Stopped")
        return {}

    def _run(self, job: dict[str, Any]) -> None:
        """One job from its channels to its result; a spot interruption goes on in another container."""
        number = 1
        while not self._run_container(job, self.folder / f"{job['TrainingJobName']}-{number}"):
            job["SecondaryStatusTransitions"].append(
                {
                    "Status": "Interrupted",
                    "StartTime": time.time(),
                    "StatusMessage": "Spot capacity was taken back",
                }
            )
            number += 1

    def _run_container(self, job: dict[str, Any], root: Path) -> bool:
        """One container on an instance that knows nothing of the one before; whether the job has ended."""
        for channel in job["InputDataConfig"]:
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
            fetch(uri, root / "input" / "data" / channel["ChannelName"])
        set_up(root, {}, job["HyperParameters"])
        fetch(job["CheckpointConfig"]["S3Uri"], root / "checkpoints")
        process = start(root, "train")
        is_interrupted = False
        while process.poll() is None:
            time.sleep(0.1)
            if self.interrupt_after is not None and self.interrupt_after(root):
                self.interrupt_after, is_interrupted = None, True
                process.terminate()
        send(root / "checkpoints", job["CheckpointConfig"]["S3Uri"])
        if is_interrupted:
            return False
        send(root / "model", job["ModelArtifacts"]["S3ModelArtifacts"])
        if process.returncode == 0:
            job.update(TrainingJobStatus="Completed", SecondaryStatus="Completed")
        else:
            reason = f"AlgorithmError: {failure_of(root)}, exit code: {process.returncode}"
            job.update(TrainingJobStatus="Failed", SecondaryStatus="Failed", FailureReason=reason)
        return True

    def _handler(platform) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                operation = self.headers["X-Amz-Target"].partition(".")[2]
                try:
                    status, answer = 200, platform.answer(operation, body)
                except ValueError as error:
                    status, answer = 400, {"__type": "ValidationException", "message": str(error)}
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-amz-json-1.1")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

        return Handler


def _parts(uri: str) -> tuple[str, str]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix


def fetch(uri: str, folder: Path) -> None:
    """Everything below an S3 prefix into a folder."""
    bucket, prefix = _parts(uri)
    client = boto3.client("s3")
    for item in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", []):
        path = folder / item["Key"].removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, item["Key"], str(path))


def send(folder: Path, uri: str) -> None:
    """A folder to below an S3 prefix; what is no longer there is deleted, as SageMaker does for checkpoints."""
    bucket, prefix = _parts(uri)
    client = boto3.client("s3")
    files = {prefix + str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    for key, path in files.items():
        client.upload_file(str(path), bucket, key)
    for item in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", []):
        if item["Key"] not in files:
            client.delete_object(Bucket=bucket, Key=item["Key"])
