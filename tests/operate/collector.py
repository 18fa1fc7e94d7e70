"""Collector of spans, of OTLP over HTTP: takes whatever is posted, or refuses it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Collector:
    """A collector on a port of 127.0.0.1 until `close`. While it refuses, it answers 401, as to a wrong token."""

    def __init__(self) -> None:
        self._refuses = False
        # The library asks for a class of one's own; quiet, as a site prints what fires.
        answer = lambda request: self._answer(request)  # noqa: E731, PLW0108 # a method of ours would not be given it
        methods = {"do_POST": answer, "log_message": lambda *_: None}
        handler = type("Handler", (BaseHTTPRequestHandler,), methods)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="collector", daemon=True).start()

    def refuse(self, refuses: bool) -> None:
        """Refuse from now on, or take spans again."""
        self._refuses = refuses

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers["content-length"]))
        request.send_response(401 if self._refuses else 200)
        request.send_header("content-length", "0")
        request.end_headers()
