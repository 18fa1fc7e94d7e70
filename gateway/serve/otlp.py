"""Export of spans by OTLP over HTTP, in a thread of its own: the one door to OpenTelemetry's SDK.

Calls never wait for it. Spans gather in a bounded queue; what does not fit, and what a collector does not take, is
dropped and counted. A collector that is down, slow or refuses is told of once, and once more when it takes spans again.
Headers (tokens), time-out, certificates, the queue's size and the resource come from the standard environment:
OTEL_EXPORTER_OTLP_*, OTEL_BSP_MAX_QUEUE_SIZE, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from gateway import __version__
from gateway.core.request.call_trace import Span

LIMIT = 2048  # spans that wait to be sent, unless OTEL_BSP_MAX_QUEUE_SIZE says so
BATCH = 512  # spans in one message
EVERY = 1.0  # seconds between two messages that are not full
CLOSE_WITHIN = 2.0  # seconds for the last ones
NANO = 1_000_000_000
KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}


class SpanExport:
    """Sends spans to `endpoint`. `say` takes lines for the operator. `put` may be called from one thread, the event
    loop's; `dropped` counts spans since the start."""

    def __init__(self, endpoint: str, say: Callable[[str], None]) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)  # it would tell of each failure; we do once
        self._endpoint = endpoint
        self._say = say
        self._exporter = OTLPSpanExporter(endpoint=self._endpoint)
        self._resource = _resource()
        self._scope = InstrumentationScope("weir", __version__)
        self._epoch = 0  # nanoseconds of Unix time less monotonic ones
        size = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
        self._limit = int(size) if size.isdecimal() and len(size) <= 7 else LIMIT
        self._waiting: deque[tuple[str, Span]] = deque()
        self._full = 0  # spans that found no room: the event loop's count
        self._refused = 0  # spans that were not taken: the thread's
        self._failing = False
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        return self._full + self._refused

    def put(self, trace_id: str, spans: list[Span]) -> None:
        """Send the spans of one call, if there is room."""
        waiting = self._waiting
        if len(waiting) + len(spans) > self._limit:
            self._full += len(spans)
            return
        waiting.extend([(trace_id, span) for span in spans])
        if len(waiting) >= BATCH:
            self._wake.set()

    def close(self) -> None:
        """Send what waits, in bounded time."""
        self._ending = True
        self._wake.set()
        self._thread.join(CLOSE_WITHIN)
        if self._thread.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call] # it has no annotations

    # -- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._ending and not self._waiting):
            self._wake.wait(EVERY)
            self._wake.clear()
            self._epoch = time.time_ns() - time.monotonic_ns()  # at each turn: the clock may be set
            while self._waiting:
                self._send([self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))])

    def _send(self, batch: list[tuple[str, Span]]) -> None:
        result = self._exporter.export([self._readable(trace_id, span) for trace_id, span in batch])
        failed = result is not SpanExportResult.SUCCESS
        if failed:
            self._refused += len(batch)
        if failed is not self._failing:
            self._failing = failed
            told = "does not take spans: they are dropped, calls go on" if failed else "takes spans again"
            self._say(f"traces: {self._endpoint} {told}")

    def _readable(self, trace_id: str, span: Span) -> ReadableSpan:
        flags, trace = TraceFlags(TraceFlags.SAMPLED), int(trace_id, 16)
        parent = SpanContext(trace, int(span.parent_id, 16), is_remote=False) if span.parent_id else None
        return ReadableSpan(
            span.name,
            SpanContext(trace, int(span.span_id, 16), is_remote=False, trace_flags=flags),
            parent,
            self._resource,
            span.attributes,
            kind=KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=self._epoch + int(span.start * NANO),
            end_time=self._epoch + int(span.end * NANO),
            instrumentation_scope=self._scope,
        )


def _resource() -> Resource:
    """The resource of the standard environment, as the service `weir-gateway` where it names none."""
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "weir-gateway", "service.version": __version__}))
    return resource
