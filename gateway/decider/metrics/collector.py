"""Prometheus collector: counts each call's record, and reads gauges from the core at scrape.

Counting takes a dict look-up and a few integer additions (about 1 us). prometheus_client's own counters take a lock and
several microseconds for each series, so it only writes the exposition. Labels come from the policy and the fleet, never
from a client. A model that no engine serves is `other`, and so is a route that is not in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core.admission.retries import RetryBudget
from gateway.core.engines.fleet import Fleet
from gateway.core.histogram import Histogram
from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.shadow.shadow import Shadow
from gateway.decider.dispatch import Dispatch
from gateway.decider.metrics.families import engines, models, policy, shadow_decisions, targets
from gateway.shared.files.file_status import FileStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Row:
    """Counts of one (route, class, model, outcome)."""

    __slots__ = (
        "affinity", "attempts", "cached", "completion", "duration", "prompt", "queue", "requests", "shaped", "ttft",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = self.prompt = self.completion = self.cached = self.attempts = self.affinity = self.shaped = 0
        self.queue, self.ttft, self.duration = Histogram(), Histogram(), Histogram()


LABELS = ("route", "class", "model", "outcome")
CANCELLED = frozenset({"client_gone", "slow_client", "deadline", "drain"})  # reasons for ending a call early


class Batches(Protocol):
    """The batcher's counts: requests by their trigger, calls that shared a request, calls sent again by themselves."""

    batches: dict[str, int]
    merged: int
    again: int


class Metrics(Collector):
    """Counts records, and reads fleet, queues and connections at each scrape. `exposition` is the body of /metrics.

    `more` gives families that other modules count, `lost_lines` the lines that the log and standard error have lost.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatch: Dispatch,
        connections: Callable[[], int],
        refusals: Callable[[], Mapping[int, int]],
        retries: RetryBudget,
        batcher: Callable[[], Batches],
        bodies: BodyMemory,
        *,
        shadow: Shadow | None = None,
        more: Callable[[], Iterable[Metric]] = tuple,
        lost_lines: Callable[[], int] = int,
        policy_status: Callable[[], FileStatus] = FileStatus,
    ) -> None:
        self._fleet = fleet
        self._dispatch = dispatch
        self._connections = connections
        self._refusals = refusals
        self._retries = retries
        self._batcher = batcher
        self._bodies = bodies
        self._shadow = shadow
        self._more = more
        self._lost_lines = lost_lines
        self._policy_status = policy_status
        self._waits: dict[str, tuple[Histogram, Histogram]] = {}  # class -> predicted wait, its error
        self._cancelled: dict[str, int] = {}
        self._tenants: dict[tuple[str, Outcome], list[int]] = {}  # requests, tokens
        self._rows: dict[tuple[str, str, str, Outcome], _Row] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe(self, record: Record) -> None:
        """Count one ended call."""
        engine = record.engine
        model = record.model if engine or self._known(record.model) else "other"
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
            row.affinity += record.affinity_tokens
            row.shaped += record.shaped_tokens
        if record.predicted_wait:
            waits = self._waits.get(record.class_name)
            if waits is None:
                waits = self._waits[record.class_name] = Histogram(), Histogram()
            waits[0].observe(record.predicted_wait)
            if engine:
                waits[1].observe(abs(record.queue - record.predicted_wait))
        if record.attempts > 1:
            row.attempts += record.attempts - 1
        if record.reason in CANCELLED:
            self._cancelled[record.reason] = self._cancelled.get(record.reason, 0) + 1
        tenant = self._tenants.get((record.tenant, record.outcome))
        if tenant is None:
            tenant = self._tenants[record.tenant, record.outcome] = [0, 0]
        tenant[0] += 1
        if engine:
            tenant[1] += record.prompt_tokens + record.completion_tokens

    def _known(self, model: str) -> bool:
        """Whether an engine or a sidecar has the model: a label must not be a client's invention."""
        return bool(self._fleet.serving(model)) or self._dispatch.sidecars.knows(model)

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
        yield from engines(self._fleet)
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
        yield CounterMetricFamily(
            "weir_log_lines_lost",
            "Lines of the call log and of standard error that were lost.",
            value=self._lost_lines(),
        )
        yield GaugeMetricFamily("weir_body_bytes", "Memory held by requests' bodies.", value=self._bodies.held)
        bodies = CounterMetricFamily(
            "weir_body_refusals", "Requests refused as the memory, or their sender's share, was full.", labels=("full",)
        )
        for full, count in self._bodies.refused.items():
            bodies.add_metric((full,), count)
        yield bodies
        yield from self._decisions()
        if self._shadow is not None:
            yield from shadow_decisions(self._shadow)
        yield from targets(self._dispatch)
        yield from models(self._dispatch, self._fleet)
        yield from self._as_vllm()
        yield from self._more()
        yield GaugeMetricFamily("weir_connections", "Open connections of the data port.", value=self._connections())

    def _calls(self) -> Iterable[Metric]:
        requests = CounterMetricFamily("weir_requests", "Calls ended, by how they ended.", labels=LABELS)
        retries = CounterMetricFamily("weir_retries", "Second and later attempts on an engine.", labels=LABELS)
        kinds = ("prompt", "completion", "cached")
        tokens = CounterMetricFamily(
            "weir_tokens", "Tokens as the engines reported them, by kind.", labels=("kind", *LABELS)
        )
        affinity = CounterMetricFamily(
            "weir_affinity_tokens", "Prompt tokens expected to be cached on the engine chosen for them.", labels=LABELS
        )
        shaped = CounterMetricFamily("weir_shaped_tokens", "Output tokens asked for and cut by shaping.", labels=LABELS)
        queue = HistogramMetricFamily("weir_queue_seconds", "From arrival to grant.", labels=LABELS)
        ttft = HistogramMetricFamily("weir_ttft_seconds", "From arrival to the engine's first byte.", labels=LABELS)
        duration = HistogramMetricFamily("weir_request_seconds", "From arrival to the end.", labels=LABELS)
        for (route, class_name, model, outcome), row in self._rows.items():
            labels = (route, class_name, model, outcome.value)
            requests.add_metric(labels, row.requests)
            retries.add_metric(labels, row.attempts)
            affinity.add_metric(labels, row.affinity)
            shaped.add_metric(labels, row.shaped)
            for kind in kinds:
                tokens.add_metric((kind, *labels), getattr(row, kind))
            for family, histogram in ((queue, row.queue), (ttft, row.ttft), (duration, row.duration)):
                family.add_metric(labels, histogram.buckets(), histogram.sum)
        yield from (requests, retries, tokens, affinity, shaped, queue, ttft, duration)

    def _as_vllm(self) -> Iterable[Metric]:
        """The same calls under the metric names that dashboards for a plain proxy in front of vLLM expect."""
        requests = CounterMetricFamily("vllm_requests", "Calls ended, by model.", labels=("model_id",))
        duration = HistogramMetricFamily(
            "vllm_request_duration_seconds", "From arrival to the end.", labels=("model_id",)
        )
        totals: dict[str, tuple[list[int], Histogram]] = {}
        for (_, _, model, _), row in self._rows.items():
            count, histogram = totals.setdefault(model, ([0], Histogram()))
            count[0] += row.requests
            histogram.add(row.duration)
        for model, (count, histogram) in totals.items():
            requests.add_metric((model,), count[0])
            duration.add_metric((model,), histogram.buckets(), histogram.sum)
        yield from (requests, duration)

    def _decisions(self) -> Iterable[Metric]:
        tenants = CounterMetricFamily(
            "weir_tenant_requests", "Calls ended, by tenant; without one: unauthorized.", labels=("tenant", "outcome")
        )
        used = CounterMetricFamily("weir_tenant_tokens", "Tokens used, by tenant.", labels=("tenant", "outcome"))
        for (tenant, outcome), (requests, tokens) in self._tenants.items():
            tenants.add_metric((tenant, outcome.value), requests)
            used.add_metric((tenant, outcome.value), tokens)
        predicted = HistogramMetricFamily(
            "weir_predicted_wait_seconds", "Predicted waits, of refused calls too.", labels=("class",)
        )
        error = HistogramMetricFamily(
            "weir_wait_error_seconds", "Between the predicted wait and the real one, either way.", labels=("class",)
        )
        for name, waits in self._waits.items():
            for family, histogram in zip((predicted, error), waits, strict=True):
                family.add_metric((name,), histogram.buckets(), histogram.sum)
        cancelled = CounterMetricFamily("weir_cancelled", "Calls ended early, by why.", labels=("reason",))
        for reason, count in self._cancelled.items():
            cancelled.add_metric((reason,), count)
        yield from (tenants, used, predicted, error, cancelled)
        yield GaugeMetricFamily(
            "weir_retry_budget_left", "Retries that may still be made in this window.", value=self._retries.left
        )
        batches = CounterMetricFamily("weir_batches", "Requests of the batcher, by what sent them.", labels=("reason",))
        batcher = self._batcher()
        for reason, count in batcher.batches.items():
            batches.add_metric((reason,), count)
        yield batches
        yield CounterMetricFamily("weir_batched_calls", "Calls answered by a shared request.", batcher.merged)
        yield CounterMetricFamily("weir_batch_resends", "Calls of a refused batch, sent singly.", batcher.again)
        yield from policy(self._policy_status())
