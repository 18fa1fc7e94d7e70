"""Metric families of the Batch API: batches by state, and what became of their lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def batch_families(states: Mapping[str, int], lines: Mapping[str, int], calls: int) -> Iterable[Metric]:
    """The metric families at this moment. `states`: batches by state; `lines`: by what became of them; `calls`: lines
    that wait or run."""
    batches = GaugeMetricFamily("weir_batches", "Batches of the Batch API, by state.", labels=("status",))
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
