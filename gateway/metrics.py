"""One record per call -> Prometheus; gauges are read from the core at scrape.

Counting is a dict look-up and a few integer additions (about 1 us); prometheus_client's own children take a lock and
several microseconds for each series, so it is used where it is good: to write the exposition. Labels come from the
policy and the fleet, never from a client: a model nobody serves is `other`, a route not in the table is `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core.fleet import Engine, Fleet
from gateway.core.outcome import Outcome, Record
from gateway.dispatch import Dispatch

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _Histogram:
    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        total, rows = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class _Row:
    """What is counted for one (route, class, model, outcome)."""

    __slots__ = ("attempts", "cached", "completion", "duration", "prompt", "queue", "requests", "ttft")

    def __init__(self) -> None:
        self.requests = self.prompt = self.completion = self.cached = self.attempts = 0
        self.queue, self.ttft, self.duration = _Histogram(), _Histogram(), _Histogram()


LABELS = ("route", "class", "model", "outcome")


class Metrics(Collector):
    """Counts records and reads fleet, queues and connections at scrape. `exposition` is the body of /metrics."""

    def __init__(
        self,
        fleet: Fleet,
        dispatch: Dispatch,
        connections: Callable[[], int],
        refusals: Callable[[], Mapping[int, int]],
    ) -> None:
        self._fleet = fleet
        self._dispatch = dispatch
        self._connections = connections
        self._refusals = refusals
        self._rows: dict[tuple[str, str, str, Outcome], _Row] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe(self, record: Record) -> None:
        """Count one ended call."""
        engine = record.engine
        model = record.model if engine or self._fleet.serving(record.model) else "other"
        row = self._rows.get((record.route, record.class_name, model, record.outcome))
        if row is None:
            row = self._rows[record.route, record.class_name, model, record.outcome] = _Row()
        row.requests += 1
        row.duration.observe(record.total)
        if engine:
            row.queue.observe(record.queue)
            if record.ttft:
                row.ttft.observe(record.ttft)
            if record.settled:
                row.prompt += record.prompt_tokens
                row.completion += record.completion_tokens
                row.cached += record.cached_tokens
        if record.attempts > 1:
            row.attempts += record.attempts - 1

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def outcomes(self) -> dict[str, int]:
        """Calls ended so far, by outcome."""
        totals: dict[str, int] = {}
        for (_, _, _, outcome), row in self._rows.items():
            totals[outcome.value] = totals.get(outcome.value, 0) + row.requests
        return totals

    def collect(self) -> Iterable[Metric]:
        yield from self._calls()
        yield from self._engines()
        queued = GaugeMetricFamily("weir_queued_calls", "Calls waiting for a grant.", labels=("model", "class"))
        tokens = GaugeMetricFamily("weir_queued_tokens", "Tokens of the calls waiting.", labels=("model", "class"))
        for model, queues in self._dispatch.queues.items():
            for name in self._dispatch.policy.classes:
                queued.add_metric((model, name), queues.length(name))
                tokens.add_metric((model, name), queues.tokens(name))
        running = GaugeMetricFamily("weir_running_calls", "Calls that hold a grant.", labels=("class",))
        for name, count in self._dispatch.running.items():
            running.add_metric((name,), count)
        yield from (queued, tokens, running)
        refusals = CounterMetricFamily(
            "weir_wire_refusals", "Requests refused for their bytes alone, before they were calls.", labels=("status",)
        )
        for status, count in self._refusals().items():
            refusals.add_metric((str(status),), count)
        yield refusals
        yield GaugeMetricFamily("weir_connections", "Open connections of the data port.", value=self._connections())

    def _calls(self) -> Iterable[Metric]:
        requests = CounterMetricFamily("weir_requests", "Calls ended, by how they ended.", labels=LABELS)
        retries = CounterMetricFamily("weir_retries", "Second and later attempts on an engine.", labels=LABELS)
        kinds = ("prompt", "completion", "cached")
        tokens = CounterMetricFamily(
            "weir_tokens", "Tokens as the engines reported them, by kind.", labels=("kind", *LABELS)
        )
        queue = HistogramMetricFamily("weir_queue_seconds", "From arrival to grant.", labels=LABELS)
        ttft = HistogramMetricFamily("weir_ttft_seconds", "From arrival to the engine's first byte.", labels=LABELS)
        duration = HistogramMetricFamily("weir_request_seconds", "From arrival to the end.", labels=LABELS)
        for (route, class_name, model, outcome), row in self._rows.items():
            labels = (route, class_name, model, outcome.value)
            requests.add_metric(labels, row.requests)
            retries.add_metric(labels, row.attempts)
            for kind in kinds:
                tokens.add_metric((kind, *labels), getattr(row, kind))
            for family, histogram in ((queue, row.queue), (ttft, row.ttft), (duration, row.duration)):
                family.add_metric(labels, histogram.buckets(), histogram.sum)
        yield from (requests, retries, tokens, queue, ttft, duration)

    def _engines(self) -> Iterable[Metric]:
        gauges: list[tuple[str, str, Callable[[Engine], float]]] = [
            ("up", "1 while the engine answers its health checks.", lambda e: e.up),
            ("capacity_tokens", "KV-cache tokens of the engine.", lambda e: e.capacity),
            ("budget_tokens", "KV-cache tokens that may be promised now.", lambda e: e.budget),
            ("held_tokens", "KV-cache tokens promised: the ledger.", lambda e: e.held),
            ("in_flight", "Calls that hold a grant on the engine.", lambda e: e.in_flight),
            ("slots", "Calls that may be in flight: learned or set.", lambda e: e.slots),
            ("trim_ratio", "How far the budget is scaled to what holds turn into.", lambda e: e.trim),
            ("kv_usage_ratio", "KV-cache usage at the last sample.", lambda e: e.sample.kv_usage if e.sample else 0),
            ("prefill_tokens_per_second", "Learned prefill rate.", lambda e: e.prefill_rate),
        ]
        for name, text, read in gauges:
            family = GaugeMetricFamily(f"weir_engine_{name}", text, labels=("engine",))
            for engine in self._fleet:
                family.add_metric((engine.id,), float(read(engine)))
            yield family
