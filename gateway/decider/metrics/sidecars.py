"""Metric families of sidecars: which of them report, the models they can have ready, the waits of calls for those.

Values are read from the registry at each scrape; only waits are counted as they end. Labels are models of
reports, of which at most MOST appear, so no sidecar can flood the exposition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from gateway.core.histogram import Histogram
from gateway.core.sidecars.sidecar import awake, beginning
from gateway.core.sidecars.sidecars import Registry
from gateway.decider.dispatch import Dispatch
from gateway.shared.metrics import counter, gauge, histogram

MOST = 1000  # models
STATES = ("awake", "being_made_ready", "can_be_had", "cannot_be_had")


class SidecarMetrics:
    """Metrics of sidecars. `asked`: requests to sidecars so far, by result. `collect` yields nothing until the first
    report."""

    def __init__(self, dispatch: Dispatch, asked: Mapping[str, int]) -> None:
        self._dispatch = dispatch
        self._asked = asked
        self._waits: dict[str, Histogram] = {}

    def woken(self, class_name: str, seconds: float) -> None:
        """Count the time that a call of this class waited while its model was made ready, whatever its outcome."""
        self._waits.setdefault(class_name, Histogram()).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """The metric families at this moment."""
        registry = self._dispatch.sidecars
        if not (registry.sidecars or any(registry.counts.values())):
            return
        now, sidecars = self._dispatch.clock(), registry.sidecars
        stale = sum(sidecar.stale(now) for sidecar in sidecars.values())
        known = {"heard": len(sidecars) - stale, "stale": stale}
        copies = sorted(registry.copies.counts.items())
        waits = [(name, each.buckets(), each.sum) for name, each in self._waits.items()]
        yield gauge("weir_sidecars", "Sidecars, by whether they are heard.", "state", of=known)
        refused = "Reports, and addresses in them that were refused."
        yield counter("weir_sidecar_reports", refused, "result", of=registry.counts)
        yield counter("weir_sidecar_ensures", "Requests to have a model ready.", "result", of=self._asked)
        text = "Copies of full models, by what became of them and why."
        yield counter("weir_copies", text, "result", "reason", of=copies)
        text = "Calls held while a model was made ready, until they went."
        yield histogram("weir_wake_wait_seconds", text, "class", of=waits)
        states = _states(registry, now)
        yield gauge("weir_sidecar_models", "Profiles by model and state.", "model", "state", of=states)


def _states(registry: Registry, now: float) -> dict[tuple[str, str], int]:
    """Number of profiles by model and state."""
    counts: dict[str, dict[str, int]] = {}
    for sidecar in registry.sidecars.values():
        for model in () if sidecar.stale(now) else sidecar.models.values():
            if model.model in counts or len(counts) < MOST:
                able = "cannot_be_had" if model.ready_in is None else "can_be_had"
                state = "awake" if awake(model) else "being_made_ready" if beginning(model) else able
                states = counts.setdefault(model.model, dict.fromkeys(STATES, 0))
                states[state] += 1
    return {(name, state): count for name, states in counts.items() for state, count in states.items()}
