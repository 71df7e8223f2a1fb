"""A server that answers as AWS does when it refuses, for boto3 to read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Refusals:
    """What is answered, one after the other, the last one for ever; and what was asked."""

    answers: list[tuple[int, dict[str, str]]]
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def refusing(*answers: tuple[int, dict[str, str]]) -> Iterator[Refusals]:
    """Serve these answers on loopback."""
    refusals = Refusals(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            refusals.asked.append(self.headers.get("X-Amz-Target", ""))
            left: Sequence[tuple[int, dict[str, str]]] = refusals.answers
            status, body = refusals.answers.pop(0) if len(left) > 1 else left[0]
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    refusals.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield refusals
    server.shutdown()
    server.server_close()
