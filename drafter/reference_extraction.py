"""Hidden states from transformers: slow, plain, and what the states of vLLM are held against.

T tokens, H the target's hidden size. States are those entering each layer; after the last layer, before the norm.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drafter.answering import Answer
from drafter.config import ExtractSettings
from drafter.errors import CheckpointError
from drafter.target import Target


class ReferenceExtractor:
    """An extractor that computes in this process, one conversation at a time.

    Args:
        model: the target, as transformers loads it.
        layers: layer ids whose entering states are written; the number of layers means the last output.
    """

    def __init__(
        self, model: Any, layers: Sequence[int], spool: Path, temperature: float, end_ids: frozenset[int]
    ) -> None:
        self._model = model
        self._text_model = model.get_decoder()  # of models that also see images, the part that reads tokens
        self._layers = tuple(layers)
        self._spool = spool
        self._temperature = temperature
        self._end_ids = end_ids
        self._before_norm: torch.Tensor | None = None
        self._text_model.norm.register_forward_pre_hook(self._keep_before_norm)

    async def answer(self, prompt: tuple[int, ...], max_tokens: int, seed: int, keep_states: bool) -> Answer:
        """Decode token by token, then read prompt and answer once more for the states."""
        ids = self._generate(prompt, max_tokens, torch.Generator().manual_seed(seed))
        states = await self.states(prompt + ids[:-1]) if keep_states else None
        return Answer(ids, ids[-1] in self._end_ids, states)

    async def states(self, ids: tuple[int, ...]) -> Path:
        """One forward pass over given tokens."""
        path = self._spool / f"{uuid.uuid4().hex}.safetensors"
        states = self.hidden_states(torch.tensor(ids)).to(torch.bfloat16)
        save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(ids)}, path)
        return path

    @torch.no_grad()
    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        """States [T, layers, H] of tokens [T], in the model's number format."""
        entering = self._text_model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
        assert self._before_norm is not None
        # The last entry of transformers is after the norm, so the hook's stands in for it.
        states = [*entering[:-1], self._before_norm]
        return torch.stack([states[layer][0] for layer in self._layers], dim=1)

    @torch.no_grad()
    def _generate(
        self, prompt: tuple[int, ...], max_tokens: int, generator: torch.Generator
    ) -> tuple[int, ...]:
        answer: list[int] = []
        inputs, cache = torch.tensor([prompt]), None
        while len(answer) < max_tokens and not (answer and answer[-1] in self._end_ids):
            output = self._model(inputs, past_key_values=cache, use_cache=True)
            logits, cache = output.logits[0, -1].float(), output.past_key_values
            if self._temperature > 0:
                probabilities = torch.softmax(logits / self._temperature, dim=-1)
                answer.append(int(torch.multinomial(probabilities, 1, generator=generator)))
            else:
                answer.append(int(logits.argmax()))
            inputs = torch.tensor([answer[-1:]])
        return tuple(answer)

    def _keep_before_norm(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._before_norm = inputs[0]


@asynccontextmanager
async def load_reference(
    settings: ExtractSettings, target: Target, layers: Sequence[int], spool: Path
) -> AsyncIterator[ReferenceExtractor]:
    """Load the target into this process for as long as the block lasts.

    Raises:
        CheckpointError: weights that transformers cannot read without packages that are not here.
    """
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, settings.server.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target.path, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    except ImportError as error:  # quantised ones ask for a package each
        raise CheckpointError(
            f"transformers cannot load {target.path}: {error}",
            "a target in float weights for this extractor",
            "extract with --extractor vllm, which computes the quantised model itself",
        ) from None
    yield ReferenceExtractor(model.eval(), layers, spool, settings.temperature, target.eos_token_ids)
