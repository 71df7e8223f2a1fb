"""A script run by the vLLM environment's own Python, where our package is installed and ours alone is not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


def run_in_vllm(script: str, **environment: str) -> dict[str, Any]:
    """What the script prints as JSON behind the word RESULT; everything else it prints is noise of vLLM."""
    done = subprocess.run(
        [PYTHON, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={
            "PATH": "/usr/bin:/bin",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **environment,
        },
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT"))
    return result
