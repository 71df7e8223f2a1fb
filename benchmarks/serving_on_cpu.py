"""Output tokens/s of vLLM on a CPU as it comes, with Fledge's norm kernels, and compiled: one model, in turns.

    python -m benchmarks.serving_on_cpu --target TARGET --dataset DATASET --drafter DRAFTER

All servers are up together and answer the same held-out prompts one server after the other, round by round, so that
a machine whose speed drifts favours none of them. TARGET, DATASET and DRAFTER are what a run left in
`.fledge/stages` (`.fledge/targets` for the demo's target).
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.table import Table

from drafter.benchmark_client import BenchmarkClient, Load
from drafter.command_line import Verb, run_verbs
from drafter.config import CandidateSettings, EvaluateSettings, ServerSettings, Settings
from drafter.held_out import choose_prompts
from drafter.machine import describe_machine
from drafter.measurement import Variant
from drafter.progress import track
from drafter.provenance import versions
from drafter.records import Record
from drafter.serving import VllmServer
from drafter.target import load_target

Way = Literal["vllm", "kernels", "compiled"]

_PLUGINS = "VLLM_PLUGINS"  # vLLM's own variable: the plugins that it loads, all where it is not set
_ALL_BUT_KERNELS = "fledge_sampling_fix,fledge_quick_start"  # neither changes how fast a server computes


class ServingOnCpuSettings(Settings):
    """What to serve, and how often to measure."""

    target: Path = Field(description="Directory of the target model.")
    dataset: Path = Field(description="Directory that `prepare` wrote; its evaluation split is asked.")
    drafter: Path | None = Field(
        default=None, description="Exported P-EAGLE drafter; None: no speculation only."
    )
    num_speculative_tokens: int = Field(default=3, ge=1, description="K.")
    ways: tuple[Way, ...] = Field(
        default=("vllm", "kernels", "compiled"),
        min_length=1,
        description="`vllm`: without our norms. `kernels`: as Fledge serves. `compiled`: with server.compile.",
    )
    concurrency: int = Field(default=1, ge=1, description="Requests in flight.")
    requests: int = Field(default=4, ge=1, description="Requests of one measurement.")
    repeats: int = Field(default=3, ge=1, description="Rounds, whose median counts.")
    max_answer_tokens: int = Field(default=96, ge=1, description="Tokens of one answer.")
    output: Path = Field(
        default=Path(".fledge/benchmarks/serving_on_cpu"), description="Directory of logs and results."
    )
    server: ServerSettings = Field(default_factory=ServerSettings, description="How servers are started.")


class ServedWay(Record):
    """One server's median."""

    way: Way
    num_speculative_tokens: int = Field(description="0: no speculation.")
    output_tokens_per_second: float
    ratio: float = Field(description="To the first way at the same K.")
    acceptance_length: float | None
    start_s: float = Field(description="Seconds until it answered, the servers before it being up.")


class ServingOnCpu(Record):
    """What was measured."""

    cells: tuple[ServedWay, ...]
    repeats: int
    machine: str
    versions: dict[str, str]


def serving_on_cpu(settings: ServingOnCpuSettings) -> ServingOnCpu:
    """Start every server, then measure them in turns."""
    prompts = _prompts(settings)
    servers: dict[tuple[Way, int], VllmServer] = {}
    found: dict[tuple[Way, int], list[dict[str, float]]] = {}
    variants = [Variant(None, 0)]
    if settings.drafter is not None:
        candidate = CandidateSettings(name="drafter", path=settings.drafter)
        variants.append(Variant(candidate, settings.num_speculative_tokens))
    with (
        ExitStack() as stack,
        track((1 + settings.repeats) * len(variants) * len(settings.ways), "measuring", "units") as progress,
        BenchmarkClient(settings.server, settings.output / "benchmarks") as client,
    ):
        for variant in variants:
            for way in settings.ways:
                progress.note(f"starting {way}, {variant.label}")
                server = _server(settings, way, variant)
                stack.callback(server.stop)
                with _plugins_of(way):
                    server.start()
                servers[way, variant.num_speculative_tokens] = server.wait_until_ready()
                progress.advance()
        for repeat in range(settings.repeats):
            for (way, k), server in servers.items():
                progress.note(f"{way}, K={k}")
                load = Load(
                    prompts=prompts,
                    num_warmups=0 if repeat else 1,
                    num_requests=settings.requests,
                    concurrency=settings.concurrency,
                    max_answer_tokens=settings.max_answer_tokens,
                    temperature=0.0,
                    seed=0,
                )
                result = client.measure(server, load, f"{way}-k{k}-{repeat + 1}")
                found.setdefault((way, k), []).append(result)
                progress.advance()
    speeds = {key: statistics.median(one["output_throughput"] for one in runs) for key, runs in found.items()}
    return ServingOnCpu(
        cells=tuple(
            ServedWay(
                way=way,
                num_speculative_tokens=k,
                output_tokens_per_second=speed,
                ratio=speed / speeds[settings.ways[0], k],
                acceptance_length=found[way, k][0].get("spec_decode_acceptance_length"),
                start_s=round(servers[way, k].start_s, 1),
            )
            for (way, k), speed in speeds.items()
        ),
        repeats=settings.repeats,
        machine=describe_machine(),
        versions=versions(settings.server.python),
    )


def _prompts(settings: ServingOnCpuSettings) -> tuple[str, ...]:
    """As an evaluation chooses them, of the last domain by name."""
    evaluation = EvaluateSettings(
        dataset=settings.dataset,
        target=settings.target,
        output=settings.output,
        max_answer_tokens=settings.max_answer_tokens,
        prompts_per_domain=settings.requests,
    )
    window = settings.server.max_model_len_tokens or load_target(settings.target).max_position_embeddings
    by_domain = choose_prompts(evaluation, window)
    return tuple(prompt.text for prompt in by_domain[max(by_domain)])


def _server(settings: ServingOnCpuSettings, way: Way, variant: Variant) -> VllmServer:
    how = settings.server.model_copy(update={"compile": way == "compiled"})
    log = settings.output / "logs" / f"{way}-{variant.label}.log"
    return VllmServer(settings.target, how, log, extra_args=variant.server_arguments())


@contextmanager
def _plugins_of(way: Way) -> Iterator[None]:
    """What a server started in this block loads."""
    before = os.environ.get(_PLUGINS)
    if way == "vllm":
        os.environ[_PLUGINS] = _ALL_BUT_KERNELS
    try:
        yield
    finally:
        os.environ.pop(_PLUGINS, None)
        if before is not None:
            os.environ[_PLUGINS] = before


def show(result: ServingOnCpu) -> None:
    from drafter.terminal_report import make_console

    table = Table(title="output tokens/s", title_justify="left")
    for heading in ("K", "served", "tokens/s", "ratio", "AL", "start, s"):
        table.add_column(heading, justify="left" if heading == "served" else "right")
    for cell in result.cells:
        length = "" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}"
        speed = f"{cell.output_tokens_per_second:.1f}"
        k = str(cell.num_speculative_tokens or "none")
        table.add_row(k, cell.way, speed, f"{cell.ratio:.2f}x", length, f"{cell.start_s:.0f}")
    console = make_console()
    console.print(table)
    told = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    console.print(f"{result.machine}; {told}; medians of {result.repeats}")


def run(settings: ServingOnCpuSettings) -> ServingOnCpu:
    """As `serving_on_cpu`; the result is kept in `result.json`."""
    result = serving_on_cpu(settings)
    result.save(settings.output / "result.json")
    return result


VERB = Verb(
    "benchmarks.serving_on_cpu",
    ServingOnCpuSettings,
    run,
    "Measure vLLM on this machine's CPU as it comes, with Fledge's norm kernels, and compiled.",
    (
        "python -m benchmarks.serving_on_cpu --target .fledge/targets/smollm2-135m-instruct --dataset DATASET",
        "python -m benchmarks.serving_on_cpu --target TARGET --dataset DATASET --drafter DRAFTER --json",
        "python -m benchmarks.serving_on_cpu --target TARGET --dataset DATASET --ways vllm,kernels",
    ),
    show=show,
)


def main() -> int:
    return run_verbs("python -m", "", (VERB,), [VERB.name, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
