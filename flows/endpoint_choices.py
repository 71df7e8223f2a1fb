"""What the `fledge` verbs around an endpoint take: every field is a flag, or an argument by its place."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import CliPositionalArg

from drafter.config import Settings
from tasks.endpoint_settings import ENDPOINT_NAME, DeploySettings, RollBackSettings

DEFAULT_ENDPOINT = "fledge"


class ModelsChoice(Settings):
    """Which model to show."""

    name: CliPositionalArg[str | None] = Field(
        default=None, description="Key of a model, whose card is shown; left out: all models are listed."
    )
    version: str | None = Field(
        default=None,
        description="Registered drafter version (number or alias) that the card is shown with: its measured K.",
    )
    num_speculative_tokens: int | None = Field(
        default=None, ge=1, description="K to show the card with; left out: the version's or the catalogue's."
    )


class DeployChoice(DeploySettings):
    """Deploy a registered drafter version with its target behind an endpoint, or move an endpoint to it."""

    version: CliPositionalArg[str] = Field(
        default="challenger",
        description="Registered version: a number, or the alias `challenger` or `champion`.",
    )


class StatusChoice(Settings):
    """Which endpoint to look at."""

    endpoint_name: CliPositionalArg[str | None] = Field(
        default=None, description="Endpoint; left out: all of this account and region."
    )


class ChatSettings(Settings):
    """Whom to ask, and what."""

    endpoint_name: CliPositionalArg[str] = Field(
        default=DEFAULT_ENDPOINT, pattern=ENDPOINT_NAME, description="Endpoint to ask."
    )
    message: CliPositionalArg[str | None] = Field(
        default=None, description="One question; left out: a prompt on a terminal, else all of stdin."
    )
    system: str | None = Field(default=None, description="System message above the conversation.")
    max_tokens: int = Field(default=256, ge=1, description="Most tokens of one answer.")
    temperature: float = Field(default=0.0, ge=0, le=2, description="0 is greedy.")


class ApproveChoice(Settings):
    """Whether a registered version may go into production."""

    version: CliPositionalArg[str] = Field(description="Registered version: a number, or `challenger`.")
    approver: str = Field(
        validation_alias="as", min_length=1, description="Your name, one of FLEDGE_APPROVERS; taken on trust."
    )
    reason: str = Field(
        pattern=r"\S", max_length=2000, description="Why, in a sentence; kept on the version."
    )
    reject: bool = Field(default=False, description="Say no instead.")


class RollBackChoice(RollBackSettings):
    """Take an endpoint back to the config that it ran before."""

    endpoint_name: CliPositionalArg[str] = Field(
        default=DEFAULT_ENDPOINT, pattern=ENDPOINT_NAME, description="Endpoint to take back."
    )


class DeleteChoice(Settings):
    """Which endpoint to delete."""

    endpoint_name: CliPositionalArg[str] = Field(pattern=ENDPOINT_NAME, description="Endpoint to delete.")
    yes: bool = Field(default=False, description="Do not ask; needed where nobody can answer.")


class LogsChoice(Settings):
    """Whose log to show."""

    endpoint_name: CliPositionalArg[str] = Field(
        default=DEFAULT_ENDPOINT, pattern=ENDPOINT_NAME, description="Endpoint."
    )
    lines: int = Field(default=40, ge=1, description="Last lines of each instance.")
