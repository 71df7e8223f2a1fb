"""A monitor's values: which endpoint, what counts as a bad window, and how many of them make it act."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from drafter.config import Settings
from tasks.endpoint_settings import ENDPOINT_NAME, ProbeSettings


class MonitorThresholds(Settings):
    """When a window is bad, and when bad windows make the monitor act.

    Acceptance is compared by what the drafter adds: accepted tokens a step, acceptance length - 1. At an
    evaluated length of 1.86, 0.6 of it is a length of 1.52.
    """

    roll_back_below: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="Share of the evaluation's accepted tokens a step below which the endpoint is taken back.",
    )
    retrain_below: float = Field(
        default=0.6, ge=0, le=1, description="Share below which a retrain is asked for."
    )
    recovery_margin: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="A window ends a row of bad ones only this much above retrain_below; between, it counts for neither.",
    )
    max_error_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share of requests that the container fails (5xx or no answer) above which the endpoint is taken back.",
    )
    min_speed_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the evaluation's output tokens/s, one request at a time, below which probes are slow. "
        "Only watched: load slows every drafter, and going back to another would not help.",
    )
    min_answers: int = Field(
        default=4, ge=1, description="Answers that a window needs for its acceptance or speed to be judged."
    )
    min_requests: int = Field(
        default=10, ge=1, description="Requests that a window needs for its errors to be judged."
    )
    num_bad_windows: int = Field(default=3, ge=1, description="Bad windows in a row before anything is done.")
    cool_down_s: int = Field(
        default=3600, ge=0, description="Seconds after a rollback in which there is no further one."
    )
    retrain_cool_down_s: int = Field(
        default=24 * 3600, ge=0, description="Seconds after asking for a retrain in which none is asked for."
    )

    @model_validator(mode="after")
    def _rollback_is_the_lower(self) -> MonitorThresholds:
        if self.roll_back_below > self.retrain_below:
            raise ValueError("roll_back_below must not exceed retrain_below")
        return self


class MonitorSettings(Settings):
    """Compare an endpoint with what its drafter's evaluation promised; ask for a retrain or take it back."""

    endpoint_name: str = Field(default="fledge", pattern=ENDPOINT_NAME, description="Endpoint to look at.")
    window_s: int = Field(
        default=300,
        ge=10,
        description="Length of a window, a period that CloudWatch knows: 10, 20, 30 or a multiple of 60.",
    )
    settle_s: int = Field(
        default=60,
        ge=0,
        description="A window is judged so long after its end: captures and metrics come late.",
    )
    num_probes: int = Field(
        default=4, ge=0, description="Chats of each run; they count in the window that is under way."
    )
    probe: ProbeSettings = Field(default_factory=ProbeSettings, description="What is asked.")
    max_captured_answers: int = Field(
        default=500, ge=1, description="At most so many captured answers of a window are read, the newest."
    )
    act: bool = Field(default=True, description="False: say what would be done, and do nothing.")
    thresholds: MonitorThresholds = Field(
        default_factory=MonitorThresholds, description="When a window is bad, and what bad windows lead to."
    )

    @field_validator("window_s")
    @classmethod
    def _is_a_period(cls, window_s: int) -> int:
        if window_s not in (10, 20, 30) and window_s % 60:
            raise ValueError(f"window_s is {window_s}, expected 10, 20, 30 or a multiple of 60")
        return window_s
