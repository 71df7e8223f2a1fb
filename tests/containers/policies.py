"""The IAM policies as this project ships them, for tests: filled in for one account, and asked what they allow."""

from __future__ import annotations

import fnmatch
import json
import string
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "containers" / "policies"
VALUES = {
    "FLEDGE_ACCOUNT": "123456789012",
    "FLEDGE_REGION": "us-east-1",
    "FLEDGE_BUCKET": "fledge",
    "FLEDGE_ENDPOINT": "fledge",
    "FLEDGE_EXECUTION_ROLE": "fledge-endpoint",
    "FLEDGE_TRAINING_ROLE": "fledge-training",
}
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def load_policy(name: str) -> dict[str, Any]:
    """A policy with its placeholders filled in; an unknown placeholder is an error."""
    text = (FOLDER / f"{name}.json").read_text()
    return dict(json.loads(string.Template(text).substitute(VALUES)))


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def grants(name: str) -> set[tuple[str, str]]:
    """(action, resource pattern) of a policy."""
    return {
        (action, resource)
        for statement in load_policy(name)["Statement"]
        for action in listed(statement["Action"])
        for resource in listed(statement["Resource"])
    }


def actions(name: str) -> set[str]:
    return {action for action, _ in grants(name)}


def allows(name: str, action: str, resource: str) -> bool:
    """Whether a policy grants an action on a resource, conditions aside."""
    return any(
        granted == action and fnmatch.fnmatchcase(resource, pattern) for granted, pattern in grants(name)
    )
