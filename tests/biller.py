"""Provider that takes money for each call that reaches it, whatever becomes of the call."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.processes import until

PROMPT, ANSWER = 10, 1000  # tokens
COST = PROMPT + ANSWER * 10  # micro-units, by the prices of POLICY
HIGHEST = COST + 300  # at most: each byte of the prompt may be a token
POLICY = """
storage: data
providers:
  cloud:
    url: %s
    key_file: cloud.key
    models: {mini: small}
    prices: 1/10
    budget: [%g/day, 10/month, 80%%/tenant]
    tenants: [anonymous]
    classes: [default]
    allow_private: true
"""
BODY = json.dumps({"model": "mini", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": ANSWER})


class Biller:
    """OpenAI-compatible server on loopback. `billed`: micro-units. Calls are answered while `free` is set."""

    def __init__(self) -> None:
        self.billed = 0
        self.free = threading.Event()
        self.free.set()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def policy(self, folder: Path, day: float) -> str:
        """Return a policy with this provider, whose key is in `folder`."""
        (folder / "cloud.key").write_text("key")
        (folder / "cloud.key").chmod(0o600)
        return POLICY % (self.url, day)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        biller = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with biller._lock:
                    biller.billed += PROMPT + asked["max_tokens"] * 10
                biller.free.wait(60.0)
                usage = {"prompt_tokens": PROMPT, "completion_tokens": asked["max_tokens"], "total_tokens": 0}
                answer = json.dumps({"id": "x", "object": "chat.completion", "choices": [], "usage": usage}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Write nothing."""

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle()

        return Handler

    @contextlib.contextmanager
    def running(self) -> Iterator[Biller]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.free.set()
            self._server.shutdown()
            self._server.server_close()


def call(url: str) -> str:
    """Send one call for the provider's model. Return ok, spent (no budget has room), gone (so is the gateway), or what
    else it was told."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
        answer = connection.getresponse()
        body = answer.read().decode()
    except (OSError, http.client.HTTPException):
        return "gone"
    finally:
        connection.close()
    return "ok" if answer.status == 200 else "spent" if "has no room" in body else f"{answer.status} {body}"


def call_until_out(url: str, within: float = 60.0) -> str:
    """Send the call again while its money is only being set aside."""
    told = ""

    def is_out() -> bool:
        nonlocal told
        told = call(url)
        return not told.startswith("503")

    until(is_out, within)
    return told


def spend(*urls: str, calls: int = 1000) -> Counter[str]:
    """Have so many calls answered by these gateways, eight at a time, or as many as the budget lets out. Return what
    they were told. A mark that is not kept yet and a leader that is not there yet are waited for."""
    found: Counter[str] = Counter()
    with ThreadPoolExecutor(8) as pool:

        def is_over() -> bool:
            width = min(8, calls - found["ok"])
            found.update(pool.map(call, [urls[number % len(urls)] for number in range(width)]))
            return found["ok"] == calls or found["spent"] > 0

        assert until(is_over, 60.0) is not None, found
    return found
