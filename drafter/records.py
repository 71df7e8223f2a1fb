"""The small frozen records that stages hand on: URIs, digests and numbers, never tensors. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Frozen and strict; `save` and `load` are the only way a record touches the disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def save(self, path: Path) -> None:
        """Write as indented JSON, atomically: a reader sees the old file or the new one."""
        from drafter.files import write_text_atomically

        write_text_atomically(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: Path):  # type: ignore[no-untyped-def]
        """Read back what `save` wrote.

        Raises:
            DataError: the file is missing or not this record.
        """
        from drafter.files import read_record

        return read_record(cls, path)


class Message(Record):
    """One turn of a conversation, OpenAI's shape."""

    role: Literal["system", "user", "assistant"]
    content: str


class Conversation(Record):
    """A conversation as the dataset keeps it."""

    id: str = Field(description="sha256 over the messages' roles and contents, first 32 hex digits.")
    domain: str
    source: str = Field(description="File and line it came from.")
    messages: tuple[Message, ...]


class DatasetRecord(Record):
    """`dataset.json` of a prepared dataset. Beside it: train.jsonl, evaluation.jsonl, profile.parquet."""

    digest: str = Field(description="Over ids, domains and split: same data, same digest.")
    path: str
    num_train: int
    num_evaluation: int
    num_duplicates: int = Field(description="Exact duplicates dropped.")
    num_problems: int = Field(description="Malformed conversations left out (on_problem=drop).")
    num_withheld: int = Field(
        default=0, description="Kept from training: an evaluation source has the same prompt."
    )
    num_truncated: int
    num_per_domain: dict[str, dict[str, int]] = Field(description="domain -> {train, evaluation}.")
    train_domains: tuple[str, ...]


class ShardRecord(Record):
    """One safetensors file of hidden states."""

    file: str
    sha256: str
    num_conversations: int
    num_tokens: int
    num_supervised_tokens: int
    num_bytes: int
    num_truncated: int = 0
    num_skipped: int = 0


class StatesRecord(Record):
    """`manifest.json` of a hidden-state directory, written last: without it nothing counts as done."""

    digest: str = Field(
        description="Over dataset digest, split, target fingerprint and what changes the states."
    )
    path: str
    split: Literal["train", "evaluation"]
    dataset_digest: str
    target_fingerprint: str
    auxiliary_layers: tuple[int, int, int]
    hidden_size: int
    vocab_size: int
    dtype: str
    shards: tuple[ShardRecord, ...]
    num_conversations: int
    num_tokens: int
    num_supervised_tokens: int
    num_truncated: int
    num_skipped: int = Field(description="Conversations left out, e.g. an empty answer.")
    greedy_answers: bool = Field(
        default=False,
        description="The target wrote the answers at temperature 0: they are its own greedy tokens.",
    )
    elapsed_s: float = Field(description="Of the whole run, with the start of its servers.")
    tokens_per_s: float = Field(description="Of all sides that the run read, while its servers answered.")


class TrainingRecord(Record):
    """`training.json`, written when a training has ended."""

    path: str
    fingerprint: str = Field(
        description="Over states digest, target fingerprint, settings that change the weights, warm start."
    )
    states_digest: str
    dataset_digest: str = Field(default="", description="Of the dataset that the states were extracted from.")
    target_fingerprint: str
    num_steps: int
    num_tokens: int = Field(description="Depth-0 slots seen, epochs counted.")
    num_epochs: float
    final_loss: float
    elapsed_s: float
    tokens_per_s: float
    peak_memory_gb: float
    warm_start: str | None


class DrafterRecord(Record):
    """An exported drafter."""

    path: str
    digest: str = Field(description="sha256 over config.json and model.safetensors.")
    num_parameters: int
    target_fingerprint: str


class AcceptanceEstimate(Record):
    """What walking each answer as decoding does predicts for the server."""

    num_speculative_tokens: int
    acceptance_length: float
    acceptance_rate_per_position: tuple[float, ...]
    num_steps: int
    num_answers: int
    per_domain: dict[str, float]


class Cell(Record):
    """One measured combination. Speed is of the benchmark run, acceptance of vLLM's own counters."""

    speculation: Literal["none", "peagle", "eagle3"]
    drafter: str | None = Field(description="Candidate's name; None without speculation.")
    num_speculative_tokens: int = Field(description="K; 0 without speculation.")
    concurrency: int
    domain: str
    num_requests: int
    output_tokens: int
    acceptance_length: float | None
    acceptance_rate_per_position: tuple[float, ...]
    output_tokens_per_second: float
    ttft_ms: float = Field(description="Median time to first token.")
    tpot_ms: float = Field(description="Median time per output token after the first.")

    @property
    def column(self) -> str:
        """Heading of the cell's column beside others of the same drafter; EAGLE-3 is told from P-EAGLE."""
        return f"K={self.num_speculative_tokens}" + (" (EAGLE-3)" if self.speculation == "eagle3" else "")


class PromptAcceptance(Record):
    """Acceptance of one held-out prompt, the unit of the bootstrap."""

    conversation_id: str
    domain: str
    drafter: str
    num_speculative_tokens: int
    context_tokens: int = Field(description="Prompt and answer.")
    length_bucket: str = Field(description="`<=256`, `<=1024`, ... `>4096` tokens of prompt + answer.")
    num_drafts: int = Field(description="Verification steps.")
    num_accepted_tokens: int

    @property
    def acceptance_length(self) -> float:
        """1 + accepted tokens per verification step."""
        return 1.0 + self.num_accepted_tokens / max(self.num_drafts, 1)


class AcceptanceSummary(Record):
    """AL of a drafter over a group of prompts with its bootstrap interval."""

    drafter: str
    num_speculative_tokens: int
    domain: str
    length_bucket: str = Field(description="A bucket's name, or `all`.")
    num_prompts: int
    acceptance_length: float
    lower: float
    upper: float


# vLLM's `num_speculative_tokens_per_batch_size`: (first batch size, last one, K), both inclusive.
BatchSizeSchedule = tuple[tuple[int, int, int], ...]


class ScheduledServing(Record):
    """What a server measured that chooses K, or none, by the number of requests in its batch."""

    drafter: str
    schedule: BatchSizeSchedule
    cells: tuple[Cell, ...]


class EvaluationReport(Record):
    """`evaluation.json`: everything that was measured."""

    path: str
    digest: str = Field(description="Over what was evaluated: dataset, target, drafters, settings.")
    target_fingerprint: str
    dataset_digest: str
    drafters: dict[str, str] = Field(description="Candidate's name -> digest of its files.")
    cells: tuple[Cell, ...]
    scheduled: tuple[ScheduledServing, ...] = Field(
        default=(), description="Servers with a batch-size schedule; kept apart from the cells of one K each."
    )
    prompts: tuple[PromptAcceptance, ...]
    acceptance: tuple[AcceptanceSummary, ...]
    greedy_identical_share: dict[str, dict[str, float]] = Field(
        description="candidate -> dtype -> share of answers identical to no speculation."
    )
    train_domains: tuple[str, ...]
    machine: str
    versions: dict[str, str]
    elapsed_s: float


class MeasuredGain(Record):
    """Speed at one K and concurrency: the geometric mean over the domains that count."""

    num_speculative_tokens: int
    concurrency: int
    output_tokens_per_second: float
    ratio: float | None = Field(description="Over no speculation; None: that was not measured.")


class MeasuredSchedule(Record):
    """A batch-size schedule that was measured."""

    schedule: BatchSizeSchedule
    gains: tuple[MeasuredGain, ...] = Field(description="One a concurrency; K is the schedule's largest.")


class ServingAdvice(Record):
    """How to serve a drafter, and what that rests on. Made by `drafter/serving_advice.py` alone."""

    expected_concurrency: int = Field(description="Requests in flight that K is chosen for.")
    num_speculative_tokens: int | None = Field(
        description="K with the most output tokens/s there; None: no K was measured."
    )
    speculate_up_to_concurrency: int | None = Field(
        description="Highest measured concurrency at which that K is clearly faster than no speculation, and at "
        "no lower one clearly slower. None: at all measured ones; 0: at none."
    )
    schedule: BatchSizeSchedule = Field(
        default=(),
        description="vLLM's num_speculative_tokens_per_batch_size, where it measured better than K alone; empty: "
        "serve with K alone.",
    )
    sentence: str = Field(description="All of this in words.")
    measured: tuple[MeasuredGain, ...] = Field(description="Every K at every concurrency.")
    scheduled: tuple[MeasuredSchedule, ...] = Field(
        default=(), description="Every schedule that was measured."
    )
    vllm_version: str = Field(default="", description="Version of vLLM that measured.")


class ReleaseDecision(Record):
    """What the gate decided and why, and how to serve what it judged."""

    outcome: Literal["approve", "reject", "not_enough_evidence"]
    reasons: tuple[str, ...]
    num_speculative_tokens: int | None = Field(
        default=None, description="K that was judged: the advice's; None: no speed at that concurrency."
    )
    advice: ServingAdvice | None = Field(default=None, description="How to serve it; None: not decided yet.")

    @property
    def approved(self) -> bool:
        return self.outcome == "approve"
