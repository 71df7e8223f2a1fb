"""Every algorithm default of Fledge, once. No torch here: flows and command lines read it too.

Each model is one verb of `python -m drafter`; pydantic turns its fields into flags, the run form of
the Prefect UI shows the same descriptions. Units are in the names (`_s`, `_tokens`, `_gb`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from drafter.machine import NumberFormat, resolve_number_format

Algorithm = Literal["peagle", "eagle3"]
_Format = TypeVar("_Format")
# `auto` becomes this machine's own when the settings are made, so that digests and records say what was computed.
Native = Annotated[_Format, AfterValidator(resolve_number_format)]


class Settings(BaseModel):
    """Frozen, and strict about unknown names: a typo is an error, not a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class RedactionSettings(Settings):
    """Personal data that is taken out of every turn before anything is written."""

    kinds: tuple[Literal["email", "phone", "card", "ip_address"], ...] = Field(
        default=("email", "phone", "card"),
        description="What is replaced by a word in brackets. What has no fixed form, such as a name, is not found.",
    )
    phone_regions: tuple[Annotated[str, Field(pattern=r"^[A-Z]{2}$")], ...] = Field(
        default=("US",),
        description="Countries (ISO 3166) whose phone numbers are found without a country code too.",
    )
    custom: tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...] = Field(
        default=(),
        description="Functions of your own (package.module:function, text to text); each must also be named in "
        "the environment variable FLEDGE_CUSTOM_REDACTORS where `prepare` runs.",
    )


class SourceSettings(Settings):
    """One place that conversations come from."""

    uri: str = Field(
        description="Local path or fsspec URI (s3://...) of a .jsonl, .json or .parquet file, or a folder of them: "
        "OpenAI messages, ShareGPT, or what a SageMaker endpoint captured."
    )
    domain: str = Field(
        default="default",
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Name under which results of these conversations are reported.",
    )
    use: Literal["split", "train", "evaluation"] = Field(
        default="split",
        description="`split` holds a share out for evaluation; `train` and `evaluation` use all of it for one side.",
    )
    redaction: RedactionSettings | None = Field(
        default=None,
        description="Personal data to take out. None: e-mail addresses, phone and card numbers of captured "
        "traffic, nothing of other files.",
    )


class PrepareSettings(Settings):
    """Read conversations, drop exact duplicates, split off an evaluation set that shares no prompt with training."""

    sources: tuple[SourceSettings, ...] = Field(min_length=1, description="Where conversations come from.")
    target: Path = Field(
        description="Directory of the target model in Hugging Face format (its tokenizer and chat template count tokens)."
    )
    output: Path = Field(description="Directory to write the dataset to.")
    evaluation_share: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the prompts of `split` sources held out for evaluation.",
    )
    max_evaluation_conversations: int = Field(
        default=200, ge=0, description="Cap on held-out conversations per domain; the rest trains."
    )
    max_length_tokens: int = Field(
        default=2048,
        ge=8,
        description="Longer conversations are truncated (ids and mask together) and counted. Limited by the target's positions.",
    )
    on_problem: Literal["stop", "drop"] = Field(
        default="stop",
        description="What a malformed conversation does: `stop` refuses the dataset naming the line; `drop` leaves it out and counts it.",
    )
    seed: int = Field(default=0, description="Salt of the hash that chooses the held-out prompts.")


class ServerSettings(Settings):
    """How a vLLM server is started on this machine."""

    python: Path = Field(
        default=Path(".venv-vllm/bin/python"),
        description="Python interpreter of the environment that holds vLLM.",
    )
    dtype: Native[NumberFormat] = Field(
        default="auto",
        description="Number format of weights and activations. auto: bfloat16 where this machine multiplies it, "
        "else float32, which is then several times faster.",
    )
    max_model_len_tokens: int | None = Field(
        default=None, ge=16, description="Longest sequence the server accepts; None: the model's own limit."
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Most sequences computed in one step.")
    kv_cache_gb: float = Field(
        default=1.0, gt=0, description="KV cache on CPU, GiB (VLLM_CPU_KVCACHE_SPACE)."
    )
    compile: bool = Field(
        default=False,
        description="Let vLLM compile the model: 1.15 to 1.3 times the tokens/s on two cores, and about two minutes "
        "more to start. For servers that live long. On a CPU it needs a C++ compiler.",
    )
    start_timeout_s: float = Field(
        default=900.0,
        gt=0,
        description="How long the server may take until it answers /health; one that dies is noticed at once.",
    )
    port: int | None = Field(
        default=None, ge=1, le=65535, description="Port on 127.0.0.1; None takes a free one."
    )


class ExtractSettings(Settings):
    """Regenerate answers with the target and write its hidden states, in one pass through vLLM."""

    dataset: Path = Field(description="Directory that `prepare` wrote.")
    target: Path = Field(description="Directory of the target model.")
    output: Path = Field(description="Directory to write hidden-state shards and their manifest to.")
    split: Literal["train", "evaluation"] = Field(default="train", description="Which side of the dataset.")
    evaluation_output: Path | None = Field(
        default=None,
        description="With split=train: take the evaluation side through the same server, into this directory.",
    )
    answers: Literal["regenerate", "given"] = Field(
        default="regenerate",
        description="`regenerate`: the target writes the assistant turns (on-policy, what it will be asked to verify). `given`: keep the data's own.",
    )
    extractor: Literal["vllm", "transformers"] = Field(
        default="vllm", description="`transformers` is the slow reference."
    )
    temperature: float = Field(
        default=0.0, ge=0, le=2, description="Sampling temperature of regenerated answers; 0 is greedy."
    )
    max_answer_tokens: int = Field(default=224, ge=1, description="Most tokens of one regenerated answer.")
    max_length_tokens: int = Field(
        default=2048, ge=8, description="Longer sequences are cut, ids and mask together."
    )
    max_conversations: int | None = Field(
        default=None, ge=1, description="Use only the first so many (by id); None: all."
    )
    conversations_per_shard: int = Field(
        default=128, ge=1, description="A killed run repeats at most one shard."
    )
    num_servers: int = Field(
        default=1,
        ge=1,
        description="vLLM servers side by side, each with a GPU, or a share of the CPU's cores, and a KV cache of its own.",
    )
    concurrency: int = Field(default=96, ge=1, description="Requests in flight at each server.")
    auxiliary_layers: tuple[int, int, int] | None = Field(
        default=None, description="Layer ids i whose *entering* states are read; None: (2, L/2, L-3)."
    )
    seed: int = Field(default=0, description="Seed of sampled answers.")
    server: ServerSettings = Field(
        default_factory=ServerSettings, description="The vLLM server that writes the states."
    )

    @model_validator(mode="after")
    def _sides_differ(self) -> Self:
        if self.evaluation_output is not None and self.split != "train":
            raise ValueError("evaluation_output is for split=train; with split=evaluation use output")
        return self

    @property
    def sides(self) -> tuple[ExtractSettings, ...]:
        """One settings object for each side of the dataset that is asked for."""
        own = self.model_copy(update={"evaluation_output": None})
        if self.evaluation_output is None:
            return (own,)
        other = {"split": "evaluation", "output": self.evaluation_output}
        return own, own.model_copy(update=other)


class DrafterSettings(Settings):
    """Shape of the drafter."""

    num_layers: int = Field(
        default=2,
        ge=1,
        le=4,
        description="Transformer layers. More accept more and cost more (P-EAGLE table 4: 1, 2, 4 layers 2.69, 3.58, 3.92 on HumanEval).",
    )
    draft_vocab_size: int = Field(
        default=8192,
        ge=16,
        description="Most frequent target tokens that the drafter can propose; clipped to the target's vocabulary.",
    )
    norm_before_residual: bool = Field(
        default=False, description="vLLM's switch of the same name for layer 0."
    )
    train_embedding: bool = Field(
        default=False,
        description="Learn an own token embedding (+5 % in the paper, one vocabulary x hidden matrix more); else the target's is shared.",
    )
    init_from_target: bool = Field(
        default=True,
        description="Start head, norms and, where shapes agree, layers from the target's weights.",
    )


class TrainSettings(Settings):
    """Train a drafter with exact gradients in bounded memory."""

    algorithm: Algorithm = Field(
        default="peagle",
        description="`peagle` guesses K tokens in one pass (arXiv 2602.01469). `eagle3` guesses one after the "
        "other with one layer (arXiv 2503.01840): what P-EAGLE is compared with.",
    )

    states: Path = Field(description="Directory of hidden-state shards of the training split.")
    target: Path = Field(description="Directory of the target model.")
    output: Path = Field(
        description="Directory of this training: metrics.jsonl, checkpoints, the final weights."
    )
    drafter: DrafterSettings = Field(default_factory=DrafterSettings, description="Shape of the drafter.")
    warm_start: Path | None = Field(
        default=None, description="Exported drafter to continue from; its draft vocabulary is kept."
    )
    num_depths: int = Field(
        default=8,
        ge=1,
        le=32,
        description="K of training: depths 0..K-1 are predicted. Train deeper than you serve (paper: K=8 for 5).",
    )
    retention: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="COD: share of chains that go one depth deeper (paper: 0.8; arXiv 2504.18583). With `eagle3` "
        "0.8 weighs the steps as its authors do, on average.",
    )
    retention_floor: float = Field(
        default=0.0, ge=0, le=1, description="COD: smallest share of anchors kept at any depth."
    )
    max_length_tokens: int = Field(
        default=2048, ge=8, description="Tokens packed into one sequence. Documents longer than this are cut."
    )
    sequences_per_step: int = Field(
        default=1, ge=1, description="Packed sequences whose gradients are summed before an optimizer step."
    )
    num_epochs: float = Field(default=3.0, gt=0, description="Passes over the data.")
    time_budget_s: float | None = Field(
        default=None,
        gt=0,
        description="Stop after so many seconds of training (the schedule decays over it); None: by epochs only.",
    )
    peak_learning_rate: float = Field(
        default=1e-3, gt=0, description="AdamW's peak learning rate (the paper uses 1e-4 at its scale)."
    )
    warmup_share: float = Field(
        default=0.0025, ge=0, lt=1, description="Share of the steps that warm up linearly (paper: 0.0025)."
    )
    decay: Literal["linear", "cosine"] = Field(default="linear", description="Shape of the decay to 0.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW betas.")
    max_gradient_norm: float = Field(default=1.0, gt=0, description="Gradient clipping.")
    dtype: Native[Literal["auto", "bfloat16", "float32"]] = Field(
        default="auto",
        description="Computation; master weights are float32 in any case. auto: bfloat16 where this machine "
        "multiplies it, else float32.",
    )
    memory_budget_gb: float | None = Field(
        default=None,
        gt=0,
        description="Memory that training may take in all, GiB (of the GPU where there is one); the step is cut "
        "up to fit. None: most of what is free when it starts.",
    )
    chains_per_segment: int | None = Field(
        default=None,
        ge=1,
        description="Chains whose placeholders are in memory at once; None: by the memory budget.",
    )
    rows_per_chunk: int | None = Field(
        default=None, ge=1, description="Rows of logits in memory at once; None: by the memory budget."
    )
    checkpoint_interval_s: float = Field(
        default=60.0, gt=0, description="Seconds between resumable checkpoints."
    )
    num_ranks: int = Field(
        default=1,
        ge=1,
        description="Processes of this machine that train together, each with a GPU, or a share of the CPU's cores, "
        "of its own. It is the same training. Under torchrun its number counts.",
    )
    distributed: Literal["ddp", "fsdp2"] = Field(
        default="ddp",
        description="With several processes: `ddp` keeps drafter and optimizer whole in each, `fsdp2` "
        "a share of them in each. The training is the same.",
    )
    device: str = Field(
        default="auto",
        description="`auto`, `cpu`, `cuda`, `cuda:1`. Of several processes each takes the GPU of its number.",
    )
    seed: int = Field(default=0, description="Seed of initialisation, order and chains.")

    @field_validator("drafter", mode="before")
    @classmethod
    def _one_layer_unless_said(cls, shape: Any, others: ValidationInfo) -> Any:
        """EAGLE-3 has one layer; the default of `num_layers` is P-EAGLE's."""
        if others.data.get("algorithm") != "eagle3":
            return shape
        said = shape.model_dump(exclude_unset=True) if isinstance(shape, DrafterSettings) else shape
        return {"num_layers": 1, **said} if isinstance(said, dict) else said

    @field_validator("drafter")
    @classmethod
    def _check_layers(cls, shape: DrafterSettings, others: ValidationInfo) -> DrafterSettings:
        if others.data.get("algorithm") == "eagle3" and shape.num_layers != 1:
            raise ValueError(f"EAGLE-3 has one layer, not {shape.num_layers}: leave num_layers out")
        return shape


class ExportSettings(Settings):
    """Write the directory that vLLM loads, with provenance.json."""

    training: Path = Field(description="Directory that `train` wrote.")
    target: Path = Field(description="Directory of the target model.")
    output: Path = Field(description="Directory of the drafter.")


class PreflightSettings(Settings):
    """Say what is wrong with a drafter before a server is started with it."""

    drafter: Path = Field(description="Exported drafter.")
    target: Path = Field(description="Directory of the target model.")


class EstimateSettings(Settings):
    """The trainer's own estimate of the acceptance length: walk each answer as decoding does."""

    drafter: Path = Field(description="Exported drafter.")
    states: Path = Field(description="Directory of hidden-state shards, usually of the evaluation split.")
    target: Path = Field(description="Directory of the target model.")
    num_speculative_tokens: Annotated[int, Field(ge=1, le=32)] = Field(default=5, description="K.")
    output: Path | None = Field(default=None, description="JSON file to write; None prints only.")


class CandidateSettings(Settings):
    """A drafter to measure."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="`challenger`, `champion`, or any name.")
    path: Path = Field(description="Exported drafter.")
    speculation: Algorithm = Field(
        default="peagle",
        description="`peagle` drafts in parallel, `eagle3` token by token; as the drafter was trained.",
    )


class EvaluateSettings(Settings):
    """Measure drafters inside vLLM, against serving without one."""

    dataset: Path = Field(description="Directory that `prepare` wrote; its evaluation split is used.")
    target: Path = Field(description="Directory of the target model.")
    output: Path = Field(
        description="Directory for cells, answers and evaluation.json. Finished cells are not measured again."
    )
    candidates: tuple[CandidateSettings, ...] = Field(
        default=(), description="Drafters; no speculation is always measured too."
    )
    num_speculative_tokens: tuple[int, ...] = Field(default=(3, 5), min_length=1, description="Values of K.")
    concurrency: tuple[int, ...] = Field(default=(1, 4, 16), min_length=1, description="Requests in flight.")
    max_answer_tokens: int = Field(default=128, ge=1, description="Tokens of one answer.")
    prompts_per_domain: int = Field(
        default=24,
        ge=1,
        description="Held-out prompts per domain whose acceptance is measured one by one (bootstrap).",
    )
    requests_per_concurrency: int = Field(
        default=8,
        ge=1,
        description="Requests of a speed measurement are this times sqrt(concurrency), at least the concurrency.",
    )
    full_grid_domains: tuple[str, ...] = Field(
        default=(),
        description="Domains whose speed is measured at every concurrency; the others only at the lowest, which "
        "says what an unseen domain costs and saves half the time. Empty: the domains that trained.",
    )
    length_buckets_tokens: tuple[int, ...] = Field(
        default=(256, 1024, 4096), description="Upper edges of context-length buckets (prompt + answer)."
    )
    measure_schedule: bool = Field(
        default=True,
        description="Where the drafter pays under little load and costs under more, measure one more server: one "
        "that changes over by itself (vLLM's num_speculative_tokens_per_batch_size).",
    )
    temperature: float = Field(default=0.0, ge=0, le=2, description="0 is greedy.")
    identity_dtypes: tuple[Literal["auto", "bfloat16", "float32"], ...] = Field(
        default=("auto", "float32"),
        description="Number formats in which greedy output with and without the drafter is compared; float32 proves "
        "it. auto: the one that this machine multiplies.",
    )
    identity_prompts: int = Field(default=8, ge=1, description="Prompts of the float32 comparison.")
    server: ServerSettings = Field(default_factory=ServerSettings, description="How servers are started.")
    servers_at_once: int = Field(
        default=1,
        ge=1,
        description="Servers that are up together. Their measurements take turns, so that a machine whose speed "
        "drifts favours none. A start keeps one core busy for most of a minute, so 2 also saves time on a CPU; "
        "leave 1 where one server takes all memory, as on a GPU.",
    )
    seed: int = Field(default=0, description="Seed of the choice of prompts and of the bootstrap.")

    @field_validator("identity_dtypes")
    @classmethod
    def _each_format_once(cls, names: tuple[NumberFormat, ...]) -> tuple[NumberFormat, ...]:
        """On a machine without bfloat16, `auto` and float32 are one."""
        return tuple(dict.fromkeys(resolve_number_format(name) for name in names))

    @model_validator(mode="after")
    def _one_port_serves_one(self) -> Self:
        if self.servers_at_once > 1 and self.server.port is not None:
            raise ValueError(
                f"servers_at_once is {self.servers_at_once}, but server.port gives all the same port "
                f"{self.server.port}; leave the port empty, or start one server at a time"
            )
        return self


class GateThresholds(Settings):
    """What a challenger must show. Lower bounds are of the bootstrap interval over prompts."""

    min_acceptance_length: float = Field(
        default=1.5, ge=1, description="Absolute floor of AL on each gated domain."
    )
    min_speedup: float = Field(
        default=1.05,
        gt=0,
        description="Floor of output tokens/s over no speculation at the expected concurrency, at the best K.",
    )
    expected_concurrency: int = Field(
        default=1,
        ge=1,
        description="Requests that you expect in flight at once: K is chosen for that many, and the speed floor "
        "holds there. Has to be among the concurrencies that are measured.",
    )
    non_inferiority_margin: float = Field(
        default=0.05,
        ge=0,
        description="AL that a challenger may lose to the champion, per domain and length bucket.",
    )
    min_prompts: int = Field(
        default=12, ge=2, description="Fewer prompts in a domain are not enough evidence."
    )
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="Of the bootstrap interval.")
    gated_domains: tuple[str, ...] = Field(
        default=(), description="Domains that floors and comparison hold for; empty: those that trained."
    )
    require_identical_float32: bool = Field(
        default=True, description="Reject when float32 greedy output differs with the drafter."
    )


class DecideSettings(Settings):
    """Judge a candidate by what was measured."""

    evaluation: Path = Field(description="Directory that `evaluate` wrote.")
    candidate: str = Field(default="challenger", description="Name of the candidate to judge.")
    champion: str | None = Field(
        default=None, description="Name of the candidate to compare with; None: absolute floors only."
    )
    thresholds: GateThresholds = Field(
        default_factory=GateThresholds, description="What the candidate must show."
    )
    output: Path | None = Field(
        default=None, description="JSON file to write; None: decision.json beside evaluation.json."
    )


class ReportSettings(Settings):
    """Write what was measured and decided as one HTML page."""

    evaluation: Path = Field(
        description="Directory that `evaluate` wrote; `decide` has put its decision.json there."
    )
    training: Path | None = Field(
        default=None, description="Directory that `train` wrote, for the loss curve."
    )
    drafter: Path | None = Field(default=None, description="Exported drafter, for its provenance.")
    output: Path | None = Field(
        default=None, description="HTML file to write; None: report.html beside evaluation.json."
    )
