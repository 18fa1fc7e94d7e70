"""Metric families of a cluster, as one member knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from prometheus_client.core import GaugeMetricFamily, Metric

Families: TypeAlias = Callable[[], Iterable[Metric]]


def cluster_families(
    *, leads: bool, granting: bool, epoch: int, since: float, store_up: bool, here: int, silent: int
) -> Iterable[Metric]:
    """The metric families at this moment. `since`: seconds since the leader was elected; `here`, `silent`: members."""
    yield GaugeMetricFamily("weir_cluster_leader", "1: this gateway's decider leads.", value=leads)
    yield GaugeMetricFamily("weir_cluster_granting", "1: it leads, and may grant.", value=granting)
    yield GaugeMetricFamily("weir_cluster_epoch", "The highest epoch of a leader that is known.", value=epoch)
    yield GaugeMetricFamily(
        "weir_cluster_term_seconds", "Seconds since the election; 0: there is no leader.", value=since
    )
    yield GaugeMetricFamily("weir_cluster_store_up", "1: the store has answered last.", value=store_up)
    members = GaugeMetricFamily("weir_cluster_members", "Members, by whether they are silent.", labels=("state",))
    members.add_metric(("here",), here)
    members.add_metric(("silent",), silent)
    yield members
