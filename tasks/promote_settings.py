"""A promotion's values: which version, what follows the approval, how long the form waits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drafter.config import Settings
from tasks.endpoint_settings import DeploySettings

Decision = Literal["approve", "reject"]


class ApprovalAnswer(Settings):
    """What the approver says. The form asks for it; `fledge approve` gives it."""

    decision: Decision = Field(description="`approve` lets the version into production, `reject` does not.")
    approver: str = Field(
        min_length=1,
        description="Your name, one of FLEDGE_APPROVERS. It is taken on trust: Prefect knows no identities.",
    )
    reason: str = Field(
        pattern=r"\S", max_length=2000, description="Why, in a sentence; it is kept on the version."
    )


class PromoteSettings(Settings):
    """Ask a person whether a registered version may go into production, and deploy it if so."""

    version: str = Field(
        default="challenger", description="Registered version: a number, or the alias `challenger`."
    )
    deployment: DeploySettings | None = Field(
        default=None,
        description="Deployed once approved, with the version of the approval in place of its own; None: the "
        "approval alone is recorded, and deploy-endpoint can follow.",
    )
    expires_after_s: int = Field(
        default=7 * 24 * 3600,
        ge=10,
        description="Seconds that the approval form waits before it is withdrawn.",
    )
    answer: ApprovalAnswer | None = Field(
        default=None, description="Given beforehand, nobody is asked; None: the form asks."
    )
