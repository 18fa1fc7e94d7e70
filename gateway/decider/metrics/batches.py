"""Metric families of the Batch API: batches by state, and what became of their lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.decider.relays.totals import added_up


class BatchCounts(Protocol):
    """Counts of one process: `lines` by what became of them; `line_calls`: lines that wait or run now; `batch_states`:
    batches by state, empty where another process works them."""

    @property
    def lines(self) -> Mapping[str, int]: ...

    @property
    def line_calls(self) -> int: ...

    @property
    def batch_states(self) -> Mapping[str, int]: ...


def batch_families(counts: Sequence[BatchCounts]) -> Iterable[Metric]:
    """The metric families at this moment; none, where no process has counted a line, not even to 0."""
    lines = added_up(*(each.lines for each in counts))
    if not lines:
        return
    calls = sum([each.line_calls for each in counts])
    states = added_up(*(each.batch_states for each in counts))
    batches = GaugeMetricFamily("weir_batch_jobs", "Batches of the Batch API, by state.", labels=("status",))
    for status, count in states.items():
        batches.add_metric((status,), count)
    yield batches
    of_batches = CounterMetricFamily(
        "weir_batch_lines", "Lines of batches that got a result, and that were sent once more.", labels=("result",)
    )
    for result, count in lines.items():
        of_batches.add_metric((result,), count)
    yield of_batches
    yield GaugeMetricFamily("weir_batch_calls", "Lines of batches that wait or run now.", calls)
