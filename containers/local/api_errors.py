"""SageMaker's error codes and words."""

from __future__ import annotations

from containers.local.arn import resource_arn

_WORDS = {"model": "model", "endpoint-config": "endpoint configuration", "endpoint": "endpoint"}


class ApiError(Exception):
    """An error as the API answers it: `{"__type": code, "message": message}` with an HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        self.code = code
        self.message = message
        self.status = status
        super().__init__(f"{code}: {message}")


def validation(message: str) -> ApiError:
    return ApiError("ValidationException", message)


def not_found(kind: str, name: str) -> ApiError:
    return validation(f'Could not find {_WORDS[kind]} "{resource_arn(kind, name)}".')


def already_exists(kind: str, name: str) -> ApiError:
    return validation(f'Cannot create already existing {_WORDS[kind]} "{resource_arn(kind, name)}".')


def in_progress(name: str) -> ApiError:
    return validation(f'Cannot update in-progress endpoint "{resource_arn("endpoint", name)}".')


def limit_exceeded(what: str) -> ApiError:
    return ApiError(
        "ResourceLimitExceeded",
        f"The account-level service limit '{what}' is 0 Instances, with current utilization of 0 Instances "
        "and a request delta of 1 Instances. Please use AWS Service Quotas to request an increase for this "
        "quota.",
    )


def throttled() -> ApiError:
    return ApiError("ThrottlingException", "Rate exceeded")


def unknown_operation(target: str) -> ApiError:
    return ApiError(
        "UnknownOperationException",
        f"{target or 'No X-Amz-Target'}: the SageMaker of this machine has no such operation.",
    )
