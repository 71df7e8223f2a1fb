"""Speed measurements by `vllm bench serve`, run in vLLM's own environment. No torch here.

One process of that environment serves all measurements of an evaluation (fledge_vllm/bench.py).
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from drafter.config import ServerSettings
from drafter.errors import ServerError
from drafter.files import write_text_atomically
from drafter.serving import VllmServer, last_lines, require_vllm_environment, vllm_environment


@dataclass(frozen=True)
class Load:
    """What to send: prompts already rendered through the chat template, so many at once.

    Attributes:
        num_warmups: requests before those that count.
    """

    prompts: tuple[str, ...]
    num_warmups: int
    num_requests: int
    concurrency: int
    max_answer_tokens: int
    temperature: float
    seed: int


class BenchmarkClient:
    """Context manager around the measuring process.

    Args:
        settings: names the interpreter that has vLLM.
        directory: takes the prompt files, the raw results as vLLM saves them, and the log.
    """

    def __init__(self, settings: ServerSettings, directory: Path) -> None:
        self.settings = settings
        self.directory = directory.absolute()
        self.log_path = self.directory / "bench.log"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start it; the first measurement waits for its 12 s of imports.

        Raises:
            ServerError: no vLLM environment.
        """
        python = require_vllm_environment(self.settings)
        self.directory.mkdir(parents=True, exist_ok=True)
        environment = vllm_environment(self.settings)
        environment["OMP_NUM_THREADS"] = "1"  # it only sends requests; the cores belong to the server
        with open(self.log_path, "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "fledge_vllm.bench"],
                stdin=subprocess.PIPE,  # it ends when we do: the pipe closes
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.directory,
                env=environment,
                text=True,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # it holds nothing worth saving
            process.communicate()

    def measure(self, server: VllmServer, load: Load, name: str) -> dict[str, Any]:
        """Send the load and return vLLM's result, which is also saved as `NAME.json`.

        Raises:
            ServerError: the server or the measuring process ended, or requests failed.
        """
        prompts = self.directory / f"{name}.jsonl"
        lines = [json.dumps({"prompt": prompt}) for prompt in load.prompts]
        write_text_atomically(prompts, "\n".join(lines) + "\n")
        answer = self._ask(_arguments(server, load, prompts), server)
        if "error" in answer:
            server.raise_if_dead()
            raise ServerError(
                f"vllm bench serve failed: {answer['error'].strip().splitlines()[-1]} (whole text: {self.log_path})",
                "a measurement",
                "read the log; the vLLM environment must be the one that the lock file describes",
            )
        result: dict[str, Any] = answer["result"]
        if result["failed"]:
            server.raise_if_dead()
            reason = next((text for text in result["errors"] if text), "no reason given").strip()
            raise ServerError(
                f"{result['failed']} of {load.num_requests} requests failed: {reason.splitlines()[-1]}",
                "every request answered",
                f"read {server.log_path}",
            )
        write_text_atomically(self.directory / f"{name}.json", json.dumps(result, indent=1) + "\n")
        return result

    def _ask(self, arguments: list[str], server: VllmServer) -> dict[str, Any]:
        process = self._process
        assert process is not None, "used outside its with block"
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            server.raise_if_dead()
            raise ServerError(
                f"the measuring process ended; the end of {self.log_path}:\n{last_lines(self.log_path)}",
                "fledge_vllm.bench running in the vLLM environment",
                "run `make setup` to install containers/vllm there",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def _arguments(server: VllmServer, load: Load, prompts: Path) -> list[str]:
    """Arguments of `vllm bench serve` for prompts that already went through the chat template."""
    return [
        "--backend", "openai",
        "--base-url", server.url,
        "--endpoint", "/v1/completions",
        "--model", server.model,
        "--tokenizer", str(server.target),
        "--dataset-name", "custom",
        "--dataset-path", str(prompts),
        "--skip-chat-template",
        "--disable-shuffle",
        "--custom-output-len", str(load.max_answer_tokens),
        "--num-prompts", str(load.num_requests),
        "--max-concurrency", str(load.concurrency),
        "--num-warmups", str(load.num_warmups),
        "--temperature", str(load.temperature),
        "--extra-body", json.dumps({"add_special_tokens": False, "seed": load.seed}),
        "--seed", str(load.seed),
        "--disable-tqdm",
    ]  # fmt: skip
