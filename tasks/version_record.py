"""A registered version as a record: what its tags say of gate, approval, deployment and rollback."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from drafter.records import Record, ServingAdvice
from tasks.find_drafters import ADVICE_TAG, DIGEST_TAG, TARGET_TAG
from tasks.settings import Places

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

ApprovalOutcome = Literal["approved", "rejected", "expired"]

APPROVAL_TAG = "fledge.approval"
APPROVER_TAG = "fledge.approver"
APPROVAL_REASON_TAG = "fledge.approval_reason"
APPROVED_AT_TAG = "fledge.approved_at"
APPROVAL_RUN_TAG = "fledge.approval_flow_run"
CHAMPION_AT_APPROVAL_TAG = "fledge.champion_at_approval"
PREVIOUS_CHAMPION_TAG = "fledge.previous_champion"
ENDPOINT_TAG = "fledge.endpoint"
CONFIG_TAG = "fledge.endpoint_config"
PREVIOUS_CONFIG_TAG = "fledge.previous_endpoint_config"
DEPLOYED_AT_TAG = "fledge.deployed_at"
ROLLED_BACK_AT_TAG = "fledge.rolled_back_at"
ROLLBACK_REASON_TAG = "fledge.rollback_reason"
RESTORED_AT_TAG = "fledge.restored_at"
RETRAIN_ASKED_AT_TAG = "fledge.retrain_asked_at"

_ACCEPTANCE_TAG = re.compile(r"fledge\.(champion_)?acceptance_length\.k(\d+)\.(.+)")
_ACCEPTANCE = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")
_SPEED_TAG = re.compile(r"fledge\.(champion_)?output_tokens_per_second\.k(\d+)\.c(\d+)\.(.+)")
_SPEED = re.compile(r"([\d.]+)(?: \(no speculation ([\d.]+)\))?")


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
    num_speculative_tokens: int | None = Field(description="K that the gate judged; None: it found none.")
    advice: ServingAdvice | None = Field(description="How to serve it; None: registered without one.")
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
    restored_at: datetime | None = Field(description="When a rollback brought it back.")
    retrain_asked_at: datetime | None = Field(description="When the monitor last asked for a successor.")
    train_domains: tuple[str, ...] = Field(description="Domains whose conversations it learned from.")

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.version}"

    @property
    def served_name(self) -> str:
        """What the first served model name of this version's fleets begins with; their answers carry it."""
        return f"{self.name}-v{self.version}"

    @property
    def in_production_since(self) -> datetime | None:
        """When this version last came to answer in production."""
        return max(filter(None, (self.deployed_at, self.restored_at)), default=None)

    def acceptance_of(
        self, drafter: Literal["challenger", "champion"] = "challenger", k: int | None = None
    ) -> dict[str, MeasuredAcceptance]:
        """Domain -> acceptance length at K; None takes the K that the gate judged."""
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


def version_record(version: ModelVersion, champion: str | None, places: Places) -> VersionRecord:
    """The version as a record.

    Args:
        champion: number of the version that is champion now.
    """
    tags = version.tags
    return VersionRecord(
        name=version.name,
        version=str(version.version),
        aliases=tuple(sorted(version.aliases)),
        decision=tags.get("fledge.decision", "unknown"),
        reasons=tuple(filter(None, tags.get("fledge.reasons", "").split("\n"))),
        num_speculative_tokens=int(tags.get("fledge.num_speculative_tokens") or 0) or None,
        advice=ServingAdvice.model_validate_json(tags[ADVICE_TAG]) if ADVICE_TAG in tags else None,
        acceptance=_acceptance(tags),
        speed=_speed(tags),
        drafter_digest=tags.get(DIGEST_TAG, ""),
        evaluation_digest=tags.get("fledge.evaluation_digest", ""),
        dataset_digest=tags.get("fledge.dataset_digest", ""),
        target_fingerprint=tags.get(TARGET_TAG, ""),
        report=_report(places, tags),
        champion=champion,
        approval=_approval(tags),
        previous_champion=tags.get(PREVIOUS_CHAMPION_TAG) or None,
        endpoint=tags.get(ENDPOINT_TAG),
        endpoint_config=tags.get(CONFIG_TAG),
        previous_endpoint_config=tags.get(PREVIOUS_CONFIG_TAG) or None,
        deployed_at=_instant(tags, DEPLOYED_AT_TAG),
        rolled_back_at=_instant(tags, ROLLED_BACK_AT_TAG),
        rollback_reason=tags.get(ROLLBACK_REASON_TAG),
        restored_at=_instant(tags, RESTORED_AT_TAG),
        retrain_asked_at=_instant(tags, RETRAIN_ASKED_AT_TAG),
        train_domains=tuple(filter(None, tags.get("fledge.train_domains", "").split(","))),
    )


def _acceptance(tags: Mapping[str, str]) -> tuple[MeasuredAcceptance, ...]:
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


def _speed(tags: Mapping[str, str]) -> tuple[MeasuredSpeed, ...]:
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


def _report(places: Places, tags: Mapping[str, str]) -> str | None:
    page = tags.get("fledge.report")
    return places.link(Path(page)) if page and Path(page).is_file() else None


def _approval(tags: Mapping[str, str]) -> Approval | None:
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
            "previous_champion": tags.get(CHAMPION_AT_APPROVAL_TAG) or None,
        }
    )


def _instant(tags: Mapping[str, str], name: str) -> datetime | None:
    return datetime.fromisoformat(tags[name]) if tags.get(name) else None
