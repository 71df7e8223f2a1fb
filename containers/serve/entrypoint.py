"""Look at the drafter before AWS's entrypoint starts vLLM: speculation that is off says nothing by itself.

    entrypoint.py NEXT [ARGUMENT...]        NEXT is AWS's own entrypoint, which this process becomes

Standard library only: it runs with whatever Python the image has.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("FLEDGE_ML_ROOT", "/opt/ml"))
CHANNEL = ROOT / "additional-model-data-sources" / "eagle"
VARIABLE = "SM_VLLM_SPECULATIVE_CONFIG"
FILES = ("config.json", "model.safetensors")
MASK_NAMES = ("mask_token_id", "ptd_token_id", "pard_token")  # versions of vLLM differ in which one they read


def find_problem() -> str | None:
    """Why this server would not speculate as asked, in words with what to do; None if it will."""
    text = os.environ.get(VARIABLE)
    if text is None:
        if CHANNEL.is_dir():
            return f"a drafter is mounted at {CHANNEL}, but {VARIABLE} is not set: set it, or leave the channel out"
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        return f"{VARIABLE} is {text!r}: {error}. Give a JSON object, and PROCESS_AUTO_RECOVERY=false, which keeps its quotes"
    if not isinstance(config, dict):
        return f"{VARIABLE} is a JSON {type(config).__name__}: give an object"
    model = config.get("model")
    if not isinstance(model, str) or not model.startswith("/"):
        return None  # a method without a model, or one that vLLM fetches by its name
    return _problem_of(Path(model), config)


def _problem_of(drafter: Path, config: dict[str, Any]) -> str | None:
    missing = [name for name in FILES if not (drafter / name).is_file()]
    if missing:
        return (
            f"{VARIABLE} names {drafter}, which has no {' and no '.join(missing)}: give the model an additional "
            f"data source with the channel name {drafter.name!r} whose S3 prefix ends in '/'"
        )
    try:
        shape = json.loads((drafter / "config.json").read_text())
    except ValueError as error:
        return f"{drafter}/config.json is broken JSON: {error}. Upload the drafter again"
    if config.get("parallel_drafting") and not any(name in shape for name in MASK_NAMES):
        return (
            f"{drafter}/config.json names no mask token ({', '.join(MASK_NAMES)}), which parallel drafting needs: "
            "export the drafter again, or leave parallel_drafting out"
        )
    return None


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: entrypoint.py NEXT [ARGUMENT...]", file=sys.stderr)
        return 2
    problem = find_problem()
    if problem is None:
        os.execvp(arguments[0], arguments)
    print(f"not started: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
