"""Check a request against botocore's own model of an AWS service, the way the service itself would.

botocore checks required members, types and minimums before it sends; maxima, patterns and enums only the
service checks. Both sides use this: whoever builds requests for AWS, before anything is deployed, and the
SageMaker of this machine (`containers/local`), which must refuse what AWS refuses.

Paths are written as AWS writes them: `productionVariants.1.member.modelName`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import botocore.session
import regex  # AWS's patterns use \p{L}, which re does not know

_NUMBERS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
}
_LENGTHS = frozenset({"string", "list", "map", "blob"})


@functools.cache
def service_model(service: str) -> Any:
    """botocore's model of a service (`sagemaker`, `cloudwatch`, ...), read once."""
    return botocore.session.get_session().get_service_model(service)


def problems(service: str, operation: str, parameters: Mapping[str, Any]) -> list[str]:
    """What the service would object to in a request's form, one sentence each; empty when nothing.

    Only what the model says: rules that need to know other resources are the service's own.

    Args:
        service: botocore's name of the service.
        operation: operation as in the API (`CreateModel`).
        parameters: the request as boto3 takes it.

    Raises:
        botocore.model.OperationNotFoundError: the service has no such operation.
    """
    shape = service_model(service).operation_model(operation).input_shape
    return list(_check(shape, parameters, "")) if shape is not None else []


def validation_message(found: list[str]) -> str:
    """Problems as one message, as AWS's ValidationException words it."""
    noun = "error" if len(found) == 1 else "errors"
    return f"{len(found)} validation {noun} detected: {'; '.join(found)}"


def _check(shape: Any, value: Any, path: str) -> Iterator[str]:
    if not _has_type(shape, value):
        yield _failed(value, path, f"Member must be of type {shape.type_name}")
        return
    if shape.type_name == "structure":
        yield from _check_structure(shape, value, path)
        return
    for constraint in _broken_constraints(shape, value):
        yield _failed(value, path, constraint)
    if shape.type_name == "list":
        for number, item in enumerate(value, start=1):
            yield from _check(shape.member, item, f"{path}.{number}.member")
    elif shape.type_name == "map":
        yield from _check_map(shape, value, path)


def _check_structure(shape: Any, value: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in shape.required_members:
        if value.get(name) is None:
            where = _joined(path, name)
            yield f"Value null at '{where}' failed to satisfy constraint: Member must not be null"
    for name, member in value.items():
        if name not in shape.members:
            yield _failed(name, path or "request", f"Member must be one of {sorted(shape.members)}")
        elif member is not None:
            yield from _check(shape.members[name], member, _joined(path, name))


def _check_map(shape: Any, value: Mapping[str, Any], path: str) -> Iterator[str]:
    """AWS lists every constraint of keys or values. Values are not shown: an environment may hold secrets."""
    for key, member in value.items():
        hidden = f"{{{_shown(key)}=({len(str(member))} characters)}}"
        for kind, member_shape, part in (("keys", shape.key, key), ("value", shape.value, member)):
            if not _has_type(member_shape, part):
                yield _failed(hidden, path, f"Map {kind} must be of type {member_shape.type_name}")
            elif list(_broken_constraints(member_shape, part)):
                constraints = ", ".join(_constraint_texts(member_shape).values())
                yield _failed(hidden, path, f"Map {kind} must satisfy constraint: [{constraints}]")


def _has_type(shape: Any, value: Any) -> bool:
    kind = shape.type_name
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    if kind == "timestamp":
        return isinstance(value, (int, float, str, datetime)) and not isinstance(value, bool)
    expected: dict[str, Any] = {
        "structure": Mapping,
        "map": Mapping,
        "list": (list, tuple),
        "string": str,
        "boolean": bool,
        "blob": (str, bytes),
    }
    return isinstance(value, expected[kind])


def _broken_constraints(shape: Any, value: Any) -> Iterator[str]:
    limits, measured = shape.metadata, None
    if shape.type_name in _NUMBERS:
        measured = value
    elif shape.type_name in _LENGTHS:
        measured = len(value)
    texts = _constraint_texts(shape)
    if measured is not None and measured > limits.get("max", measured):
        yield texts["max"]
    if measured is not None and measured < limits.get("min", measured):
        yield texts["min"]
    if limits.get("enum") and value not in limits["enum"]:
        yield texts["enum"]
    if limits.get("pattern") and not _compiled(limits["pattern"]).fullmatch(value):
        yield texts["pattern"]


def _constraint_texts(shape: Any) -> dict[str, str]:
    """The words for each constraint that the shape has, in AWS's order."""
    limits = shape.metadata
    what = "value" if shape.type_name in _NUMBERS else "length"
    words = {
        "max": f"Member must have {what} less than or equal to {limits.get('max')}",
        "min": f"Member must have {what} greater than or equal to {limits.get('min')}",
        "enum": f"Member must satisfy enum value set: [{', '.join(limits.get('enum') or ())}]",
        "pattern": f"Member must satisfy regular expression pattern: {limits.get('pattern')}",
    }
    return {name: text for name, text in words.items() if limits.get(name) is not None}


@functools.cache
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)


def _failed(value: Any, path: str, constraint: str) -> str:
    return f"Value '{_shown(value)}' at '{path}' failed to satisfy constraint: {constraint}"


def _shown(value: Any) -> str:
    """Long values are cut: a message must stay readable."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _joined(path: str, name: str) -> str:
    member = name[:1].lower() + name[1:]
    return f"{path}.{member}" if path else member
