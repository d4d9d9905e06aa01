"""Servers that answer as different ones do, on the loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
Answers = Callable[[str, dict[str, Any]], Reply]
"""(path, body) -> (status, JSON or text)."""


@contextmanager
def serving(answers: Answers, models: Any = None) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """(URL, what was asked). models: what /v1/models says."""
    asked: list[tuple[str, dict[str, Any]]] = []
    listed = {"object": "list", "data": [{"id": "tiny"}]} if models is None else models

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            self._send(200 if self.path == "/v1/models" else 404, listed)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            self._send(*answers(self.path, body))

        def _send(self, status: int, body: Any) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def refuses(message: str, status: int = 400) -> Reply:
    return status, {"error": {"message": message, "type": "invalid_request_error"}}


WORDS = ["Can", "berra", "."]


def chat_reply(body: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """As OpenAI's chat completions are."""
    choice: dict[str, Any] = {
        "index": 0, "message": {"role": "assistant", "content": "Canberra."}, "finish_reason": "stop",
    }  # fmt: skip
    if body.get("logprobs"):
        content = [
            {"token": w, "logprob": -0.1, "bytes": list(w.encode()),
             "top_logprobs": [{"token": "Syd", "logprob": -3.0}, {"token": w, "logprob": -0.1}]}
            for w in WORDS
        ]  # fmt: skip
        choice["logprobs"] = {"content": content}
    return {
        "choices": [choice | extra], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
    }  # fmt: skip
