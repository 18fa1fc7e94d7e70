"""Prometheus collector: counts each call's record, and reads gauges from the core at scrape.

Counting is `CallCounts`'s. prometheus_client's own counters take a lock and several microseconds for each series, so it
only writes the exposition. Labels come from the policy and the fleet, never from a client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.core.admission.retries import RetryBudget
from gateway.core.call_counts import CallCounts, CountRow
from gateway.core.histogram import Histogram
from gateway.core.request.outcome import Outcome
from gateway.decider.dispatch import Dispatch
from gateway.decider.metrics.families import batches, engines, models, policy, targets
from gateway.decider.relays.totals import summed
from gateway.frames.messages import RelayCounts
from gateway.shared.files.file_status import FileStatus
from gateway.shared.metrics import counter, gauge, histogram

LABELS = ("route", "class", "model", "outcome")
WAITS = {
    "weir_predicted_wait_seconds": "Predicted waits, of refused calls too.",
    "weir_wait_error_seconds": "Between the predicted wait and the real one, either way.",
}


class Scrape(Collector):
    """Families as they were read at one scrape."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Metrics:
    """Counts records, and reads fleet, queues and connections at each scrape.

    `counted` gives the totals of this process, `relays` those of relays that are processes of their own, `more` the
    families that other modules count.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        retries: RetryBudget,
        counted: Callable[[], RelayCounts],
        *,
        more: Callable[[], Iterable[Metric]] = tuple,
        policy_status: Callable[[], FileStatus] = FileStatus,
        relays: Callable[[], Sequence[RelayCounts]] = tuple,
    ) -> None:
        self._dispatch = dispatch
        self._retries = retries
        self._counted = counted
        self._more = more
        self._policy_status = policy_status
        self.counts = CallCounts(self._known)
        self.observe = self.counts.observe  # one ended call
        self._relays = relays

    def _known(self, model: str) -> bool:
        """Whether an engine or a sidecar has the model: a label must not be a client's invention."""
        return bool(self._dispatch.fleet.serving(model)) or self._dispatch.sidecars.models.knows(model)

    def exposition(self) -> Callable[[], bytes]:
        """Read all numbers now. What is returned writes them as the body of /metrics, for which any thread may call it:
        with thousands of tenants that takes tenths of a second."""
        return partial(generate_latest, Scrape(list(self.collect())))

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
        totals, told = self.totals(), summed((self._counted(), *self._relays()))
        yield from self._calls(totals)
        yield from engines(self._dispatch.fleet)
        classes, queues = self._dispatch.policy.classes, self._dispatch.queues.items()
        queued = [((model, name), queue.length(name)) for model, queue in queues for name in classes]
        yield gauge("weir_queued_calls", "Calls waiting for a grant.", "model", "class", of=queued)
        yield gauge("weir_running_calls", "Calls that hold a grant.", "class", of=self._dispatch.running)
        text = "Requests refused for their bytes alone, before they were calls."
        by_status = {str(status): count for status, count in told.refusals.items()}
        yield counter("weir_wire_refusals", text, "status", of=by_status)
        text = "Lines of the call log and of standard error that were lost."
        yield counter("weir_log_lines_lost", text, of=told.lost_lines)
        text = "Spans of sampled calls that no collector took, or that found no room to wait."
        yield counter("weir_trace_spans_dropped", text, of=told.lost_spans)
        yield gauge("weir_body_bytes", "Memory held by requests' bodies.", of=told.body_bytes)
        text = "Requests refused as the memory, or their sender's share, was full."
        yield counter("weir_body_refusals", text, "full", of=told.body_refusals)
        yield from self._decisions(totals)
        yield from batches(told)
        yield from targets(self._dispatch)
        yield from models(self._dispatch)
        yield from self._as_vllm(totals)
        yield from self._more()
        yield gauge("weir_connections", "Open connections of the data port.", of=told.connections)

    def _calls(self, counts: CallCounts) -> Iterable[Metric]:
        rows = [((*key[:3], key[3].value), row) for key, row in counts.rows.items()]
        counters: list[tuple[str, str, Callable[[CountRow], int]]] = [
            ("requests", "Calls ended, by how they ended.", lambda row: row.requests),
            ("retries", "Second and later attempts on an engine.", lambda row: row.attempts),
            ("affinity_tokens", "Prompt tokens expected to be cached on the engine chosen for them.",
             lambda row: row.affinity),
            ("shaped_tokens", "Output tokens asked for and cut by shaping.", lambda row: row.shaped),
        ]  # fmt: skip
        for name, text, read in counters:
            yield counter(f"weir_{name}", text, *LABELS, of=[(labels, read(row)) for labels, row in rows])
        kinds = ("prompt", "completion", "cached")
        tokens = [((kind, *labels), getattr(row, kind)) for labels, row in rows for kind in kinds]
        text = "Tokens as the engines reported them, by kind."
        yield counter("weir_tokens", text, "kind", *LABELS, of=tokens)
        histograms: list[tuple[str, str, Callable[[CountRow], Histogram]]] = [
            ("weir_queue_seconds", "From arrival to grant.", lambda row: row.queue),
            ("weir_ttft_seconds", "From arrival to the first byte of a stream.", lambda row: row.ttft),
            ("weir_request_seconds", "From arrival to the end.", lambda row: row.duration),
        ]
        for name, text, waits in histograms:
            found = [(labels, waits(row).buckets(), waits(row).sum) for labels, row in rows]
            yield histogram(name, text, *LABELS, of=found)

    def _as_vllm(self, counts: CallCounts) -> Iterable[Metric]:
        """The same calls under the metric names that dashboards for a plain proxy in front of vLLM expect."""
        requests: Counter[str] = Counter()
        durations: dict[str, Histogram] = {}
        for (_, _, model, _), row in counts.rows.items():
            requests[model] += row.requests
            durations.setdefault(model, Histogram()).add(row.duration.counts, row.duration.sum)
        found = [(model, each.buckets(), each.sum) for model, each in durations.items()]
        yield counter("vllm_requests", "Calls ended, by model.", "model_id", of=requests)
        yield histogram("vllm_request_duration_seconds", "From arrival to the end.", "model_id", of=found)

    def _decisions(self, counts: CallCounts) -> Iterable[Metric]:
        calls = {(tenant, outcome.value): ended for (tenant, outcome), (ended, _) in counts.tenants.items()}
        used = {(tenant, outcome.value): tokens for (tenant, outcome), (_, tokens) in counts.tenants.items()}
        text = "Calls ended, by tenant; without one: unauthorized."
        yield counter("weir_tenant_requests", text, "tenant", "outcome", of=calls)
        yield counter("weir_tenant_tokens", "Tokens used, by tenant.", "tenant", "outcome", of=used)
        for index, (name, text) in enumerate(WAITS.items()):
            waits = [(each, pair[index].buckets(), pair[index].sum) for each, pair in counts.waits.items()]
            yield histogram(name, text, "class", of=waits)
        text = "Prompts by the engine that read them and why."
        yield counter("weir_prefills", text, "place", "reason", of=counts.prefills)
        text = "Retries that may still be made in this window."
        yield gauge("weir_retry_budget_left", text, of=self._retries.left)
        yield from policy(self._policy_status())
