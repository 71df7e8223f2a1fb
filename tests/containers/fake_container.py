"""A tiny process that keeps the serving container's contract, so that tests of what is around it take seconds.

It takes vLLM's arguments (`-m vllm.entrypoints.openai.api_server --port ... --served-model-name ...`), answers
`GET /ping` and `POST /invocations` with chat completions, streamed or not, with vLLM's field names, and is told by
its environment to misbehave:

    FAKE_START_S=2            listens only after so long
    FAKE_NEVER_HEALTHY=true   /ping answers 503 for ever
    FAKE_CRASH_AFTER_S=5      exits with code 1 so long after it started
    FAKE_EXIT_AT_START=true   exits with code 1 at once
    FAKE_LATENCY_S=0.2        an answer takes so long; a stream's pieces take a fifth of it each
    FAKE_STATUS=500           /invocations answers with this status
    FAKE_ACCEPTANCE_LENGTH=2.5

A request may say `"fake_latency_s": 1.5` or `"fake_acceptance_length": 1.1` for itself, or `"fake_exit": true` to
kill the process while it answers.
`write_fake_python` makes an executable to name in FLEDGE_VLLM_PYTHON in place of the Python that has vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WORDS = ("The ", "bird ", "has ", "fledged", ".")
_SOURCE = Path(__file__).absolute()


def write_fake_python(folder: Path) -> Path:
    """An executable that ignores which module it is to run and is a fake container."""
    path = folder / "fake-python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{_SOURCE}" "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def _number(name: str, default: float = 0.0) -> float:
    return float(os.environ.get(name) or default)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    arguments: argparse.Namespace

    def do_GET(self) -> None:
        if self.path not in ("/ping", "/health"):
            self._answer(404, {"error": {"message": "Not Found"}})
        elif os.environ.get("FAKE_NEVER_HEALTHY") == "true":
            self._answer(503, {})
        else:
            self._answer(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path not in ("/invocations", "/v1/chat/completions"):
            self._answer(404, {"error": {"message": "Not Found"}})
            return
        try:
            request = json.loads(body)
            request["messages"]
        except (ValueError, KeyError, TypeError):
            self._answer(
                400, {"error": {"message": "Cannot find suitable handler for request.", "code": 400}}
            )
            return
        latency_s = float(request.get("fake_latency_s", _number("FAKE_LATENCY_S")))
        if status := int(_number("FAKE_STATUS")):
            self._answer(status, {"error": {"message": "told to fail", "code": status}})
        elif request.get("stream"):
            self._stream(request, latency_s)
        else:
            time.sleep(latency_s)
            if request.get("fake_exit"):
                os._exit(1)
            self._answer(200, self._completion(request))

    def _completion(self, request: dict[str, Any]) -> dict[str, Any]:
        acceptance_length = request.get("fake_acceptance_length", _number("FAKE_ACCEPTANCE_LENGTH", 2.0))
        message = {"role": "assistant", "content": "".join(WORDS)}
        return {
            "id": "chatcmpl-fake",
            "object": "chat.completion",
            "model": self._model(),
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": len(WORDS), "total_tokens": 5 + len(WORDS)},
            "metrics": {
                "speculative_decoding": {
                    "mean_acceptance_length": acceptance_length,
                    "num_spec_steps": 3,
                }
            },
        }

    def _stream(self, request: dict[str, Any], latency_s: float) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index, word in enumerate(WORDS):
            time.sleep(latency_s / len(WORDS))
            if request.get("fake_exit") and index == 2:
                os._exit(1)
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            event = {"object": "chat.completion.chunk", "model": self._model(), "choices": [choice]}
            self._chunk(f"data: {json.dumps(event)}\n\n")
        if (request.get("stream_options") or {}).get("include_usage"):
            completion = self._completion(request)
            last = {name: completion[name] for name in ("model", "usage", "metrics")}
            self._chunk(f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [], **last})}\n\n")
        self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _model(self) -> str:
        names = self.arguments.served_model_name
        return str(names[0] if names else self.arguments.model)

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        attributes = self.headers.get("X-Amzn-SageMaker-Custom-Attributes")
        if attributes is not None:
            self.send_header("X-Amzn-SageMaker-Custom-Attributes", attributes)
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main(arguments: list[str]) -> None:
    """Serve until killed, or until the environment says to end."""
    print("arguments:", json.dumps(arguments), flush=True)
    if os.environ.get("FAKE_EXIT_AT_START") == "true":
        raise SystemExit(1)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--port", type=int)
    parser.add_argument("--host")
    parser.add_argument("--model", default="default-model")
    parser.add_argument("--served-model-name", nargs="+")
    _Handler.arguments, _ = parser.parse_known_args(arguments)
    if crash_after_s := _number("FAKE_CRASH_AFTER_S"):
        timer = threading.Timer(crash_after_s, os._exit, [1])
        timer.daemon = True
        timer.start()
    time.sleep(_number("FAKE_START_S"))
    _Server((_Handler.arguments.host, _Handler.arguments.port), _Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
