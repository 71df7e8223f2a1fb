"""One training step on one rank and on several: what dividing its documents brings, and what exchanging costs.

    python -m benchmarks.distributed_step                  # 2 ranks against 1, one thread each: some minutes
    python -m benchmarks.distributed_step --quick --json   # smaller; the last line is JSON
    python -m benchmarks.distributed_step --ranks 1 4 --threads 4 --num-tokens 16384

The same head as in `benchmarks.training_step` trains on one step of random documents of mixed lengths, optimizer
included, under torchrun: with ddp, and with fsdp2. A rank's threads are as many in every row, so that the ratio
says what more ranks bring, not what more threads would. On one machine they share its memory's bandwidth, and
gradients go through its loopback: several machines or GPUs have other ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.training_step import CONFIG, FLOOR, NUM_DEPTHS, RETENTION, Workload, machine
from drafter.config import TrainSettings
from drafter.device import peak_memory_gb
from drafter.distributed import Ranks, joined
from drafter.machine import native_number_format
from drafter.memory_budget import fit_step
from drafter.optimization import Optimizer
from drafter.packing import Outline, PackedBatch, pack_documents
from drafter.sampler import PackedSequence
from drafter.shards import Document
from drafter.step_gradients import StepGradients
from drafter.step_work import StepLoader, divide

_SHARES = (0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05)  # of a step's tokens: its documents


@dataclass(frozen=True)
class RandomDocuments:
    """Stands in for `TrainingData`: documents of given lengths, every token supervised."""

    lengths: tuple[int, ...]
    dtype: torch.dtype

    def outline(self, documents: tuple[int, ...]) -> Outline:
        return Outline.of_masks([torch.ones(self.lengths[number], dtype=torch.bool) for number in documents])

    def batch(self, documents: list[int]) -> PackedBatch:
        return pack_documents([self._document(number) for number in documents])

    def _document(self, number: int) -> Document:
        length, size = self.lengths[number], CONFIG.hidden_size
        generator = torch.Generator().manual_seed(number)
        return Document(
            id=str(number),
            domain="random",
            input_ids=torch.randint(0, CONFIG.mask_token_id or 1, (length,), generator=generator),
            loss_mask=torch.ones(length, dtype=torch.bool),
            auxiliary=torch.randn(length, 3 * size, generator=generator).to(self.dtype),
            final=torch.randn(length, size, generator=generator).to(self.dtype),
        )


def measure(options: argparse.Namespace, ranks: Ranks) -> dict[str, object]:
    """Steps of this rank among `ranks`: one to warm up, then the measured ones."""
    dtype = getattr(torch, options.dtype)
    where = Path("unused")
    settings = TrainSettings(
        states=where,
        target=where,
        output=where,
        num_depths=NUM_DEPTHS,
        retention=RETENTION,
        retention_floor=FLOOR,
        max_length_tokens=options.num_tokens,
    )
    head = Workload.make(16, dtype, ranks.device)
    ranks.place(head.drafter)
    optimizer = Optimizer(head.drafter, settings)
    cut = fit_step(CONFIG, options.num_tokens, NUM_DEPTHS, dtype, ranks.device, None, ranks.num_local)
    gradients = StepGradients(head.drafter, head.teacher, settings, cut, ranks)
    data = RandomDocuments(tuple(int(share * options.num_tokens) for share in _SHARES), dtype)
    loader = StepLoader(data, CONFIG, settings, ranks.rank, ranks.size)  # type: ignore[arg-type]
    work = loader.load([PackedSequence(0, 0, tuple(range(len(_SHARES))))])
    generator = torch.Generator().manual_seed(0)
    seconds, losses = [], []
    for _ in range(1 + options.repeats):
        ranks.wait()
        started_at = time.perf_counter()
        result = gradients.of(work, generator)
        optimizer.step(1e-4)
        (step_s,) = ranks.largest(time.perf_counter() - started_at)
        seconds.append(step_s)
        losses.append(float(result.loss_sum) / int(result.supervised.sum()))
    costs = list(loader.costs(work.outlines[0]))
    loads = [sum(costs[number] for number in share) for share in divide(costs, ranks.size)]
    return {
        "num_ranks": ranks.size,
        "distributed": options.distributed if ranks.size > 1 else None,
        "tokens_per_s": work.num_slots / statistics.median(seconds[1:]),
        "step_s": seconds[1:],
        "loss": losses[0],
        "largest_share": max(loads) / sum(loads),
        "peak_memory_gb": peak_memory_gb(ranks.device),
        "gradient_mb": sum(4 * p.numel() for p in head.drafter.trained_parameters()) / 1e6,
    }


def run(num_ranks: int, distributed: str, options: argparse.Namespace) -> dict[str, object]:
    """Measure under torchrun; what its first rank found."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "benchmarks.distributed_step", "--measure", "--distributed", distributed]
    command += ["--num-tokens", str(options.num_tokens), "--repeats", str(options.repeats)]
    command += ["--dtype", options.dtype, "--device", options.device]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE"},
    )
    if done.returncode != 0:
        raise SystemExit(f"{num_ranks} ranks, {distributed}: exit code {done.returncode}\n{done.stderr}")
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace) -> dict[str, object]:
    """One rank, then the others in both ways."""
    alone = run(1, "ddp", options)
    results = [alone]
    for num_ranks in (number for number in options.ranks if number > 1):
        results += [run(num_ranks, distributed, options) for distributed in ("ddp", "fsdp2")]
    for result in results:
        result["ratio"] = float(str(result["tokens_per_s"])) / float(str(alone["tokens_per_s"]))
    return {
        "num_tokens": options.num_tokens,
        "num_threads": options.threads,
        "num_cores": len(os.sched_getaffinity(0)),
        "dtype": options.dtype,
        "repeats": options.repeats,
        "results": results,
        "machine": machine(options.device),
        "torch": torch.__version__,
    }


def print_table(found: dict[str, object], results: list[dict[str, object]]) -> None:
    print(f"{'ranks':>5} {'how':<6} {'tokens/s':>9} {'ratio':>6} {'largest share':>14} {'peak GiB':>9}")
    for result in results:
        print(
            f"{result['num_ranks']:>5} {result['distributed'] or '':<6} {result['tokens_per_s']:9.1f} "
            f"{result['ratio']:6.2f} {result['largest_share']:14.1%} {result['peak_memory_gb']:9.2f}"
        )
    print(
        f"{found['num_tokens']} tokens in {len(_SHARES)} documents, {found['dtype']}, "
        f"{results[0]['gradient_mb']:.0f} MB of gradients; a rank has {found['num_threads']} threads "
        f"of {found['num_cores']} cores"
    )
    print(f"{found['machine']}; torch {found['torch']}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-tokens", type=int, help="of the step; default 4096, with --quick 1024")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks besides one")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps, whose median counts")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=native_number_format())
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: then a GPU for each rank")
    parser.add_argument("--quick", action="store_true", help="1024 tokens")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--distributed", choices=("ddp", "fsdp2"), default="ddp", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.num_tokens = options.num_tokens or (1024 if options.quick else 4096)
    return options


def main() -> None:
    options = parse()
    if options.measure:
        where = Path("unused")
        settings = TrainSettings(
            states=where,
            target=where,
            output=where,
            device=options.device,
            distributed=options.distributed,
        )
        with joined(settings) as ranks:
            found = measure(options, ranks)
            if ranks.is_first:
                print(json.dumps(found))
        return
    found = compare(options)
    results = found["results"]
    assert isinstance(results, list)
    print_table(found, results)
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
