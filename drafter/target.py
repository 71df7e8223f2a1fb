"""The target model as a directory: its shape, its fingerprint and the token that placeholders read.

Reads JSON and bytes only (no torch, no model code), so flows and preflight may use it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from drafter.errors import CheckpointError
from drafter.files import sha256_of_file, write_text_atomically

# Families whose norms multiply by 1 + weight, by the first word of their model_type. Gemma 4 is not one of them.
_NORMS_FROM_ONE = ("gemma", "gemma2", "gemma3")
_FINGERPRINT_CACHE = ".fledge-fingerprint.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass(frozen=True, eq=False)
class Target:
    """What Fledge has to know of a target. Sizes are those of the text model.

    Attributes:
        rope: RoPE parameters under transformers' names (`rope_theta`, `rope_type`, scaling fields). Of targets
            with several, those of the layers that see the whole context, as the drafter's do.
        norm_offset: what the norms add to their weights, 0 or 1.
        logit_cap: logits x leave the head as cap * tanh(x / cap); None: as they are.
        config: config.json of the (text) model as it stands.
    """

    path: Path
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_position_embeddings: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    tie_word_embeddings: bool
    norm_offset: float
    logit_cap: float | None
    config: dict[str, Any]

    @property
    def default_auxiliary_layers(self) -> tuple[int, int, int]:
        """Layers whose entering states the drafter reads: (2, L/2, L-3); (L/2-1, L/2, L-1) below 8 layers."""
        if self.num_layers >= 8:
            return 2, self.num_layers // 2, self.num_layers - 3
        return self.num_layers // 2 - 1, self.num_layers // 2, self.num_layers - 1

    @cached_property
    def fingerprint(self) -> str:
        """Digest over config, weights, tokenizer and chat template: whatever changes an answer changes it."""
        digests = {file.name: _cached_sha256(file) for file in _fingerprinted_files(self.path)}
        text = json.dumps(digests, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def mask_token_id(self) -> int:
        """Token id that placeholders carry: one that neither text nor chat template produces.

        First choice is an embedding row without a token (padding of the vocabulary), then a token that
        calls itself reserved or unused, then the last special token that has no role in the tokenizer's
        settings or the chat template. Training refuses data in which it occurs all the same.

        Raises:
            CheckpointError: every id has a use.
        """
        tokens = self.tokenizer_tokens
        if self.vocab_size - 1 not in tokens:
            return self.vocab_size - 1
        in_use = self._text_in_use()
        unused = [
            token_id
            for token_id, token in sorted(tokens.items())
            if token_id < self.vocab_size and token_id in self._special_ids and token not in in_use
        ]
        named = [i for i in unused if "reserved" in tokens[i].lower() or "unused" in tokens[i].lower()]
        if named or unused:
            return (named or unused)[-1]
        raise CheckpointError(
            f"{self.path}: all {self.vocab_size} token ids are in use",
            "one unused or reserved token for the drafter's placeholders",
            "pad the target's vocabulary by one row, or choose another target",
        )

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer, of generation_config.json, else of config.json."""
        generation = _read_json(self.path / "generation_config.json", required=False)
        ids = generation.get("eos_token_id", self.config.get("eos_token_id"))
        return frozenset(() if ids is None else ids if isinstance(ids, list) else (ids,))

    @cached_property
    def tokenizer_tokens(self) -> dict[int, str]:
        """Token id -> token, as in tokenizer.json."""
        tokenizer = self._tokenizer_json
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram models list [token, score]
            tokens = {index: entry[0] for index, entry in enumerate(vocabulary)}
        else:
            tokens = {index: token for token, index in vocabulary.items()}
        tokens.update({entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens", [])})
        return tokens

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(e["id"] for e in self._tokenizer_json.get("added_tokens", []) if e.get("special"))

    @cached_property
    def _tokenizer_json(self) -> dict[str, Any]:
        return _read_json(self.path / "tokenizer.json")

    def _text_in_use(self) -> str:
        """Settings and template as one text: a token that occurs in it has a role."""
        settings = _read_json(self.path / "tokenizer_config.json", required=False)
        roles = {key: value for key, value in settings.items() if key != "added_tokens_decoder"}
        # The list of additional special tokens names every one of them and gives none a role.
        for key in ("additional_special_tokens", "extra_special_tokens"):
            roles.pop(key, None)
        template = self.path / "chat_template.jinja"
        parts = [json.dumps(roles, ensure_ascii=False)]
        parts.append(template.read_text(encoding="utf-8") if template.is_file() else "")
        return "\n".join(parts)


@lru_cache(maxsize=16)
def load_target(path: Path) -> Target:
    """Read a target's shape from its Hugging Face directory.

    Raises:
        CheckpointError: no such model, or a shape that a drafter cannot be built for.
    """
    _refuse_gguf(path)
    whole = _read_json(path / "config.json")
    try:
        # Models that also see images nest the text model's configuration, and may say this one outside of it.
        config = whole.get("text_config", whole)
        tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))
        cap = config.get("final_logit_softcapping")
        hidden_size = int(config["hidden_size"])
        num_heads = int(config["num_attention_heads"])
        target = Target(
            path=path,
            hidden_size=hidden_size,
            num_layers=int(config["num_hidden_layers"]),
            vocab_size=int(config["vocab_size"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            intermediate_size=int(config["intermediate_size"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope_parameters(config),
            tie_word_embeddings=bool(tied),
            norm_offset=float(str(config.get("model_type")).split("_")[0] in _NORMS_FROM_ONE),
            logit_cap=None if cap is None else float(cap),
            config=config,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = (
            f"has no {error.args[0]}" if isinstance(error, KeyError) else f"is no shape of a model: {error}"
        )
        raise CheckpointError(
            f"{path / 'config.json'} {what}",
            "the configuration of a decoder-only language model",
            "give the directory of the target as the Hugging Face hub lays it out",
        ) from None
    if target.num_layers < 3:
        raise CheckpointError(
            f"{path}: {target.num_layers} layers",
            "at least 3, for three auxiliary states",
            "choose another target",
        )
    return target


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """One shape for both generations of config.json: `rope_parameters`, or `rope_theta` + `rope_scaling`.

    Where sliding and full attention have parameters of their own, those of full attention.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in scaling.values()):
        scaling = dict(scaling["full_attention"])
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    return {"rope_theta": float(config.get("rope_theta", 10000.0)), "rope_type": "default", **scaling}


def _refuse_gguf(path: Path) -> None:
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").exists():
        raise CheckpointError(
            f"{files[0]} is a GGUF file",
            "a target in Hugging Face format (config.json, tokenizer.json, *.safetensors), as the server loads it",
            "unpack it with transformers (see docs/targets.md), or give the model that it was made from",
        )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory.

    Raises:
        CheckpointError: there are none (pickled weights are never loaded).
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{path} holds no .safetensors file",
            "weights in safetensors format; pickled ones are never loaded",
            "save the model with save_pretrained(..., safe_serialization=True)",
        )
    return files


def _fingerprinted_files(path: Path) -> list[Path]:
    others = [path / "config.json", *(path / name for name in _TOKENIZER_FILES)]
    return [*weight_files(path), *(file for file in others if file.is_file())]


def _cached_sha256(file: Path) -> str:
    """sha256 of a file, remembered beside it by size and modification time: weights are large."""
    cache_path = file.parent / _FINGERPRINT_CACHE
    cache = _read_json(cache_path, required=False)
    status = file.stat()
    key = f"{file.name}:{status.st_size}:{status.st_mtime_ns}"
    if key in cache:
        return cache[key]
    digest = sha256_of_file(file)
    if os.access(file.parent, os.W_OK):
        kept = {k: v for k, v in cache.items() if not k.startswith(f"{file.name}:")}
        write_text_atomically(cache_path, json.dumps({**kept, key: digest}, indent=2))
    return digest


def _read_json(path: Path, required: bool = True) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"a JSON {type(value).__name__}")
        return value
    except (FileNotFoundError, NotADirectoryError):
        if not required:
            return {}
        raise CheckpointError(
            f"{path} does not exist",
            "a target model in Hugging Face format (config.json, tokenizer.json, *.safetensors)",
            "check the path; `save_pretrained` of model and tokenizer writes such a directory",
        ) from None
    except ValueError as error:
        if not required and path.name == _FINGERPRINT_CACHE:
            return {}
        raise CheckpointError(
            f"{path}: {error}", "a JSON object", "download or save the target again"
        ) from None
