"""What the registry knows of a version, who approved it, and which version is in production.

A version's tags are its history: gate, approval, deployment, rollback. The aliases say what is now:
`challenger` passed the gate, `champion` answers in production. Every write can be repeated: tags first,
alias last, so that a process killed in between leaves something that the next one completes.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from drafter.errors import FledgeError
from drafter.records import Record
from tasks.find_drafters import DIGEST_TAG, TARGET_TAG, Alias, version_of_alias
from tasks.logs import flow_logger
from tasks.register_drafter import MAX_TAG_LENGTH, one_registration_at_a_time
from tasks.settings import Places
from tasks.track_runs import connect

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ApprovalOutcome = Literal["approved", "rejected", "expired"]

APPROVAL_TAG = "fledge.approval"
APPROVER_TAG = "fledge.approver"
APPROVAL_REASON_TAG = "fledge.approval_reason"
APPROVED_AT_TAG = "fledge.approved_at"
APPROVAL_RUN_TAG = "fledge.approval_flow_run"
PREVIOUS_CHAMPION_TAG = "fledge.previous_champion"
ENDPOINT_TAG = "fledge.endpoint"
CONFIG_TAG = "fledge.endpoint_config"
PREVIOUS_CONFIG_TAG = "fledge.previous_endpoint_config"
DEPLOYED_AT_TAG = "fledge.deployed_at"
ROLLED_BACK_AT_TAG = "fledge.rolled_back_at"
ROLLBACK_REASON_TAG = "fledge.rollback_reason"

_ACCEPTANCE_TAG = re.compile(r"fledge\.(champion_)?acceptance_length\.k(\d+)\.(.+)")
_ACCEPTANCE = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")
_SPEED_TAG = re.compile(r"fledge\.(champion_)?output_tokens_per_second\.k(\d+)\.c(\d+)\.(.+)")
_SPEED = re.compile(r"([\d.]+)(?: \(no speculation ([\d.]+)\))?")


class PromotionError(FledgeError):
    """A version, an approval or an approver with which nothing may be put into production."""


class MeasuredAcceptance(Record):
    """Acceptance length on one domain at one K, as the version's evaluation measured it."""

    drafter: Literal["challenger", "champion"] = Field(
        description="The version itself, or the champion that it was measured beside."
    )
    num_speculative_tokens: int
    domain: str
    acceptance_length: float
    lower: float
    upper: float


class MeasuredSpeed(Record):
    """Output tokens/s of the server on one domain at one K and concurrency."""

    drafter: Literal["challenger", "champion"]
    num_speculative_tokens: int
    concurrency: int
    domain: str
    output_tokens_per_second: float
    without_drafter: float | None = Field(description="The same requests without speculation.")


class Approval(Record):
    """Who decided what, when, why, and in which flow run."""

    outcome: ApprovalOutcome
    approver: str
    reason: str
    at: datetime
    flow_run: str
    previous_champion: str | None = Field(description="Champion at that time; None: there was none.")


class VersionRecord(Record):
    """A registered version, as its tags and the aliases say."""

    name: str
    version: str
    aliases: tuple[str, ...]
    decision: str = Field(description="The gate's: approve, reject, not_enough_evidence; or `unknown`.")
    reasons: tuple[str, ...] = Field(description="The gate's, failures first.")
    num_speculative_tokens: int | None = Field(description="K that measured best; None: none did.")
    acceptance: tuple[MeasuredAcceptance, ...]
    speed: tuple[MeasuredSpeed, ...]
    drafter_digest: str
    evaluation_digest: str
    dataset_digest: str
    target_fingerprint: str
    report: str | None = Field(description="Address of the report's page.")
    champion: str | None = Field(description="Version that is champion now; None: there is none.")
    approval: Approval | None
    previous_champion: str | None = Field(
        description="Champion that this version replaced; goes back to it on a rollback."
    )
    endpoint: str | None
    endpoint_config: str | None = Field(description="Config that brought this version into production.")
    previous_endpoint_config: str | None = Field(description="Config that ran before that one.")
    deployed_at: datetime | None
    rolled_back_at: datetime | None
    rollback_reason: str | None

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.version}"

    @property
    def served_name(self) -> str:
        """First served model name of a fleet that runs this version; its answers carry it."""
        return f"{self.name}-v{self.version}"

    def acceptance_of(
        self, drafter: Literal["challenger", "champion"] = "challenger", k: int | None = None
    ) -> dict[str, MeasuredAcceptance]:
        """Domain -> acceptance length at K; None takes the K that measured best."""
        k = k or self.num_speculative_tokens
        return {
            one.domain: one
            for one in self.acceptance
            if one.drafter == drafter and one.num_speculative_tokens == k
        }

    def speed_of(
        self, drafter: Literal["challenger", "champion"] = "challenger", k: int | None = None
    ) -> dict[str, MeasuredSpeed]:
        """Domain -> speed at K and at the lowest concurrency that was measured."""
        k = k or self.num_speculative_tokens
        slowest_last = sorted(self.speed, key=lambda one: one.concurrency, reverse=True)
        return {
            one.domain: one
            for one in slowest_last
            if one.drafter == drafter and one.num_speculative_tokens == k
        }


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
                "fledge.champion_at_approval": approval.previous_champion or "",
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
    """Write on a version that its deployment was taken back, and why. No alias moves."""
    places = Places()
    client = connect(places)
    with one_registration_at_a_time(places):
        record = _record(client, places, _find(client, places, version))
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
                client.set_registered_model_alias(record.name, "champion", record.previous_champion)
        _remove_alias(client, places, "challenger", record.version)
    return champion()


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
    tags = version.tags
    current = version_of_alias(client, places, "champion")
    return VersionRecord(
        name=version.name,
        version=str(version.version),
        aliases=tuple(sorted(version.aliases)),
        decision=tags.get("fledge.decision", "unknown"),
        reasons=tuple(filter(None, tags.get("fledge.reasons", "").split("\n"))),
        num_speculative_tokens=int(tags.get("fledge.num_speculative_tokens") or 0) or None,
        acceptance=_acceptance(tags),
        speed=_speed(tags),
        drafter_digest=tags.get(DIGEST_TAG, ""),
        evaluation_digest=tags.get("fledge.evaluation_digest", ""),
        dataset_digest=tags.get("fledge.dataset_digest", ""),
        target_fingerprint=tags.get(TARGET_TAG, ""),
        report=_report(places, tags),
        champion=str(current.version) if current else None,
        approval=_approval(tags),
        previous_champion=tags.get(PREVIOUS_CHAMPION_TAG) or None,
        endpoint=tags.get(ENDPOINT_TAG),
        endpoint_config=tags.get(CONFIG_TAG),
        previous_endpoint_config=tags.get(PREVIOUS_CONFIG_TAG) or None,
        deployed_at=_instant(tags, DEPLOYED_AT_TAG),
        rolled_back_at=_instant(tags, ROLLED_BACK_AT_TAG),
        rollback_reason=tags.get(ROLLBACK_REASON_TAG),
    )


def _acceptance(tags: dict[str, str]) -> tuple[MeasuredAcceptance, ...]:
    found = []
    for name, value in sorted(tags.items()):
        key, values = _ACCEPTANCE_TAG.fullmatch(name), _ACCEPTANCE.fullmatch(value)
        if key and values:
            mean, lower, upper = map(float, values.groups())
            found.append(
                MeasuredAcceptance(
                    drafter="champion" if key[1] else "challenger",
                    num_speculative_tokens=int(key[2]),
                    domain=key[3],
                    acceptance_length=mean,
                    lower=lower,
                    upper=upper,
                )
            )
    return tuple(found)


def _speed(tags: dict[str, str]) -> tuple[MeasuredSpeed, ...]:
    found = []
    for name, value in sorted(tags.items()):
        key, values = _SPEED_TAG.fullmatch(name), _SPEED.fullmatch(value)
        if key and values:
            found.append(
                MeasuredSpeed(
                    drafter="champion" if key[1] else "challenger",
                    num_speculative_tokens=int(key[2]),
                    concurrency=int(key[3]),
                    domain=key[4],
                    output_tokens_per_second=float(values[1]),
                    without_drafter=float(values[2]) if values[2] else None,
                )
            )
    return tuple(found)


def _report(places: Places, tags: dict[str, str]) -> str | None:
    from pathlib import Path

    page = tags.get("fledge.report")
    return places.link(Path(page)) if page and Path(page).is_file() else None


def _approval(tags: dict[str, str]) -> Approval | None:
    outcome, at = tags.get(APPROVAL_TAG), _instant(tags, APPROVED_AT_TAG)
    if outcome is None or at is None:
        return None
    return Approval.model_validate(
        {
            "outcome": outcome,
            "approver": tags.get(APPROVER_TAG, ""),
            "reason": tags.get(APPROVAL_REASON_TAG, ""),
            "at": at,
            "flow_run": tags.get(APPROVAL_RUN_TAG, ""),
            "previous_champion": tags.get("fledge.champion_at_approval") or None,
        }
    )


def _instant(tags: dict[str, str], name: str) -> datetime | None:
    return datetime.fromisoformat(tags[name]) if tags.get(name) else None


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
