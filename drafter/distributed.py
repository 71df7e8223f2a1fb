"""The processes that train one drafter together: ranks of torchrun or our own, and what they tell each other.

Every rank goes through the same steps and computes the gradients of its share of each (`drafter/step_work.py`).
They meet at four points, in the same order, whether their share is empty or not:

    before a step    fsdp2: the weights' rows come together                        (all-gather)
    after it         gradients are summed: ddp whole, fsdp2 each rank's rows       (all-reduce, reduce-scatter)
                     so are losses and hits; what is decided is decided together   (all-reduce)
    at a checkpoint  fsdp2: weights and moments come together for the first rank   (all-gather)

Gradients are written by hand in part and collected over many segments, so they are summed once, at the end of
a step: not by the hooks of `DistributedDataParallel` or of FSDP's backward, which fire segment by segment.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from drafter.companions import companions, own_rank
from drafter.config import TrainSettings
from drafter.device import choose_device
from drafter.errors import LOST_RANK, FledgeError
from drafter.model import Drafter

# A rank that is alive and silent for so long has failed. Reading states and writing a checkpoint must fit in.
_TIMEOUT = timedelta(minutes=30)
_POLL_S = 0.1


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; by default it is alone, and meets nobody.

    Attributes:
        device: where this rank computes.
        rank, size: its number from 0, of how many.
        num_local: how many of them run on this machine.
        is_sharded: whether each holds only its rows of weights and moments (FSDP2).
        launcher: process id of whoever started it as a rank, torchrun or the first one; 0 if there is none.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    num_local: int = 1
    is_sharded: bool = False
    launcher: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and progress."""
        return self.rank == 0

    @property
    def has_lost_launcher(self) -> bool:
        """Whether the launcher was killed: nobody would end the ranks then but they themselves."""
        return self.launcher != 0 and os.getppid() != self.launcher

    def largest(self, *numbers: float) -> tuple[float, ...]:
        """Of each number the largest that any rank gave: how all ranks decide alike."""
        if self.size == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tuple(tensor.tolist())

    def wait(self) -> None:
        """Until every rank is here."""
        self.largest(0.0)

    def require_same(self, number: float, what: str) -> None:
        """Refuse to go on when ranks differ.

        Raises:
            FledgeError: this rank's number is not that of the others.
        """
        largest, negated = self.largest(number, -number)
        if largest != -negated:
            raise FledgeError(
                f"rank {self.rank} of {self.size}: {what} is {number:.0f}, on another rank it is not",
                "the same settings, states, target and output directory on every rank",
                "start all machines with one command, and keep these directories on a disk that all of them share",
            )

    def summed(self, numbers: Tensor) -> Tensor:
        """Small sums over all ranks, on the CPU in float64."""
        total = numbers.to("cpu", torch.float64)
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def place(self, drafter: Drafter) -> None:
        """Let this rank keep what is its own of the weights. What is frozen stays whole everywhere."""
        if not self.is_sharded:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        frozen = {parameter for parameter in drafter.parameters() if not parameter.requires_grad}
        mesh = init_device_mesh(self.device.type, (self.size,))
        fully_shard(drafter, mesh=mesh, ignored_params=frozen)

    @contextmanager
    def summed_gradients(self, drafter: Drafter) -> Iterator[None]:
        """Whole weights while gradients are computed; afterwards `.grad` is the sum over all ranks.

        A parameter that nothing reached, on this rank or on all, has a gradient of zeros.
        """
        if self.is_sharded:
            _sharded(drafter).unshard()
            # NOTE: a footgun. FSDP fills the same tensors in again without saying so, and the model's copies in
            # the compute type are renewed when a weight's version changes.
            torch.autograd.graph.increment_version(drafter.trained_parameters())
        yield
        gradients = []
        for parameter in drafter.trained_parameters():
            gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        if self.is_sharded:
            _sharded(drafter).reshard()
        for parameter, gradient in zip(drafter.trained_parameters(), gradients, strict=True):
            parameter.grad = self._summed_gradient(gradient.detach(), parameter)

    def _summed_gradient(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        if self.is_sharded:
            from torch.distributed.tensor import DTensor, Partial

            parts = DTensor.from_local(gradient, cast(DTensor, parameter).device_mesh, [Partial()])
            return parts.redistribute(placements=cast(DTensor, parameter).placements)
        if self.size > 1:
            dist.all_reduce(gradient)
        return gradient

    @torch.no_grad()
    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the first rank the tensors with all their rows; on the others nothing. Every rank must call it."""
        found = {}
        for name, tensor in tensors.items():
            full = whole_tensor(tensor)
            if self.is_first:
                found[name] = full.cpu() if self.is_sharded else full
        return found


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor of which each rank may hold a part. Every rank must call it."""
    return cast(Any, tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def placed_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A tensor that every rank has, kept as it keeps `parameter`."""
    tensor = tensor.to(parameter.device)
    if not hasattr(parameter, "full_tensor") or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    like = cast(DTensor, parameter)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


@contextmanager
def joined(settings: TrainSettings) -> Iterator[Ranks]:
    """The ranks that torchrun has started for this training, or that the settings ask for, or this process alone.

    Raises:
        FledgeError: no device for this rank, or another rank has ended before its time.
    """
    if dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        device = choose_device(settings.device, int(os.environ["LOCAL_RANK"]))
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        sharded = settings.distributed == "fsdp2"
        with _joined(
            Ranks(device, rank, size, int(os.environ["LOCAL_WORLD_SIZE"]), sharded, os.getppid())
        ) as ranks:
            yield ranks
    elif dist.is_torchelastic_launched() or settings.num_ranks == 1:
        yield Ranks(choose_device(settings.device))
    else:
        with _joined_here(settings) as ranks:
            yield ranks


@contextmanager
def _joined_here(settings: TrainSettings) -> Iterator[Ranks]:
    """Ranks of this machine that the first of them starts."""
    size, rank = settings.num_ranks, own_rank()
    launcher = os.getppid() if rank else 0
    device = choose_device(settings.device, rank)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # nothing of it is for other machines
    with companions(settings) as (meeting, check):
        store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        store.add("joined", 1)
        # Not left to the process group: it would wait half an hour for a rank that could not even start.
        while rank == 0 and store.add("joined", 0) < size:
            check()
            time.sleep(_POLL_S)
        with _joined(
            Ranks(device, rank, size, size, settings.distributed == "fsdp2", launcher), store
        ) as ranks:
            yield ranks


@contextmanager
def _joined(ranks: Ranks, store: Any = None) -> Iterator[Ranks]:
    """A process group of these ranks while the block lasts; without a store it meets where torchrun says."""
    device = ranks.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # What is decided travels on the CPU, so that no step waits for a GPU to know it.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    where = {} if store is None else {"store": store, "rank": ranks.rank, "world_size": ranks.size}
    try:
        dist.init_process_group(backend, timeout=_TIMEOUT, **where)
        yield ranks
    except RuntimeError as error:
        if not _says_that_a_rank_is_gone(error):
            raise  # and leave without saying goodbye to ranks that may wait for something else
        raise FledgeError(
            f"rank {ranks.rank} of {ranks.size} {LOST_RANK}: {str(error).splitlines()[0]}",
            "every rank to live until the training ends",
            "see above what the rank that ended first said; the same command, with any number of ranks, "
            "continues from the last checkpoint",
        ) from error
    except (SystemExit, KeyboardInterrupt) as asked:  # all ranks together, after a checkpoint
        traceback.clear_frames(asked.__traceback__)
        _leave()
        raise
    _leave()


def _leave() -> None:
    """End the process group while Python lives.

    Gloo's threads hold tensors and end with the last reference to the group. FSDP's objects have some, and refer
    to each other: left to the end of the interpreter, such a thread aborts the process now and then.
    """
    gc.collect()
    dist.destroy_process_group()


def is_first_rank() -> bool:
    """Whether this process speaks for the training."""
    if dist.is_torchelastic_launched():
        return os.environ["RANK"] == "0"
    return own_rank() == 0


def _says_that_a_rank_is_gone(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _sharded(drafter: Drafter) -> Any:
    """The drafter with FSDP's methods, which `fully_shard` has given it."""
    return drafter
