"""One training step: Fledge beside the public `speculators` P-EAGLE model and the flat masked forward.

    python -m benchmarks.training_step --num-tokens 1024 2048 4096 20000
    python -m benchmarks.training_step --num-tokens 4096 --json      # the last line is JSON
    python -m benchmarks.training_step --quick                        # two minutes

All train the same head (4 layers, H = 576, 9 query and 3 key/value heads, draft vocabulary 8192) on the same
random document and the same chains (K = 8, retention 0.7, floor 0.2), optimizer included. Each runs in a
process of its own, one after the other: its peak resident memory is its own, and one that takes too much is
ended before the machine suffers. `speculators` runs as its trainer does: float32 weights under autocast,
scaled-dot-product attention with a dense mask on a CPU, flex attention on a GPU. The flat forward is plain
float32 PyTorch.

The share of the matrix rate is the operations that the mathematics needs, over the time of the step, over
what square products of the same type reach between the steps. Needed are: forward and both backward
products of every weight, attention over visible pairs only (2 products forward, 4 backward), the teacher
once per slot. Whatever is computed twice or masked away counts as nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from drafter.chains import Chains, sample_chains
from drafter.config import TrainSettings
from drafter.device import choose_device, peak_memory_gb
from drafter.loss import TeacherHead
from drafter.machine import native_number_format
from drafter.memory_budget import fit_step
from drafter.model import Drafter, DrafterConfig
from drafter.optimization import Optimizer
from drafter.packing import PackedBatch
from drafter.step_work import operations
from drafter.two_stream import count_supervised, two_stream_step

PEERS = ("fledge", "speculators", "flat")
CONFIG = DrafterConfig(
    hidden_size=576,
    num_layers=4,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    draft_vocab_size=8192,
    rms_norm_eps=1e-5,
    rope={"rope_theta": 100000.0, "rope_type": "default"},
    max_position_embeddings=65536,
    mask_token_id=49151,
    auxiliary_layers=(2, 15, 27),
)
NUM_DEPTHS, RETENTION, FLOOR = 8, 0.7, 0.2
_FLAT_FORWARD = Path(__file__).parents[1] / "tests" / "reference" / "flat_forward.py"
_GIB = 2**30
_SPARE_GB = 1.0  # what a peer leaves to the machine
_SQUARE = 2048  # side of the products that the matrix rate is measured with


@dataclass(frozen=True)
class Workload:
    """What one process trains on."""

    drafter: Drafter
    teacher: TeacherHead
    batch: PackedBatch
    chains: Chains

    @classmethod
    def make(cls, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Workload:
        """One random document of `num_tokens` slots, all supervised; the same numbers in every process."""
        generator = torch.Generator().manual_seed(0)
        size, vocabulary = CONFIG.hidden_size, CONFIG.vocab_size

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

        def ids() -> torch.Tensor:
            return torch.randint(0, CONFIG.mask_token_id, (num_tokens,), generator=generator).to(device)

        draft_ids = torch.arange(CONFIG.draft_vocab_size) * (vocabulary // CONFIG.draft_vocab_size)
        torch.manual_seed(0)
        drafter = Drafter(CONFIG, draft_ids).to(device)
        drafter.embed_tokens.to(dtype)
        with torch.no_grad():
            for parameter in (drafter.mask_embedding, drafter.mask_hidden):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        teacher = TeacherHead(
            torch.ones(size, device=device), normal(CONFIG.draft_vocab_size, size, scale=0.05), 1e-5
        )
        batch = PackedBatch(
            input_ids=ids(),
            predicted_ids=ids(),
            supervised=torch.ones(num_tokens, dtype=torch.bool, device=device),
            auxiliary=normal(num_tokens, 3 * size),
            final=normal(num_tokens, size),
            positions=torch.arange(num_tokens, device=device),
            offsets=(0, num_tokens),
        )
        return cls(drafter, teacher, batch, sample_chains(batch, NUM_DEPTHS, RETENTION, FLOOR, generator))


def needed_operations(config: DrafterConfig, chains: Chains, num_tokens: int) -> float:
    """Floating-point operations of one step over one document whose every slot is supervised."""
    chain, depth = chains.elements()
    pairs = num_tokens * (num_tokens + 1) / 2 + float((chains.anchors[chain] + 1 + depth).sum())
    return operations(config, num_tokens, num_tokens, chains.num_placeholders, pairs)


def measure(peer: str, num_tokens: int, options: argparse.Namespace) -> dict[str, object]:
    """Run one peer in this process: one step to warm up, then the measured ones."""
    device = choose_device(options.device)
    dtype = getattr(torch, options.dtype)
    work = Workload.make(num_tokens, dtype, device)
    step = {"fledge": _fledge_step, "speculators": _speculators_step, "flat": _flat_step}[peer](
        work, dtype, device, options.memory_budget_gb
    )
    if options.warm_up:
        step()
    seconds, rates, losses = [], [], []
    rates.append(matmul_rate(dtype, device))
    for _ in range(options.repeats):
        started_at = time.perf_counter()
        losses.append(step())
        _finish(device)
        seconds.append(time.perf_counter() - started_at)
        rates.append(matmul_rate(dtype, device))
    median_s = statistics.median(seconds)
    rate = statistics.median(rates)
    operations = needed_operations(CONFIG, work.chains, num_tokens)
    return {
        "tokens_per_s": num_tokens / median_s,
        "peak_memory_gb": peak_memory_gb(device),
        "step_s": seconds,
        "loss": losses[0],
        "matmul_gflop_per_s": rate / 1e9,
        "share_of_matmul_rate": operations / median_s / rate,
        "num_placeholders": work.chains.num_placeholders,
        "needed_gflop": operations / 1e9,
    }


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of square products, median of ten."""
    left, right = (torch.randn(_SQUARE, _SQUARE, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(12):
        started_at = time.perf_counter()
        left @ right
        _finish(device)
        seconds.append(time.perf_counter() - started_at)
    return 2.0 * _SQUARE**3 / statistics.median(seconds[2:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fledge_step(
    work: Workload, dtype: torch.dtype, device: torch.device, memory_budget_gb: float | None
) -> Callable[[], float]:
    where = Path("unused")
    settings = TrainSettings(states=where, target=where, output=where)
    optimizer = Optimizer(work.drafter, settings)
    options = fit_step(CONFIG, work.batch.num_slots, NUM_DEPTHS, dtype, device, memory_budget_gb)
    count = float(count_supervised(work.batch, work.chains).sum())

    def step() -> float:
        result = two_stream_step(work.drafter, work.teacher, work.batch, work.chains, options, count)
        optimizer.step(1e-4)
        return float(result.loss_sum) / count

    return step


def _speculators_step(
    work: Workload, dtype: torch.dtype, device: torch.device, memory_budget_gb: float | None
) -> Callable[[], float]:
    from benchmarks.speculators_peer import build_model, forward

    attention = "simple_flex_attention" if device.type == "cuda" else "sdpa"
    model = build_model(work.drafter, work.teacher, attention, train_embedding=False).to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> float:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss, _ = forward(model, work.batch, work.chains)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def _flat_step(
    work: Workload, dtype: torch.dtype, device: torch.device, memory_budget_gb: float | None
) -> Callable[[], float]:
    flat_loss = runpy.run_path(str(_FLAT_FORWARD))["flat_loss"]
    if device.type != "cpu":
        raise SystemExit("the flat forward is written for a CPU")
    state = {name: tensor.detach().clone() for name, tensor in work.drafter.state_dict().items()}
    trained = [
        tensor.float().requires_grad_()
        for name, tensor in state.items()
        if tensor.is_floating_point() and name != "embed_tokens.weight"
    ]
    names = [name for name in state if state[name].is_floating_point() and name != "embed_tokens.weight"]
    weights = {**state, **dict(zip(names, trained, strict=True))}
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> float:
        loss, _, _ = flat_loss(weights, CONFIG, work.teacher, work.batch, work.chains)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def least_memory_gb(peer: str, num_tokens: int, device: torch.device) -> float:
    """A lower bound of what a peer needs, so that a hopeless one is not begun."""
    if peer == "fledge":
        return 0.0
    placeholders = num_tokens * sum(max(RETENTION**depth, FLOOR) for depth in range(1, NUM_DEPTHS))
    elements = num_tokens + placeholders
    # Logits of drafter and target, their float32 copies and gradients.
    logits = 4 * 4 * elements * CONFIG.draft_vocab_size
    if peer == "speculators" and device.type == "cuda":
        return logits / _GIB
    if peer == "speculators":
        return (logits + 3 * elements**2) / _GIB  # the mask, as bool and as numbers
    return (logits + 2 * 4 * CONFIG.num_heads * elements**2) / _GIB  # one layer's scores and probabilities


def available_memory_gb() -> float:
    """What the machine can still give, by its own account."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def run_peer(peer: str, num_tokens: int, options: argparse.Namespace) -> dict[str, object]:
    """A peer's measurement in a process of its own, or {"reason": why there is none}."""
    device = choose_device(options.device)
    least_gb, available_gb = least_memory_gb(peer, num_tokens, device), available_memory_gb() - _SPARE_GB
    if device.type == "cuda":
        available_gb = torch.cuda.get_device_properties(device).total_memory / _GIB
    if least_gb > available_gb:
        return {"reason": f"needs more than {least_gb:.0f} GiB; {available_gb:.0f} GiB are available"}
    command = [sys.executable, "-m", "benchmarks.training_step", "--measure", peer]
    command += ["--num-tokens", str(num_tokens), "--repeats", str(options.repeats)]
    command += ["--device", options.device, "--dtype", options.dtype]
    if options.memory_budget_gb is not None and peer == "fledge":
        command += ["--memory-budget-gb", str(options.memory_budget_gb)]
    if not options.warm_up:
        command += ["--no-warm-up"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        reason = _watch(process, options.timeout_s)
        output, errors = process.communicate()
    if reason is not None:
        return {"reason": reason}
    if process.returncode != 0:
        return {"reason": (errors.strip().splitlines() or [f"ended with {process.returncode}"])[-1][:300]}
    return json.loads(output.splitlines()[-1])


def _watch(process: subprocess.Popen[str], timeout_s: float) -> str | None:
    """Wait for a process; end it when the machine runs short of memory, and say why."""
    deadline = time.monotonic() + timeout_s
    # Should it outrun this watch, the kernel ends it and nothing else.
    Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
    largest_gb = 0.0
    while process.poll() is None:
        largest_gb = max(largest_gb, _resident_gb(process.pid))
        reason = None
        if available_memory_gb() < _SPARE_GB / 2:
            reason = f"ended at {largest_gb:.1f} GiB resident: no more memory on this machine"
        elif time.monotonic() > deadline:
            reason = f"took longer than {timeout_s:.0f} s"
        if reason is not None:
            process.kill()
            return reason
        time.sleep(0.25)
    return None


def _resident_gb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _GIB
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def compare(num_tokens: int, options: argparse.Namespace) -> dict[str, object]:
    """All peers at one length, as the last line of `--json` has them."""
    result: dict[str, object] = {"num_tokens": num_tokens, "dtype": options.dtype, "repeats": options.repeats}
    found = {peer: run_peer(peer, num_tokens, options) for peer in PEERS if peer in options.peers}
    for peer in PEERS:
        measured = found.get(peer, {"reason": "not asked for"})
        result[peer] = None if "reason" in measured else measured
        if "reason" in measured:
            result[f"{peer}_reason"] = measured["reason"]
    fledge = found.get("fledge", {})
    speeds = [found.get(peer, {}).get("tokens_per_s") for peer in ("fledge", "speculators")]
    result["ratio"] = speeds[0] / speeds[1] if all(speeds) else None  # type: ignore[operator]
    for name in ("share_of_matmul_rate", "matmul_gflop_per_s"):
        result[name] = fledge.get(name)
    return {**result, "machine": machine(options.device), "versions": versions()}


def machine(device_name: str) -> str:
    """The processor (or GPU), cores and memory, and how busy they were with other things."""
    device = choose_device(device_name)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    load = os.getloadavg()[0]
    return f"{model or platform.processor()}, {torch.get_num_threads()} threads, {memory_gb:.0f} GiB, load {load:.1f}"


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "speculators")},
    }


def print_table(results: list[dict[str, object]]) -> None:
    print(f"{'tokens':>7} {'peer':<12} {'tokens/s':>9} {'peak GiB':>9} {'share':>6}  ")
    for result in results:
        for peer in PEERS:
            measured = result[peer]
            if isinstance(measured, dict):
                numbers = (
                    f"{measured['tokens_per_s']:9.1f} {measured['peak_memory_gb']:9.2f} "
                    f"{measured['share_of_matmul_rate']:6.1%}"
                )
            else:
                numbers = str(result[f"{peer}_reason"])
            print(f"{result['num_tokens']:>7} {peer:<12} {numbers}")
        if result["ratio"]:
            print(f"{'':>7} fledge / speculators: {result['ratio']:.1f}x")
    rates = [f"{result['matmul_gflop_per_s']:.0f}" for result in results if result["matmul_gflop_per_s"]]
    print(f"matrix products in the same runs: {', '.join(rates)} GFLOP/s ({results[0]['dtype']})")
    print(f"{results[0]['machine']}; {results[0]['versions']}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-tokens", type=int, nargs="+", help="lengths; default 1024 2048 4096")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["fledge", "speculators"])
    parser.add_argument("--repeats", type=int, default=3, help="measured steps, whose median counts")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=native_number_format())
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument("--memory-budget-gb", type=float, help="as the trainer's flag; default: its default")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of one peer at one length")
    parser.add_argument(
        "--no-warm-up", dest="warm_up", action="store_false", help="measure from the first step"
    )
    parser.add_argument("--quick", action="store_true", help="1024 tokens")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--measure", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.num_tokens = options.num_tokens or ([1024] if options.quick else [1024, 2048, 4096])
    return options


def main() -> None:
    options = parse()
    if options.measure:
        print(json.dumps(measure(options.measure, options.num_tokens[0], options)))
        return
    results = [compare(num_tokens, options) for num_tokens in options.num_tokens]
    print_table(results)
    output = results[0] if len(results) == 1 else {"results": results}
    if options.output:
        options.output.write_text(json.dumps(output, indent=2) + "\n")
    if options.json:
        print(json.dumps(output))


if __name__ == "__main__":
    main()
