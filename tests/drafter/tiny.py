"""A tiny target that behaves like a real one: Llama weights, byte-level tokenizer, chat template, states.

Everything is made on the spot in a second: no download, and the states are the model's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafter.config import TrainSettings
from drafter.records import StatesRecord
from drafter.shards import MANIFEST, Document, write_shard
from drafter.target import load_target

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NUM_LAYERS = 6
VOCAB_SIZE = 264  # 256 bytes, three special tokens, five rows without a token
PROMPT_TOKENS = 9
ANSWER_TOKENS = 24


def save_tokenizer(path: Path) -> Any:
    """Write a byte-level tokenizer with a chat template, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return fast


def make_target(path: Path, seed: int = 0, **changes: object) -> Path:
    """Write a random Llama model with tokenizer and chat template; `changes` go into its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fast = save_tokenizer(path)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            "bos_token_id": fast.bos_token_id,
            "eos_token_id": fast.eos_token_id,
            "pad_token_id": fast.pad_token_id,
            **changes,
        }
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path)
    return path


def make_documents(target: Path, num_documents: int, seed: int = 0) -> list[Document]:
    """Random prompts with the target's own greedy answers and its states (in float32)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (num_documents, PROMPT_TOKENS), generator=generator)
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        for _ in range(ANSWER_TOKENS):
            logits = model(ids).logits[:, -1]
            logits[:, 256:] = float("-inf")  # answers of bytes only, so that none ends early
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        hidden = model(ids, output_hidden_states=True).hidden_states
    layers = load_target(target).default_auxiliary_layers
    auxiliary = torch.cat([hidden[layer] for layer in layers], dim=-1)
    mask = torch.arange(ids.shape[1]) >= PROMPT_TOKENS
    return [
        Document(
            id=f"{seed:08x}{index:024x}",
            domain=("code", "chat")[index % 2],
            input_ids=ids[index],
            loss_mask=mask,
            auxiliary=auxiliary[index],
            final=before_norm[-1][index],
        )
        for index in range(num_documents)
    ]


def write_states(path: Path, target: Path, documents: list[Document], **changes: object) -> Path:
    """Write documents as a finished states directory; `changes` go into its manifest."""
    path.mkdir(parents=True, exist_ok=True)
    model = load_target(target)
    metadata = {
        "target_fingerprint": model.fingerprint,
        "auxiliary_layers": str(list(model.default_auxiliary_layers)),
    }
    half = max(len(documents) // 2, 1)
    parts = [part for part in (documents[:half], documents[half:]) if part]
    shards = tuple(write_shard(path, index, part, metadata) for index, part in enumerate(parts))
    record = StatesRecord(
        **{
            "digest": "states-" + path.name,
            "path": str(path),
            "split": "train",
            "dataset_digest": "dataset",
            "target_fingerprint": model.fingerprint,
            "auxiliary_layers": model.default_auxiliary_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "dtype": "bfloat16",
            "shards": shards,
            "num_conversations": len(documents),
            "num_tokens": sum(shard.num_tokens for shard in shards),
            "num_supervised_tokens": sum(shard.num_supervised_tokens for shard in shards),
            "num_truncated": 0,
            "num_skipped": 0,
            "greedy_answers": True,
            "elapsed_s": 1.0,
            "tokens_per_s": 1.0,
            **changes,
        }
    )
    record.save(path / MANIFEST)
    return path


def training_settings(states: Path, target: Path, output: Path, **changes: object) -> TrainSettings:
    """Settings of a training of a few dozen steps in float32; `changes` go on top."""
    values: dict[str, object] = {
        "states": states,
        "target": target,
        "output": output,
        "drafter": {"draft_vocab_size": 200},
        "num_depths": 4,
        "max_length_tokens": 128,
        "num_epochs": 3,
        "peak_learning_rate": 3e-3,
        "dtype": "float32",
        "device": "cpu",
        **changes,
    }
    return TrainSettings.model_validate(values)
