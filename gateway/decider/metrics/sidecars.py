"""Metric families of sidecars: which of them report, the models they can have ready, the waits of calls for those.

Values are read from the registry at each scrape; only waits are counted as they end. Labels are ids of sidecars, which
have shown the token, and models of their reports. Of each at most MOST appear, so no sidecar can flood the exposition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway.core.histogram import Histogram
from gateway.core.sidecars.sidecar import awake, beginning
from gateway.core.sidecars.sidecars import Registry
from gateway.decider.dispatch import Dispatch

MOST = 1000  # sidecars, and models
STATES = ("awake", "being made ready", "can be had", "cannot be had")


class SidecarMetrics:
    """Metrics of sidecars. `asked`: requests to sidecars so far, by result. `collect` yields nothing until the first
    report."""

    def __init__(self, dispatch: Dispatch, asked: Mapping[str, int]) -> None:
        self._dispatch = dispatch
        self._asked = asked
        self._waits: dict[str, Histogram] = {}

    def woken(self, class_name: str, seconds: float) -> None:
        """Count the time that a call of this class waited while its model was made ready, whatever its outcome."""
        histogram = self._waits.get(class_name)
        if histogram is None:
            histogram = self._waits[class_name] = Histogram()
        histogram.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """The metric families at this moment."""
        registry = self._dispatch.sidecars
        if not (registry.sidecars or any(registry.counts.values())):
            return
        now = self._dispatch.clock()
        heard = GaugeMetricFamily("weir_sidecar_heard_seconds", "Since its last report.", labels=("sidecar",))
        for name, sidecar in islice(registry.sidecars.items(), MOST):
            heard.add_metric((name,), now - sidecar.reported_at)
        stale = sum(sidecar.stale(now) for sidecar in registry.sidecars.values())
        known = GaugeMetricFamily("weir_sidecars", "Sidecars, by whether they are heard.", labels=("state",))
        known.add_metric(("heard",), len(registry.sidecars) - stale)
        known.add_metric(("stale",), stale)
        reports = CounterMetricFamily(
            "weir_sidecar_reports", "Reports, and addresses in them that were refused.", labels=("result",)
        )
        for result, count in registry.counts.items():
            reports.add_metric((result,), count)
        ensures = CounterMetricFamily("weir_sidecar_ensures", "Requests to have a model ready.", labels=("result",))
        for result, count in self._asked.items():
            ensures.add_metric((result,), count)
        copies = CounterMetricFamily(
            "weir_copies", "Copies of full models, by what became of them and why.", labels=("result", "reason")
        )
        for labels, count in sorted(registry.copies.counts.items()):
            copies.add_metric(labels, count)
        waits = HistogramMetricFamily(
            "weir_wake_wait_seconds", "Calls held while a model was made ready, until they went.", labels=("class",)
        )
        for name, histogram in self._waits.items():
            waits.add_metric((name,), histogram.buckets(), histogram.sum)
        yield from (known, heard, reports, ensures, copies, waits, _models(registry, now))


def _models(registry: Registry, now: float) -> Metric:
    family = GaugeMetricFamily("weir_sidecar_models", "Profiles by model and state.", labels=("model", "state"))
    counts: dict[str, dict[str, int]] = {}
    for sidecar in registry.sidecars.values():
        for model in () if sidecar.stale(now) else sidecar.models.values():
            if model.model in counts or len(counts) < MOST:
                able = "cannot be had" if model.ready_in is None else "can be had"
                state = "awake" if awake(model) else "being made ready" if beginning(model) else able
                states = counts.setdefault(model.model, dict.fromkeys(STATES, 0))
                states[state] += 1
    for name, states in counts.items():
        for state, count in states.items():
            family.add_metric((name, state.replace(" ", "_")), count)
    return family
