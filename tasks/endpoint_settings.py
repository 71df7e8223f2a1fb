"""This deployment's values: what to deploy, how traffic moves to it, and when it is taken back.

`None` means: as the catalogue says for the model (`tasks/catalogue.yaml`). Limits are SageMaker's own.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from drafter.config import Settings
from drafter.errors import FledgeError
from drafter.records import BatchSizeSchedule, Record

ENDPOINT_NAME = r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,39}$"  # SageMaker's 63, less what config names add to it
MAX_ALARMS = 10


class ParallelDraftingSpec(Settings):
    """The short form: how many tokens the drafter guesses in one pass."""

    num_speculative_tokens: int = Field(description="K, tokens guessed in one forward pass of the drafter.")
    num_branches: int = Field(default=1, description="Guessed chains; vLLM verifies one.")


class RolloutSettings(Settings):
    """How traffic moves from the fleet that serves to the new one (blue/green)."""

    kind: Literal["canary", "linear", "all_at_once"] = Field(
        default="canary", description="`canary`: a share first, then the rest. `linear`: equal steps."
    )
    percent: int = Field(
        default=10, ge=1, le=50, description="Size of the canary or of a linear step, % of the capacity."
    )
    wait_s: int = Field(
        default=300, ge=0, le=3600, description="Seconds that alarms are watched after each step."
    )
    termination_wait_s: int = Field(
        default=300, ge=0, le=3600, description="Seconds that the old fleet is kept after the last step."
    )
    max_execution_s: int = Field(
        default=3600, ge=600, le=28800, description="Seconds after which SageMaker gives the update up."
    )

    @model_validator(mode="after")
    def _linear_steps(self) -> RolloutSettings:
        if self.kind == "linear" and self.percent < 10:
            raise ValueError("SageMaker takes linear steps of 10 to 50 percent")
        return self


class AlarmSettings(Settings):
    """What takes an update back by itself. Each alarm watches the new fleet alone."""

    max_5xx_errors: int | None = Field(
        default=0,
        ge=0,
        description="Answers with a 5xx status per period that are still fine; None: unwatched.",
    )
    max_model_errors: int | None = Field(
        default=0,
        ge=0,
        description="Failed calls of the container per period that are still fine. Counts requests that the "
        "container refuses (4xx) too: raise it where clients send such. None: unwatched.",
    )
    max_latency_ms: float | None = Field(
        default=None, gt=0, description="Ceiling of the mean model latency (ModelLatency); None: unwatched."
    )
    max_latency_ratio: float | None = Field(
        default=2.0,
        gt=1,
        description="Ceiling of the new fleet's probe latency over that of the fleet beside it; None: unwatched.",
    )
    min_acceptance_length: float | None = Field(
        default=None, ge=1, description="Floor of the acceptance length; None: a share of the evaluation's."
    )
    min_share_of_evaluation: float = Field(
        default=0.7, gt=0, le=1, description="That share, of the version's own measured acceptance length."
    )
    period_s: Literal[10, 30, 60] = Field(
        default=60, description="Seconds over which a value is taken; below 60 it is a high-resolution alarm."
    )
    evaluation_periods: int = Field(default=3, ge=1, le=60, description="Periods looked at.")
    datapoints: int = Field(default=2, ge=1, le=60, description="Of these, periods that must be bad.")
    own: tuple[str, ...] = Field(
        default=(), description="Names of further CloudWatch alarms of yours that take an update back."
    )

    @field_validator("period_s", mode="before")
    @classmethod
    def _from_a_flag(cls, given: object) -> object:
        """A command line gives text, which a Literal does not take for a number."""
        return int(given) if isinstance(given, str) and given.isdecimal() else given

    @model_validator(mode="after")
    def _datapoints_within_periods(self) -> AlarmSettings:
        if self.datapoints > self.evaluation_periods:
            raise ValueError("datapoints must not exceed evaluation_periods")
        return self


class AutoscalingSettings(Settings):
    """Application Auto Scaling of the variant, by invocations per instance and minute."""

    min_instances: int = Field(default=1, ge=1, description="Fewest instances.")
    max_instances: int = Field(default=2, ge=1, description="Most instances.")
    invocations_per_instance: float = Field(
        default=60.0, gt=0, description="Target of invocations per instance and minute."
    )
    scale_in_cooldown_s: int = Field(default=300, ge=0, description="Seconds between two steps down.")
    scale_out_cooldown_s: int = Field(default=60, ge=0, description="Seconds between two steps up.")

    @model_validator(mode="after")
    def _minimum_below_maximum(self) -> AutoscalingSettings:
        if self.min_instances > self.max_instances:
            raise ValueError("min_instances must not exceed max_instances")
        return self


class CaptureSettings(Settings):
    """Data capture: requests and answers to S3, where the next retrain finds them."""

    percent: int = Field(default=100, ge=1, le=100, description="Share of the requests captured.")
    destination: str | None = Field(
        default=None, description="S3 prefix; None: captures/ENDPOINT/ in the installation's bucket."
    )


class ProbeSettings(Settings):
    """Small chats that measure latency and acceptance, and tell fleets apart by the served model's name."""

    prompts: tuple[str, ...] = Field(
        default=(),
        description="Prompts of the domain that the drafter is for; empty: held-out ones of its dataset if they "
        "are on this machine, else a few general ones, for which no floor is derived.",
    )
    max_tokens: int = Field(default=48, ge=1, description="Tokens of one answer.")
    interval_s: float = Field(default=1.0, gt=0, description="Seconds between two probes during an update.")
    timeout_s: float = Field(
        default=60.0, gt=0, le=60, description="Limit of one answer; SageMaker's own is 60."
    )
    num_smoke: int = Field(default=4, ge=1, description="Chats that judge the new fleet after the shift.")


class DeploySettings(Settings):
    """Deploy a registered drafter version with its target behind an endpoint, or move an endpoint to it."""

    version: str = Field(
        default="challenger",
        description="Registered version: a number, or the alias `challenger` or `champion`.",
    )
    endpoint_name: str = Field(
        default="fledge", pattern=ENDPOINT_NAME, description="Endpoint to create or to update."
    )
    model: str = Field(default="smollm2-135m-instruct", description="Entry of the catalogue: the target.")
    target_uri: str | None = Field(
        default=None,
        pattern=r"^s3://[^/]+/.*/$",
        description="S3 prefix with the target's files, ending in `/`; None: as the catalogue says.",
    )
    image: str | None = Field(default=None, description="Serving image; None: the catalogue's.")
    instance_type: str | None = Field(default=None, description="None: the catalogue's first.")
    fallback_instance_types: tuple[str, ...] | None = Field(
        default=None, description="Tried in turn where AWS has no capacity; None: the catalogue's."
    )
    instance_count: int | None = Field(default=None, ge=1, description="Instances; None: the catalogue's.")
    expected_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="Requests in flight that you expect here, for which K is looked up in what the version's "
        "evaluation measured; None: as many as its evaluation expected.",
    )
    num_speculative_tokens: int | None = Field(
        default=None, description="K; None: what the version's evaluation advises."
    )
    num_speculative_tokens_per_batch_size: BatchSizeSchedule | None = Field(
        default=None,
        description="K by batch size, as vLLM takes it: [[first, last, K], ...], K being that above, or 0. "
        "None: the version's, if one measured better than K alone; []: none.",
    )
    parallel_drafting_spec: ParallelDraftingSpec | None = Field(
        default=None, description="Short form of the drafting settings; excludes num_speculative_tokens."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Container environment over the catalogue's (`SM_VLLM_*`)."
    )
    rollout: RolloutSettings = Field(default_factory=RolloutSettings, description="How traffic moves.")
    alarms: AlarmSettings = Field(default_factory=AlarmSettings, description="What takes an update back.")
    autoscaling: AutoscalingSettings | None = Field(
        default=None, description="None: a fixed number of instances."
    )
    capture: CaptureSettings | None = Field(default=None, description="None: nothing is captured.")
    probe: ProbeSettings = Field(default_factory=ProbeSettings, description="Chats that measure the fleets.")
    model_download_timeout_s: int | None = Field(
        default=None, ge=60, le=3600, description="Limit of fetching model data; None: the catalogue's."
    )
    startup_timeout_s: int | None = Field(
        default=None, ge=60, le=3600, description="Limit until /ping answers; None: the catalogue's."
    )

    @field_validator("parallel_drafting_spec")
    @classmethod
    def _one_chain(cls, spec: ParallelDraftingSpec | None) -> ParallelDraftingSpec | None:
        if spec is not None and spec.num_branches != 1:
            raise ValueError(
                f"num_branches is {spec.num_branches}, expected 1: vLLM verifies one chain of guesses; "
                "set it to 1, or leave it out"
            )
        return spec

    @model_validator(mode="after")
    def _one_k(self) -> DeploySettings:
        spec = self.parallel_drafting_spec
        if spec is not None and self.num_speculative_tokens not in (None, spec.num_speculative_tokens):
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens} and the parallel_drafting_spec says "
                f"{spec.num_speculative_tokens}; give one of them"
            )
        return self

    @property
    def chosen_num_speculative_tokens(self) -> int | None:
        """K as these settings give it; None: what evaluation chose."""
        spec = self.parallel_drafting_spec
        return self.num_speculative_tokens if spec is None else spec.num_speculative_tokens


class RollBackSettings(Settings):
    """Take an endpoint back to the config that it ran before."""

    endpoint_name: str = Field(default="fledge", pattern=ENDPOINT_NAME, description="Endpoint to take back.")
    reason: str = Field(min_length=1, description="Why, in words; kept on the version that is taken back.")
    termination_wait_s: int = Field(
        default=0, ge=0, le=3600, description="Seconds that the fleet that is left is kept."
    )


class DeleteSettings(Settings):
    """Delete an endpoint with its configs, models, alarms and scaling."""

    endpoint_name: str = Field(pattern=ENDPOINT_NAME, description="Endpoint to delete.")


class EndpointRecord(Record):
    """An endpoint as SageMaker describes it, with what Fledge's tags add."""

    endpoint_name: str
    status: str = Field(description="SageMaker's EndpointStatus.")
    config_name: str = Field(description="EndpointConfigName that serves.")
    previous_config_name: str | None = Field(default=None, description="What a rollback goes back to.")
    version: str | None = Field(default=None, description="Registered version that serves; None: not ours.")
    served_name: str | None = Field(default=None, description="First name of the model in answers.")
    model: str | None = Field(default=None, description="Catalogue entry of the target.")
    instance_type: str | None = None
    instance_count: int | None = None
    created_at: str | None = None
    failure_reason: str | None = None
    pending_config_name: str | None = Field(default=None, description="Where an update leads.")
    progress: str | None = Field(default=None, description="What SageMaker is doing, in its words.")
    usd_per_hour: float | None = Field(default=None, description="Of all instances; None: no price is known.")
    latency_ms: float | None = Field(default=None, description="Mean of the smoke chats.")
    acceptance_length: float | None = Field(default=None, description="Mean of the smoke chats.")


class EndpointError(FledgeError):
    """An endpoint that cannot be made, moved or reached as asked."""


class EndpointRolledBack(EndpointError):
    """SageMaker took the update back; `given` says why, and what the endpoint runs."""


class DrafterUnfit(EndpointError):
    """The new fleet serves, but not well enough to stay."""


class NoCapacity(EndpointError):
    """AWS has no instance of this type at the moment."""
