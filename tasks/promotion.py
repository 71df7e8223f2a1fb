"""What the registry knows of a version, who approved it, and which version is in production.

A version's tags are its history: gate, approval, deployment, rollback. The aliases say what is now:
`challenger` passed the gate, `champion` answers in production. Every write can be repeated: tags first,
alias last, so that a process killed in between leaves something that the next one completes.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

from drafter.errors import FledgeError
from tasks.find_drafters import Alias, version_of_alias
from tasks.logs import flow_logger
from tasks.register_drafter import MAX_TAG_LENGTH, one_registration_at_a_time
from tasks.settings import Places
from tasks.track_runs import connect
from tasks.version_record import (
    APPROVAL_REASON_TAG,
    APPROVAL_RUN_TAG,
    APPROVAL_TAG,
    APPROVED_AT_TAG,
    APPROVER_TAG,
    CHAMPION_AT_APPROVAL_TAG,
    CONFIG_TAG,
    DEPLOYED_AT_TAG,
    ENDPOINT_TAG,
    PREVIOUS_CHAMPION_TAG,
    PREVIOUS_CONFIG_TAG,
    RESTORED_AT_TAG,
    RETRAIN_ASKED_AT_TAG,
    ROLLBACK_REASON_TAG,
    ROLLED_BACK_AT_TAG,
    Approval,
    VersionRecord,
    version_record,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


class PromotionError(FledgeError):
    """A version, an approval or an approver with which nothing may be put into production."""


def read_version(version: str) -> VersionRecord:
    """A version by number, alias (`challenger`) or URI (`models:/NAME/3`).

    Raises:
        PromotionError: there is no such version.
    """
    places = Places()
    client = connect(places)
    return _record(client, places, _find(client, places, version))


def champion() -> VersionRecord | None:
    """The version in production; None: there is none."""
    places = Places()
    client = connect(places)
    found = version_of_alias(client, places, "champion")
    return _record(client, places, found) if found else None


def list_versions() -> list[VersionRecord]:
    """Every registered version, newest first."""
    places = Places()
    client = connect(places)
    found = client.search_model_versions(f"name = '{places.model_name}'")
    newest_first = sorted(found, key=lambda version: int(version.version), reverse=True)
    # A search does not say which aliases a version has.
    return [_record(client, places, _find(client, places, str(one.version))) for one in newest_first]


def require_gate_passed(version: VersionRecord) -> VersionRecord:
    """The version itself, if the gate approved it.

    Raises:
        PromotionError: the gate rejected it or found too little evidence.
    """
    if version.decision == "approve":
        return version
    said = "; ".join(version.reasons) or "no reasons are recorded"
    raise PromotionError(
        f"{version.uri} did not pass the gate ({version.decision}): {said}",
        "a version that the gate approved",
        "promote another version (`challenger` is the newest that passed), or retrain with more data",
    )


def require_approved(version: str) -> VersionRecord:
    """The version, if the gate passed it and a person approved it.

    Raises:
        PromotionError: unknown, rejected by the gate, rejected by a person, or not yet decided on.
    """
    record = require_gate_passed(read_version(version))
    if record.approval is None:
        raise PromotionError(
            f"{record.uri} has not been approved by anybody",
            "a version with a recorded approval",
            f"approve it: `fledge approve {record.version} --as NAME --reason ...`, or run promote-drafter",
        )
    if record.approval.outcome != "approved":
        raise PromotionError(
            f"{record.uri} was {record.approval.outcome} by {record.approval.approver or 'nobody'}"
            f" at {record.approval.at:%Y-%m-%d %H:%M} UTC: {record.approval.reason}",
            "a version with a recorded approval",
            f"if that has changed, approve it: `fledge approve {record.version} --as NAME --reason ...`",
        )
    return record


@task(name="record-approval", cache_policy=NO_CACHE, retries=3, retry_delay_seconds=5, timeout_seconds=300)
def record_approval(version: str, approval: Approval) -> VersionRecord:
    """Write the decision of a person on the version. The same flow run records once: its first time stays."""
    places = Places()
    client = connect(places)
    with one_registration_at_a_time(places):
        record = _record(client, places, _find(client, places, version))
        known = record.approval
        if known and (known.flow_run, known.outcome) == (approval.flow_run, approval.outcome):
            return record
        # `fledge.approval` comes last: with it the others count.
        _tag(
            client,
            record,
            {
                APPROVER_TAG: approval.approver,
                APPROVAL_REASON_TAG: approval.reason,
                APPROVED_AT_TAG: _text(approval.at),
                APPROVAL_RUN_TAG: approval.flow_run,
                CHAMPION_AT_APPROVAL_TAG: approval.previous_champion or "",
                APPROVAL_TAG: approval.outcome,
            },
        )
    return read_version(record.version)


@task(name="set-champion", cache_policy=NO_CACHE, retries=3, retry_delay_seconds=5, timeout_seconds=300)
def set_champion(
    version: str, endpoint: str, config: str, previous_config: str | None = None
) -> VersionRecord:
    """Point `champion` at the version that answers in production, and remember which one it replaced."""
    places = Places()
    client = connect(places)
    with one_registration_at_a_time(places):
        record = _record(client, places, _find(client, places, version))
        tags = {ENDPOINT_TAG: endpoint, CONFIG_TAG: config, DEPLOYED_AT_TAG: _text(datetime.now(UTC))}
        if record.champion != record.version:
            tags[PREVIOUS_CHAMPION_TAG] = record.champion or ""
            tags[PREVIOUS_CONFIG_TAG] = previous_config or ""
        _tag(client, record, tags)
        for name in (ROLLED_BACK_AT_TAG, ROLLBACK_REASON_TAG):
            client.delete_model_version_tag(record.name, record.version, name)
        client.set_registered_model_alias(record.name, "champion", record.version)
        _remove_alias(client, places, "challenger", record.version)
    flow_logger().info("%s is champion; before it: %s", record.uri, record.champion or "none")
    return read_version(record.version)


@task(name="record-rollback", cache_policy=NO_CACHE, retries=3, retry_delay_seconds=5, timeout_seconds=300)
def record_rollback(version: str, reason: str) -> VersionRecord:
    """Write on a version that its deployment was taken back, and why. No alias moves.

    The champion, deployed again with other settings, still serves with the old ones: nothing is written on it.
    """
    places = Places()
    client = connect(places)
    with one_registration_at_a_time(places):
        record = _record(client, places, _find(client, places, version))
        if record.champion != record.version:
            _tag_rolled_back(client, record, reason)
    return read_version(record.version)


@task(name="restore-champion", cache_policy=NO_CACHE, retries=3, retry_delay_seconds=5, timeout_seconds=300)
def restore_champion(version: str, reason: str) -> VersionRecord | None:
    """Take a version back: tag it, and point `champion` at the one that it had replaced.

    Names the version that is taken back, so that a repetition moves nothing further.

    Returns:
        The champion after it; None when there is none left.
    """
    places = Places()
    client = connect(places)
    with one_registration_at_a_time(places):
        record = _record(client, places, _find(client, places, version))
        _tag_rolled_back(client, record, reason)
        if record.champion == record.version:
            if record.previous_champion is None:
                client.delete_registered_model_alias(record.name, "champion")
            else:
                restored = _record(client, places, _find(client, places, record.previous_champion))
                _tag(client, restored, {RESTORED_AT_TAG: _text(datetime.now(UTC))})
                client.set_registered_model_alias(record.name, "champion", restored.version)
        _remove_alias(client, places, "challenger", record.version)
    return champion()


@task(
    name="record-retrain-asked", cache_policy=NO_CACHE, retries=3, retry_delay_seconds=5, timeout_seconds=300
)
def record_retrain_asked(version: str) -> None:
    """Remember when the monitor asked for a successor of this version: its cool-down counts from there."""
    places = Places()
    client = connect(places)
    record = _record(client, places, _find(client, places, version))
    _tag(client, record, {RETRAIN_ASKED_AT_TAG: _text(datetime.now(UTC))})


def _find(client: MlflowClient, places: Places, version: str) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    name, wanted = places.model_name, version.strip()
    if wanted.startswith("models:/"):
        name, _, wanted = wanted.removeprefix("models:/").replace("@", "/").rpartition("/")
    try:
        if wanted.isdecimal():
            found = client.get_model_version(name, wanted)
        else:
            found = client.get_model_version_by_alias(name, wanted)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise PromotionError(
            f"version {version!r} of {name}",
            f"the number or alias of a registered version; there are: {_known(client, name)}",
            "take one of those, or set FLEDGE_MODEL_NAME and FLEDGE_MLFLOW_TRACKING_URI to where it is",
        ) from None
    return found


def _known(client: MlflowClient, name: str) -> str:
    """The versions and aliases of a model, in words."""
    versions = sorted(int(one.version) for one in client.search_model_versions(f"name = '{name}'"))
    if not versions:
        return "none"
    aliases = client.get_registered_model(name).aliases
    words = [str(version) for version in versions[-20:]]
    return ", ".join([*words, *(f"{alias} ({number})" for alias, number in sorted(aliases.items()))])


def _record(client: MlflowClient, places: Places, version: ModelVersion) -> VersionRecord:
    current = version_of_alias(client, places, "champion")
    return version_record(version, str(current.version) if current else None, places)


def _text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds")


def _tag(client: MlflowClient, record: VersionRecord, tags: dict[str, str]) -> None:
    for name, value in tags.items():
        client.set_model_version_tag(record.name, record.version, name, value[:MAX_TAG_LENGTH])


def _tag_rolled_back(client: MlflowClient, record: VersionRecord, reason: str) -> None:
    if record.rolled_back_at is None or record.rollback_reason != reason[:MAX_TAG_LENGTH]:
        _tag(client, record, {ROLLBACK_REASON_TAG: reason, ROLLED_BACK_AT_TAG: _text(datetime.now(UTC))})


def _remove_alias(client: MlflowClient, places: Places, alias: Alias, version: str) -> None:
    """Take an alias off a version, if it is on it."""
    current = version_of_alias(client, places, alias)
    if current is not None and str(current.version) == version:
        client.delete_registered_model_alias(places.model_name, alias)
