"""The errors of SageMaker's runtime, in its own words.

The words of ModelError are those that callers of AWS report (github.com/aws/amazon-sagemaker-examples, issues 2815
and 3089; github.com/RamVegiraju/SageMaker-Deployment, issue 3).
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from starlette.responses import Response

from containers.local.arn import ACCOUNT, region

TIMED_OUT = (
    "Your invocation timed out while waiting for a response from container primary. Review the latency metrics for "
    "each container in Amazon CloudWatch, resolve the issue, and try again."
)
NO_RESPONSE = (
    "Amazon SageMaker could not get a response from the {} endpoint. This can occur when CPU or memory utilization "
    "is high. To check your utilization, see Amazon CloudWatch. To fix this problem, use an instance type with more "
    "CPU capacity or memory."
)
STREAM_ERRORS = {
    "ModelInvocationTimeExceeded": "The model did not finish its response within the time allowed.",
    "StreamBroken": "The connection between the client and the model was reset or closed.",
}


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
        return Response(json.dumps(self.fields), self.status, headers, media_type="application/json")


def invalid(message: str) -> InvocationRefused:
    """The request cannot be taken as it is."""
    return InvocationRefused("ValidationError", 400, message)


def unavailable() -> InvocationRefused:
    """Nobody of the endpoint is in service."""
    return InvocationRefused("ServiceUnavailable", 503, "The service is unavailable. Try your call again.")


def model_error(endpoint_name: str, status: int, text: str, log: Path) -> InvocationRefused:
    """The container's own failure.

    Args:
        status: what the container answered; 0 for no answer.
        text: what it said, or what is known.
        log: the instance's log on this machine.
    """
    group = f"/aws/sagemaker/Endpoints/{endpoint_name}"
    side = "client" if 400 <= status < 500 else "server"
    message = (
        f'Received {side} error ({status}) from primary with message "{text}". See '
        f"https://{region()}.console.aws.amazon.com/cloudwatch/home?region={region()}#logEventViewer:group={group} "
        f"in account {ACCOUNT} for more information. (On this machine: {log}.)"
    )
    return InvocationRefused(
        "ModelError",
        424,
        message,
        OriginalStatusCode=status,
        OriginalMessage=text,
        LogStreamArn=f"arn:aws:logs:{region()}:{ACCOUNT}:log-group:{group}",
    )
