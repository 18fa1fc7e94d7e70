"""Prometheus collector: counts each call's record, and reads gauges from the core at scrape.

Counting is `CallCounts`'s. prometheus_client's own counters take a lock and several microseconds for each series, so it
only writes the exposition. Labels come from the policy and the fleet, never from a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from gateway.core.admission.retries import RetryBudget
from gateway.core.call_counts import CallCounts
from gateway.core.engines.fleet import Fleet
from gateway.core.histogram import Histogram
from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.outcome import Outcome
from gateway.decider.dispatch import Dispatch
from gateway.decider.metrics.families import engines, models, policy, targets
from gateway.decider.metrics.gen_ai import gen_ai
from gateway.decider.relays.totals import added_up
from gateway.frames.messages import RelayCounts
from gateway.shared.files.file_status import FileStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


LABELS = ("route", "class", "model", "outcome")


class Batches(Protocol):
    """The batcher's counts: requests by their trigger, calls that shared a request, calls sent again by themselves."""

    batches: dict[str, int]
    merged: int
    again: int


class Metrics(Collector):
    """Counts records, and reads fleet, queues and connections at each scrape. `exposition` is the body of /metrics.

    `more` gives families that other modules count, `lost_lines` the lines that the log and standard error have lost,
    `relays` the totals of relays that are processes of their own.
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
        more: Callable[[], Iterable[Metric]] = tuple,
        lost_lines: Callable[[], int] = int,
        policy_status: Callable[[], FileStatus] = FileStatus,
        relays: Callable[[], Sequence[RelayCounts]] = tuple,
        lost_spans: Callable[[], int] = int,
        gen_ai: bool = False,
    ) -> None:
        self._fleet = fleet
        self._dispatch = dispatch
        self._connections = connections
        self._refusals = refusals
        self._retries = retries
        self._batcher = batcher
        self._bodies = bodies
        self._more = more
        self._lost_lines = lost_lines
        self._lost_spans = lost_spans
        self._policy_status = policy_status
        self.counts = CallCounts(self._known, gen_ai=gen_ai)
        self._gen_ai = gen_ai
        self.observe = self.counts.observe  # one ended call
        self._relays = relays
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def _known(self, model: str) -> bool:
        """Whether an engine or a sidecar has the model: a label must not be a client's invention."""
        return bool(self._fleet.serving(model)) or self._dispatch.sidecars.knows(model)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def openmetrics(self) -> bytes:
        """The same as OpenMetrics, which has exemplars: the traces of calls."""
        text: bytes = openmetrics(self._registry)  # type: ignore[no-untyped-call] # it has no annotations
        return text

    def outcomes(self) -> dict[str, int]:
        """Calls ended so far, by outcome."""
        return self.totals().outcomes()

    def used(self) -> dict[str, tuple[int, int, int]]:
        """Usage by tenant: calls that ended, calls that were answered, tokens."""
        found: dict[str, tuple[int, int, int]] = {}
        for (tenant, outcome), (calls, tokens) in self.totals().tenants.items():
            ended, answered, used = found.get(tenant, (0, 0, 0))
            found[tenant] = ended + calls, answered + calls * (outcome is Outcome.OK), used + tokens
        return found

    def totals(self) -> CallCounts:
        """The counts of all processes."""
        relays = self._relays()
        if not relays:
            return self.counts
        totals = CallCounts()
        for told in (self.counts.told(), *(relay.calls for relay in relays)):
            totals.add(told)
        return totals

    def collect(self) -> Iterable[Metric]:
        totals, relays = self.totals(), self._relays()
        yield from self._calls(totals)
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
        for status, count in added_up(self._refusals(), *(relay.refusals for relay in relays)).items():
            refusals.add_metric((str(status),), count)
        yield refusals
        yield CounterMetricFamily(
            "weir_log_lines_lost",
            "Lines of the call log and of standard error that were lost.",
            value=self._lost_lines() + sum([relay.lost_lines for relay in relays]),
        )
        yield CounterMetricFamily(
            "weir_trace_spans_dropped",
            "Spans of sampled calls that no collector took, or that found no room to wait.",
            value=self._lost_spans() + sum([relay.lost_spans for relay in relays]),
        )
        held = self._bodies.held + sum([relay.body_bytes for relay in relays])
        yield GaugeMetricFamily("weir_body_bytes", "Memory held by requests' bodies.", value=held)
        bodies = CounterMetricFamily(
            "weir_body_refusals", "Requests refused as the memory, or their sender's share, was full.", labels=("full",)
        )
        for full, count in added_up(self._bodies.refused, *(relay.body_refusals for relay in relays)).items():
            bodies.add_metric((full,), count)
        yield bodies
        yield from self._decisions(totals, relays)
        yield from targets(self._dispatch)
        yield from models(self._dispatch, self._fleet)
        yield from self._as_vllm(totals)
        if self._gen_ai:
            yield from gen_ai(totals.gen_ai)
        yield from self._more()
        connections = self._connections() + sum([relay.connections for relay in relays])
        yield GaugeMetricFamily("weir_connections", "Open connections of the data port.", value=connections)

    def _calls(self, counts: CallCounts) -> Iterable[Metric]:
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
        for (route, class_name, model, outcome), row in counts.rows.items():
            labels = (route, class_name, model, outcome.value)
            requests.add_metric(labels, row.requests)
            retries.add_metric(labels, row.attempts)
            affinity.add_metric(labels, row.affinity)
            shaped.add_metric(labels, row.shaped)
            for kind in kinds:
                tokens.add_metric((kind, *labels), getattr(row, kind))
            for family, histogram in ((queue, row.queue), (ttft, row.ttft), (duration, row.duration)):
                family.add_metric(labels, _exemplified(histogram), histogram.sum)
        yield from (requests, retries, tokens, affinity, shaped, queue, ttft, duration)

    def _as_vllm(self, counts: CallCounts) -> Iterable[Metric]:
        """The same calls under the metric names that dashboards for a plain proxy in front of vLLM expect."""
        requests = CounterMetricFamily("vllm_requests", "Calls ended, by model.", labels=("model_id",))
        duration = HistogramMetricFamily(
            "vllm_request_duration_seconds", "From arrival to the end.", labels=("model_id",)
        )
        totals: dict[str, tuple[list[int], Histogram]] = {}
        for (_, _, model, _), row in counts.rows.items():
            count, histogram = totals.setdefault(model, ([0], Histogram()))
            count[0] += row.requests
            histogram.add(row.duration)
        for model, (count, histogram) in totals.items():
            requests.add_metric((model,), count[0])
            duration.add_metric((model,), histogram.buckets(), histogram.sum)
        yield from (requests, duration)

    def _decisions(self, counts: CallCounts, relays: Sequence[RelayCounts]) -> Iterable[Metric]:
        tenants = CounterMetricFamily(
            "weir_tenant_requests", "Calls ended, by tenant; without one: unauthorized.", labels=("tenant", "outcome")
        )
        used = CounterMetricFamily("weir_tenant_tokens", "Tokens used, by tenant.", labels=("tenant", "outcome"))
        for (tenant, outcome), (requests, tokens) in counts.tenants.items():
            tenants.add_metric((tenant, outcome.value), requests)
            used.add_metric((tenant, outcome.value), tokens)
        predicted = HistogramMetricFamily(
            "weir_predicted_wait_seconds", "Predicted waits, of refused calls too.", labels=("class",)
        )
        error = HistogramMetricFamily(
            "weir_wait_error_seconds", "Between the predicted wait and the real one, either way.", labels=("class",)
        )
        for name, waits in counts.waits.items():
            for family, histogram in zip((predicted, error), waits, strict=True):
                family.add_metric((name,), histogram.buckets(), histogram.sum)
        cancelled = CounterMetricFamily("weir_cancelled", "Calls ended early, by why.", labels=("reason",))
        for reason, count in counts.cancelled.items():
            cancelled.add_metric((reason,), count)
        yield from (tenants, used, predicted, error, cancelled)
        yield GaugeMetricFamily(
            "weir_retry_budget_left", "Retries that may still be made in this window.", value=self._retries.left
        )
        batches = CounterMetricFamily("weir_batches", "Requests of the batcher, by what sent them.", labels=("reason",))
        batcher = self._batcher()
        for reason, count in added_up(batcher.batches, *(relay.batches for relay in relays)).items():
            batches.add_metric((reason,), count)
        yield batches
        merged = batcher.merged + sum([relay.merged for relay in relays])
        again = batcher.again + sum([relay.again for relay in relays])
        yield CounterMetricFamily("weir_batched_calls", "Calls answered by a shared request.", merged)
        yield CounterMetricFamily("weir_batch_resends", "Calls of a refused batch, sent singly.", again)
        yield from policy(self._policy_status())


def _exemplified(histogram: Histogram) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """The buckets, each with the last traced call in it."""
    rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = list(histogram.buckets())
    for number, (trace_id, value) in histogram.exemplars.items():
        bound, count = rows[number][:2]
        rows[number] = (bound, count, Exemplar({"trace_id": trace_id}, value))
    return rows
