"""SageMaker's JSON 1.1 protocol: one POST, the operation in X-Amz-Target, an object in and an object out."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from containers.local.api_errors import ApiError, throttled, unknown_operation, validation
from containers.local.endpoint_operations import EndpointOperations
from containers.local.faults import Faults
from containers.local.resource_operations import ResourceOperations
from tasks.service_model import problems, validation_message

_TARGET_PREFIX = "SageMaker."
_MEDIA_TYPE = "application/x-amz-json-1.1"

_log = logging.getLogger(__name__)

Operation = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Operations:
    """The operations that this machine's SageMaker has, by name."""

    def __init__(self, resources: ResourceOperations, endpoints: EndpointOperations, faults: Faults) -> None:
        self._faults = faults
        self._operations: dict[str, Operation] = {
            "CreateModel": _immediate(resources.create_model),
            "DescribeModel": _immediate(resources.describe_model),
            "ListModels": _immediate(resources.list_models),
            "DeleteModel": _immediate(resources.delete_model),
            "CreateEndpointConfig": _immediate(resources.create_endpoint_config),
            "DescribeEndpointConfig": _immediate(resources.describe_endpoint_config),
            "ListEndpointConfigs": _immediate(resources.list_endpoint_configs),
            "DeleteEndpointConfig": _immediate(resources.delete_endpoint_config),
            "AddTags": _immediate(resources.add_tags),
            "ListTags": _immediate(resources.list_tags),
            "DeleteTags": _immediate(resources.delete_tags),
            "CreateEndpoint": endpoints.create_endpoint,
            "DescribeEndpoint": endpoints.describe_endpoint,
            "ListEndpoints": endpoints.list_endpoints,
            "UpdateEndpoint": endpoints.update_endpoint,
            "UpdateEndpointWeightsAndCapacities": endpoints.update_endpoint_weights_and_capacities,
            "DeleteEndpoint": endpoints.delete_endpoint,
        }

    async def handle(self, request: Request) -> Response:
        """Answer one call; every problem in SageMaker's own form."""
        operation = request.headers.get("x-amz-target", "").removeprefix(_TARGET_PREFIX)
        try:
            answer = await self._call(operation, await request.body())
        except ApiError as error:
            return _response({"__type": error.code, "message": error.message}, error.status)
        except Exception as error:  # a bug here must look like a fault there: retried, and in the log
            _log.exception("%s failed", operation)
            return _response({"__type": "InternalFailure", "message": repr(error)}, 500)
        return _response(answer, 200)

    async def _call(self, name: str, body: bytes) -> dict[str, Any]:
        operation = self._operations.get(name)
        if operation is None:
            raise unknown_operation(name)
        if self._faults.take("throttling", operation=name) is not None:
            raise throttled()
        request = _parse(body)
        found = problems("sagemaker", name, request)
        if found:
            raise validation(validation_message(found))
        return await operation(request)


def _immediate(operation: Callable[[dict[str, Any]], dict[str, Any]]) -> Operation:
    async def call(request: dict[str, Any]) -> dict[str, Any]:
        return operation(request)

    return call


def _parse(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body or b"{}")
    except ValueError:
        request = None
    if not isinstance(request, dict):
        raise ApiError("SerializationException", "The request is not a JSON object.")
    return {name: value for name, value in request.items() if value is not None}


def _response(content: dict[str, Any], status: int) -> Response:
    headers = {"x-amzn-RequestId": str(uuid.uuid4())}
    return Response(json.dumps(content), status, headers, media_type=_MEDIA_TYPE)
