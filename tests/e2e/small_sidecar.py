"""Minimal sidecar: real messages over real sockets, and one engine that it reports as asleep or awake."""

from __future__ import annotations

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gateway.shared.protocol import REPORT_PATH, CapacityReport, Demand, Ensured, ModelReport, demand_report, encode


class SmallSidecar:
    """Has model `sim` as profile `p`, asleep; `engine` is the URL it says is its engine's once it was asked to wake it,
    `takes` seconds later. `asked` counts orders, `woken_at` is when it said so."""

    def __init__(self, engine: str, *, takes: float, token: str | None = None) -> None:
        self.engine = engine
        self.takes = takes
        self.token = token
        self.gateway = ""
        self.asked = 0
        self.woken_at = 0.0
        self.model = ModelReport(profile="p", model="sim", state="sleeping", ready_in=takes)
        self._sequence = 0
        self._lock = threading.Lock()
        self._timers: list[threading.Timer] = []
        small = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                small.order(self)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> SmallSidecar:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def order(self, request: BaseHTTPRequestHandler) -> None:
        """What came in on the control API."""
        right = self.token is None or request.headers["authorization"] == f"Bearer {self.token}"
        if request.path != "/models/p/ensure" or not right:
            request.send_error(403 if not right else 404)
            return
        with self._lock:  # a report of another thread would put the model back as it was
            self.asked += 1
            if self.model.pending is None and self.model.state == "sleeping":
                self.model = msgspec.structs.replace(self.model, pending="wake")
                self._timers.append(threading.Timer(self.takes, self.wake))
                self._timers[-1].start()
        body = encode(Ensured(model=self.model))
        request.send_response(200)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def wake(self) -> None:
        """It is awake, and says so at once."""
        self.woken_at = time.monotonic()
        self.report(state="running", pending=None, url=self.engine, ready_in=0.0)

    def report(self, **fields: Any) -> Demand:
        """A report with these new fields; the answer. Raises AssertionError where it is refused."""
        with self._lock:
            self.model = msgspec.structs.replace(self.model, **fields)
            self._sequence += 1
            report = CapacityReport(
                sidecar="small",
                boot="b",
                sequence=self._sequence,
                control=f"http://127.0.0.1:{self._server.server_port}",
                models=(self.model,),
            )
            parts = urlsplit(self.gateway)
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
            headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
            try:
                connection.request("POST", REPORT_PATH, encode(report), headers)
                answer = connection.getresponse()
                body = answer.read()
            finally:
                connection.close()
        assert answer.status == 200, body
        (demand,) = demand_report(body).demands
        return demand
