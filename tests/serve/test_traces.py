"""Traces as a collector gets them: gateways of one and of several processes post OTLP to a real HTTP server."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.core.request.call_trace import Span
from loadtest.processes import ChildError, Gateway, until

pytest.importorskip("opentelemetry.proto", reason="opentelemetry is not installed: pip install '.[otel]'")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from gateway.serve.otlp import NANO, SpanExport

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WITHIN = 60.0  # seconds
CALL = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
PHASES = {"weir.read", "weir.admit", "weir.queue", "weir.attempt", "weir.first_byte"}


class Served(ThreadingHTTPServer):
    """A server that keeps what it was asked. `heard`: headers of calls, or spans."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.heard: list[Any] = []
        self.status = 200
        self.release = threading.Event()  # a slow collector answers once it is set
        self.release.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answering(BaseHTTPRequestHandler):
    """HTTP/1.1 with lengths, without a log."""

    protocol_version = "HTTP/1.1"
    server: Served

    def log_message(self, format: str, *args: object) -> None:  # its name there
        """Nobody reads it."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def answer(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Engine(Answering):
    """An engine of one model that answers each call at once."""

    def do_GET(self) -> None:
        card = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}
        self.answer(200, json.dumps(card).encode() if self.path == "/v1/models" else b"")

    def do_POST(self) -> None:
        self.body()
        self.server.heard.append(dict(self.headers))
        answer = {
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
        }
        self.answer(200, json.dumps(answer).encode())


class Collector(Answering):
    """OTLP's receiver over HTTP."""

    def do_POST(self) -> None:
        message = ExportTraceServiceRequest.FromString(self.body())
        self.server.release.wait(WITHIN)
        if self.server.status == 200:
            for resource in message.resource_spans:
                service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
                for scope in resource.scope_spans:
                    self.server.heard += [(service, span) for span in scope.spans]
        self.answer(self.server.status, b"", "application/x-protobuf")


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[Served]:
    server = Served(handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def watched(folder: Path, *more: str, share: str = "100%") -> Iterator[tuple[Gateway, Served, Served]]:
    """A gateway before an engine, whose traces go to a collector."""
    policy = folder / "policy.yaml"
    policy.write_text(f"version: 1\nlogging: {{traces: {share}}}\n")
    with serving(Engine) as engine, serving(Collector) as collector:
        words = ("--engine", engine.url, "--otlp-traces-endpoint", collector.url, "--log", str(folder / "calls"))
        with Gateway(folder / "log", "--policy", str(policy), *words, *more) as gateway:
            yield gateway, engine, collector
        assert "Traceback" not in gateway.child.output()


def call(gateway: Gateway, **headers: str) -> dict[str, str]:
    """One call; the headers of its answer."""
    request = urllib.request.Request(  # noqa: S310 # on loopback
        f"{gateway.url}/v1/chat/completions",
        json.dumps(CALL).encode(),
        {"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=WITHIN) as answer:  # noqa: S310 # on loopback
        answer.read()
        return dict(answer.headers)


def spans(collector: Served, count: int) -> list[ProtoSpan]:
    """The spans that came, once there are `count`."""
    assert until(lambda: len(collector.heard) >= count, WITHIN) is not None, collector.heard
    return [span for _, span in collector.heard]


@pytest.mark.slow
def test_spans_follow_a_clock_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Collector) as collector:
        export = SpanExport(collector.url, print)

        def put() -> bool:
            """Whether a span of an hour before the first has come. One that joins another is of that one's time."""
            now = time.monotonic()
            export.put(TRACE, [Span("s", SPAN, "", now, now)])
            times = [span.start_time_unix_nano for span in spans(collector, 1)]
            return times[0] - min(times) > 3000 * NANO

        assert not put()
        before = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: before() - 3600 * NANO)
        assert until(put, WITHIN) is not None
        export.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_callers_trace_goes_through_to_the_engine(tmp_path: Path, workers: str) -> None:
    with watched(tmp_path, "--workers", workers, share="0%") as (gateway, engine, collector):
        found = call(gateway, traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="vendor=1")
        names = {span.name: span for span in spans(collector, 6)}
        assert names.keys() >= PHASES
        root, attempt = names["POST /v1/chat/completions"], names["weir.attempt"]
        assert {span.trace_id.hex() for span in names.values()} == {TRACE}
        assert root.parent_span_id.hex() == SPAN
        assert attempt.parent_span_id == root.span_id
        assert engine.heard[0]["traceparent"] == f"00-{TRACE}-{attempt.span_id.hex()}-01"
        assert engine.heard[0]["tracestate"] == "vendor=1"
        assert found["x-trace-id"] == TRACE
        assert {service for service, _ in collector.heard} == {"weir-gateway"}
        order = [names[name] for name in ("weir.read", "weir.admit", "weir.queue", "weir.attempt")]
        ends = [span.end_time_unix_nano for span in order]
        assert ends == sorted(ends)
        assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in order)
        call(gateway, traceparent=f"00-{TRACE}-{SPAN}-00")
        assert engine.heard[1]["traceparent"] == f"00-{TRACE}-{SPAN}-00"
        call(gateway)  # in no trace: the engine shall begin none either
        assert engine.heard[2]["traceparent"].endswith("-00")
    assert {span.trace_id.hex() for _, span in collector.heard} == {TRACE}
    assert len(collector.heard) == len(names)
    lines = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    told = Counter((line.get("trace_id"), line.get("traced")) for line in lines)  # each process writes its own
    assert told == {(TRACE, True): 1, (TRACE, None): 1, (None, None): 1}


@pytest.mark.slow
def test_a_collector_that_refuses_or_hangs_costs_calls_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(WITHIN))
    with watched(tmp_path) as (gateway, _, collector):
        collector.status = 400
        call(gateway)
        assert until(lambda: gateway.total("weir_trace_spans_dropped_total") >= 6, WITHIN) is not None
        call(gateway)
        assert until(lambda: gateway.total("weir_trace_spans_dropped_total") >= 12, WITHIN) is not None
        collector.status = 200
        call(gateway)
        spans(collector, 6)
        collector.release.clear()
        before = gateway.total("weir_trace_spans_dropped_total")
        for _ in range(10):  # one message hangs, three calls' spans wait, and there is no room for more
            call(gateway)
        more = lambda: gateway.total("weir_trace_spans_dropped_total") >= before + 6 * 3  # noqa: E731
        assert until(more, WITHIN) is not None
        collector.release.set()
    said = gateway.child.output()
    assert said.count("does not take spans") == 1
    assert said.count("takes spans again") == 1


@pytest.mark.slow
def test_a_collector_that_is_not_there_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    url = "http://127.0.0.1:9"  # a port that was free a moment ago may be the engine's now
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nlogging: {traces: true}\n")
    with serving(Engine) as engine:
        words = ("--engine", engine.url, "--otlp-traces-endpoint", url, "--log", "none", "--policy", str(policy))
        with Gateway(tmp_path / "log", *words) as gateway:
            for dropped in (6, 12):
                assert call(gateway)["x-trace-id"]
                assert until(lambda: gateway.total("weir_trace_spans_dropped_total") >= dropped, WITHIN) is not None  # noqa: B023 # asked at once
        said = gateway.child.output()
    assert said.count("does not take spans") == 1
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("url", ["collector:4318", "ftp://x/", "http://"])
def test_an_address_that_is_none_is_refused_at_the_start(tmp_path: Path, url: str) -> None:
    with pytest.raises(ChildError, match="otlp-traces-endpoint"):
        Gateway(tmp_path / "log", "--engine", "http://127.0.0.1:9", "--otlp-traces-endpoint", url)
