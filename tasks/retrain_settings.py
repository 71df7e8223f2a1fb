"""This run's values of `retrain-drafter`: one frozen object, which Prefect shows as the run form.

Defaults and descriptions come from `drafter/config.py`; what the flow itself decides (directories, the
other stages' outputs) is left out of the form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, create_model, model_validator

from drafter.config import (
    DrafterSettings,
    EvaluateSettings,
    ExtractSettings,
    GateThresholds,
    PrepareSettings,
    ServerSettings,
    Settings,
    SourceSettings,
    TrainSettings,
)
from tasks.training_request import TrainingJobSettings

SHARED = {"seed", "max_length_tokens", "target", "output", "server"}


def _without(model: type[Settings], names: set[str]) -> Any:
    """A settings class with the fields of `model` except `names`; defaults and descriptions stay."""
    unknown = names - set(model.model_fields) - SHARED
    assert not unknown, f"{model.__name__} has no {unknown}"
    kept: dict[str, Any] = {
        name: (field.annotation, field) for name, field in model.model_fields.items() if name not in names
    }
    return create_model(f"{model.__name__}Fields", __base__=Settings, __module__=__name__, **kept)


class DatasetChoices(_without(PrepareSettings, SHARED | {"sources", "on_problem"})):  # type: ignore[misc]
    """How conversations become a dataset."""


class StatesChoices(_without(ExtractSettings, SHARED | {"dataset", "split", "evaluation_output"})):  # type: ignore[misc]
    """How the target answers and its hidden states are written."""


_NO_CHOICE_OF_TRAINING = SHARED | {"states", "drafter", "warm_start", "algorithm", "distributed"}


class TrainingChoices(_without(TrainSettings, _NO_CHOICE_OF_TRAINING)):  # type: ignore[misc]
    """How the drafter is trained."""


class EvaluationChoices(_without(EvaluateSettings, SHARED | {"dataset", "candidates"})):  # type: ignore[misc]
    """What is measured inside vLLM."""


class ServerChoices(_without(ServerSettings, {"python", "port"})):  # type: ignore[misc]
    """How vLLM servers are started; where vLLM is installed is FLEDGE_VLLM_PYTHON."""


Severity = Literal["stop", "warn"]


class ValidationChoices(Settings):
    """What Great Expectations checks on the conversations: tolerances, and what a failed check does."""

    on_malformed: Severity = Field(
        default="stop", description="Too many malformed conversations (broken JSON, roles out of order)."
    )
    max_malformed_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of conversations that may be malformed; they are left out.",
    )
    on_empty_turns: Severity = Field(default="stop", description="A turn without text.")
    on_undecodable: Severity = Field(
        default="warn", description="Characters that did not decode (U+FFFD) in too many conversations."
    )
    max_undecodable_share: float = Field(
        default=0.0, ge=0, lt=1, description="Share of conversations that may hold such characters."
    )
    on_length: Severity = Field(
        default="warn", description="Token lengths that do not suit the window: too many are truncated."
    )
    max_truncated_share: float = Field(
        default=0.05, ge=0, lt=1, description="Share of conversations that may be longer than the window."
    )
    on_supervised_share: Severity = Field(
        default="stop", description="Given answers that make up too little of the tokens."
    )
    min_supervised_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Least mean share of assistant tokens, over conversations that bring an answer.",
    )
    on_duplicates: Severity = Field(
        default="warn", description="Too many exact duplicates; they are left out."
    )
    max_duplicate_share: float = Field(
        default=0.2, ge=0, lt=1, description="Share of exact duplicates tolerated."
    )
    on_leakage: Severity = Field(
        default="stop", description="A prompt on both sides: in training and in evaluation."
    )
    on_too_few: Severity = Field(
        default="stop", description="Fewer conversations than `min_train` or `min_evaluation`."
    )
    min_train: int = Field(default=1, ge=1, description="Least conversations to train on.")
    min_evaluation: int = Field(default=1, ge=0, description="Least held-out conversations.")


class RetrainSettings(Settings):
    """Retrain a drafter on new conversations, measure it in vLLM, and register it if it is good enough.

    Every value has a default that runs; `sources` says what to learn from.
    """

    sources: tuple[SourceSettings, ...] = Field(
        default=(SourceSettings(uri="examples/conversations.jsonl", domain="example"),),
        min_length=1,
        description="Conversations to learn from and to measure with, each with the domain it belongs to.",
    )
    target: Path = Field(
        default=Path(".fledge/targets/smollm2-135m-instruct"),
        description="Directory of the target model in Hugging Face format.",
    )
    max_length_tokens: int = Field(
        default=PrepareSettings.model_fields["max_length_tokens"].default,
        ge=8,
        description="Longest conversation in tokens, from dataset to training; longer ones are cut and counted.",
    )
    seed: int = Field(
        default=0, description="Seed of the split, of sampled answers, of training and bootstrap."
    )
    force: bool = Field(
        default=False,
        description="Train and register anew although a version of the same data, target and settings exists.",
    )
    warm_start: bool = Field(
        default=True,
        description="Continue from the registry's champion if there is one of the same shape; else from scratch.",
    )
    compare_with_champion: bool = Field(
        default=True, description="Measure the champion on the same prompts; the gate compares."
    )
    dataset: DatasetChoices = Field(
        default_factory=DatasetChoices, description="How conversations become a dataset."
    )
    validation: ValidationChoices = Field(
        default_factory=ValidationChoices, description="What is checked on the conversations, and what stops."
    )
    states: StatesChoices = Field(
        default_factory=StatesChoices, description="How the target answers and its hidden states are written."
    )
    drafter: DrafterSettings = Field(default_factory=DrafterSettings, description="Shape of the drafter.")
    training: TrainingChoices = Field(
        default_factory=TrainingChoices, description="How the drafter is trained."
    )
    training_job: TrainingJobSettings | None = Field(
        default=None, description="Train as a SageMaker job, on such an instance; None: on this machine."
    )
    evaluation: EvaluationChoices = Field(
        default_factory=EvaluationChoices, description="What is measured inside vLLM."
    )
    gate: GateThresholds = Field(
        default_factory=GateThresholds, description="What the drafter must show to become challenger."
    )
    server: ServerChoices = Field(
        default_factory=ServerChoices, description="How vLLM servers are started on this machine."
    )

    @model_validator(mode="after")
    def _measured_where_it_is_judged(self) -> RetrainSettings:
        expected, measured = self.gate.expected_concurrency, self.evaluation.concurrency
        if expected not in measured:
            raise ValueError(
                f"gate.expected_concurrency is {expected}, and evaluation.concurrency is {list(measured)}: nothing "
                f"would be known where the gate judges; add {expected} to it"
            )
        return self
