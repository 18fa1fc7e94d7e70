"""Traffic for the console's tests: calls at a fixed rate, and an engine that says hostile things."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

# Each would run something if it became markup, or a formula in a spreadsheet.
XSS = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    '"><svg onload=alert(1)>',
    "javascript:alert(1)",
    "{{constructor.constructor('alert(1)')()}}",
    '=HYPERLINK("http://x","y")',
    "</textarea><iframe srcdoc='<script>alert(1)</script>'>",
]


def call(url: str, body: Any, **headers: str) -> int:
    """The status of one chat call, whose answer is read whole."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    lines = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), lines)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def chat(model: str, tokens: int = 32, *, stream: bool = True, words: int = 40) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "word " * words}]
    return {"model": model, "max_tokens": tokens, "stream": stream, "messages": prompt}


class Traffic:
    """`send` is called `rate` times a second, from threads of its own, until the end."""

    def __init__(self, send: Callable[[], object], rate: float, threads: int = 16) -> None:
        self._send = send
        self._over = threading.Event()
        self._pause = threads / rate
        self._threads = [threading.Thread(target=self._run, args=(n * self._pause / threads,)) for n in range(threads)]

    def _run(self, first: float) -> None:
        pause = first
        while not self._over.wait(pause):
            pause = self._pause
            with suppress(OSError, http.client.HTTPException):  # the gateway may end first
                self._send()

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


class HostileEngine:
    """An engine whose models' names and errors are markup."""

    def __init__(self, models: list[str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.startswith("/v1/models"):
                    self._say(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in models]})
                else:
                    self._say(200, {})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self._say(400, {"error": {"message": XSS[0] + XSS[1], "type": XSS[2], "code": XSS[3]}})

            def _say(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HostileEngine:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
