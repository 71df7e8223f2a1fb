"""What a drafter would guess, for many starts of one answer at once, without a server.

Shapes: T tokens, S starts, K depths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.chains import Chains
from drafter.model import Drafter
from drafter.packing import PackedBatch
from drafter.two_stream import StepOptions, placeholder_stream, real_stream
from drafter.unrolled import Unrolling


@torch.no_grad()
def draft_answers(
    drafter: Drafter,
    input_ids: Tensor,
    auxiliary: Tensor,
    starts: Tensor,
    num_depths: int,
    options: StepOptions,
) -> Tensor:
    """Greedy guesses after each start, as a server drafts them: in one parallel pass, or in turn (EAGLE-3).

    Args:
        input_ids: [T] int64.
        auxiliary: [T, 3H] the target's states.
        starts: [S] ascending slots; slot s has read t[s+1], so s <= T - 2.
        num_depths: K, guesses per start.

    Returns:
        [S, K] int64 target ids; column j of row s guesses t[s+2+j].
    """
    device = drafter.device
    num_slots = len(input_ids) - 1
    batch = PackedBatch(
        input_ids=input_ids[1:].to(device),
        predicted_ids=input_ids[1:].to(device),  # unknown for the last slot, and not read here
        supervised=torch.zeros(num_slots, dtype=torch.bool, device=device),
        auxiliary=auxiliary[:-1].to(device),
        final=auxiliary[:-1, :0].to(device),
        positions=torch.arange(num_slots, device=device),
        offsets=(0, num_slots),
    )
    stores, hidden, state = real_stream(drafter, batch, options, starts.to(device))
    head = drafter.compute_weights(options.dtype).of(drafter.lm_head.weight)
    best = (hidden @ head.t()).argmax(-1, keepdim=True)
    if num_depths == 1:
        return drafter.draft_ids[best]
    chains = Chains(starts.cpu(), torch.full((len(starts),), num_depths - 1), num_depths)
    first, pieces = batch.document_starts(), []
    unrolling = Unrolling(drafter, options, stores[0], batch.positions, first)
    for number, segment in enumerate(chains.segments(options.chains_per_segment)):
        if drafter.config.algorithm == "eagle3":
            rows = slice(number * options.chains_per_segment, (number + 1) * options.chains_per_segment)
            pieces.append(_guess_in_turn(unrolling, segment, state[rows], best[rows], head))
        else:
            output = placeholder_stream(drafter, first, batch.positions, segment, stores, options)
            pieces.append((output @ head.t()).argmax(-1).view(segment.num_chains, -1))
    return drafter.draft_ids[torch.cat([best, torch.cat(pieces)], dim=1)]


def _guess_in_turn(unrolling: Unrolling, chains: Chains, state: Tensor, best: Tensor, head: Tensor) -> Tensor:
    """Guesses 2..K of chains of one length, [C, K-1] draft ids; each reads the one before it.

    Args:
        state: [C, H] the anchors' sums before the last norm.
        best: [C, 1] the first guesses, draft ids.
    """
    guesses = [best[:, 0]]
    for step in unrolling.steps(chains, state, lambda *_: unrolling.drafter.draft_ids[guesses[-1]]):
        guesses.append((step.hidden @ head.t()).argmax(-1))
    return torch.stack(guesses[1:], dim=1)
