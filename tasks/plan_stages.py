"""From this run's values to each verb's settings, with directories named by what they will hold.

A stage's directory carries the digest of everything that changes its content, so the same work is found
again by any run, and other settings never meet its files. Pure but for reading what sources weigh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.config import (
    CandidateSettings,
    EstimateSettings,
    EvaluateSettings,
    ExportSettings,
    ExtractSettings,
    PreflightSettings,
    PrepareSettings,
    ReportSettings,
    ServerSettings,
    Settings,
    TrainSettings,
)
from drafter.files import digest_of
from drafter.records import DatasetRecord, DrafterRecord, EvaluationReport, StatesRecord, TrainingRecord
from drafter.target import load_target
from tasks.find_sources import fingerprint_source
from tasks.retrain_settings import RetrainSettings
from tasks.settings import Places

FIRST_ATTEMPT = "first"
# Where something is, how a server is reached, and in which pieces work is done, changes no result ...
_IGNORED = {"dataset", "target", "states", "training", "output", "python", "port", "start_timeout_s"}
_IGNORED |= {
    "evaluation_output",
    "servers_at_once",
    "device",
    "checkpoint_interval_s",
    "chains_per_segment",
    "rows_per_chunk",
    "memory_budget_gb",
    "distributed",
    "num_ranks",
}
# ... and for what the target answers, the load of the server does not either. Speed is another matter.
_LOAD = {"num_servers", "concurrency", "max_num_seqs", "kv_cache_gb"}


def digest_of_settings(settings: Settings, **inputs: Any) -> str:
    """Digest over the settings of a verb that change its result, and over its inputs' own digests."""
    ignored = _IGNORED | (_LOAD if isinstance(settings, ExtractSettings) else set())
    return digest_of({"settings": _kept(settings.model_dump(mode="json"), ignored), **inputs})


def _kept(value: Any, ignored: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _kept(item, ignored) for name, item in value.items() if name not in ignored}
    return value


@dataclass(frozen=True)
class RetrainPlan:
    """Settings of every stage of one run.

    Args:
        settings: this run's values.
        places: where things live.
        attempt: `first`, or with `force` a name of this attempt that keeps its weights apart.
    """

    settings: RetrainSettings
    places: Places
    attempt: str = FIRST_ATTEMPT

    @property
    def target_fingerprint(self) -> str:
        return load_target(self.settings.target).fingerprint

    def fingerprint(self, dataset: DatasetRecord) -> str:
        """What makes two trainings the same: data, target, and every setting that changes the weights."""
        states = self._extract(dataset, "train")
        training = TrainSettings(states=Path(), output=Path(), **self._training())
        return digest_of(
            {
                "dataset": dataset.digest,
                "target": self.target_fingerprint,
                "states": digest_of_settings(states),
                "training": digest_of_settings(training),
                "warm_start": self.settings.warm_start,
            }
        )

    def prepare(self) -> PrepareSettings:
        settings = PrepareSettings(
            sources=self.settings.sources,
            output=Path(),
            on_problem="drop",  # the profile keeps what is dropped, and Great Expectations judges it
            **self._shared(),
            **_values(self.settings.dataset),
        )
        inputs = [fingerprint_source(source.uri) for source in self.settings.sources]
        return self._placed("dataset", settings, sources=inputs, target=self.target_fingerprint)

    def extract(self, dataset: DatasetRecord, split: str) -> ExtractSettings:
        settings = self._extract(dataset, split)
        return self._placed(
            f"states-{split}", settings, dataset=dataset.digest, target=self.target_fingerprint
        )

    def extract_both(self, dataset: DatasetRecord) -> ExtractSettings:
        """The training side, with the held-out one through the same server: a start saved."""
        held_out = self.extract(dataset, "evaluation")
        return self.extract(dataset, "train").model_copy(update={"evaluation_output": held_out.output})

    def train(self, states: StatesRecord, champion: DrafterRecord | None) -> TrainSettings:
        warm_start = champion and Path(champion.path)
        settings = TrainSettings(
            states=Path(states.path), output=Path(), warm_start=warm_start, **self._training()
        )
        return self._placed(
            "training",
            settings.model_copy(update={"warm_start": None}),
            states=states.digest,
            warm_start=champion and champion.digest,
            attempt=self.attempt,
        ).model_copy(update={"warm_start": warm_start})

    def export(self, training: TrainingRecord) -> ExportSettings:
        output = Path(training.path).with_name(Path(training.path).name.replace("training", "drafter", 1))
        return ExportSettings(training=Path(training.path), target=self.settings.target, output=output)

    def preflight(self, drafter: DrafterRecord) -> PreflightSettings:
        return PreflightSettings(drafter=Path(drafter.path), target=self.settings.target)

    def estimate(self, drafter: DrafterRecord, held_out: StatesRecord) -> EstimateSettings:
        settings = EstimateSettings(
            drafter=Path(drafter.path),
            states=Path(held_out.path),
            target=self.settings.target,
            num_speculative_tokens=max(self.settings.evaluation.num_speculative_tokens),
        )
        key = digest_of(
            [drafter.digest, held_out.digest, settings.num_speculative_tokens],
        )
        output = self._directory("estimate", key) / "estimate.json"
        return settings.model_copy(update={"output": output})

    def evaluate(
        self, dataset: DatasetRecord, drafter: DrafterRecord, champion: DrafterRecord | None
    ) -> EvaluateSettings:
        candidates = [CandidateSettings(name="challenger", path=Path(drafter.path))]
        if champion is not None:
            candidates.append(CandidateSettings(name="champion", path=Path(champion.path)))
        settings = EvaluateSettings(
            dataset=Path(dataset.path),
            output=Path(),
            candidates=tuple(candidates),
            server=self._server(),
            target=self.settings.target,
            seed=self.settings.seed,
            **_values(self.settings.evaluation),
        )
        return self._placed(
            "evaluation",
            settings.model_copy(update={"candidates": ()}),
            dataset=dataset.digest,
            target=self.target_fingerprint,
            drafters=[drafter.digest, champion and champion.digest],
        ).model_copy(update={"candidates": settings.candidates})

    def report(
        self, evaluation: EvaluationReport, training: TrainingRecord | None, drafter: DrafterRecord
    ) -> ReportSettings:
        return ReportSettings(
            evaluation=Path(evaluation.path),
            training=training and Path(training.path),
            drafter=Path(drafter.path),
        )

    def validation_directory(self, dataset: DatasetRecord) -> Path:
        choices = self.settings.validation.model_dump(mode="json")
        return self._directory("validation", digest_of([dataset.path, choices, self._window()]))

    def window_tokens(self) -> int:
        return self._window()

    def _window(self) -> int:
        return min(self.settings.max_length_tokens, load_target(self.settings.target).max_position_embeddings)

    def _extract(self, dataset: DatasetRecord, split: str) -> ExtractSettings:
        return ExtractSettings(
            dataset=Path(dataset.path),
            output=Path(),
            split=split,
            server=self._server(),
            **self._shared(),
            **_values(self.settings.states),
        )

    def _training(self) -> dict[str, Any]:
        return {"drafter": self.settings.drafter, **self._shared(), **_values(self.settings.training)}

    def _shared(self) -> dict[str, Any]:
        return {
            "target": self.settings.target,
            "seed": self.settings.seed,
            "max_length_tokens": self.settings.max_length_tokens,
        }

    def _server(self) -> ServerSettings:
        return ServerSettings(python=self.places.vllm_python, **_values(self.settings.server))

    def _placed(self, stage: str, settings: Any, **inputs: Any) -> Any:
        return settings.model_copy(
            update={"output": self._directory(stage, digest_of_settings(settings, **inputs))}
        )

    def _directory(self, stage: str, digest: str) -> Path:
        return self.places.stages.resolve() / f"{stage}-{digest}"


def _values(choices: Settings) -> dict[str, Any]:
    """The fields of a settings object as they are, nested models kept."""
    return {name: getattr(choices, name) for name in type(choices).model_fields}
