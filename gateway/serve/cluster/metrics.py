"""Metric families of a cluster, as one member knows it."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from gateway.control.cluster import ClusterView


def cluster_families(view: ClusterView) -> Iterable[Metric]:
    """The metric families at this moment."""
    yield GaugeMetricFamily("weir_cluster_ruling", "1: this gateway's decider rules.", value=view.ruling)
    yield GaugeMetricFamily("weir_cluster_granting", "1: it rules, and may grant.", value=view.granting)
    yield GaugeMetricFamily("weir_cluster_epoch", "The highest epoch of a ruler that is known.", value=view.epoch)
    since = 0.0 if view.since_s is None else view.since_s
    yield GaugeMetricFamily("weir_cluster_rule_seconds", "Since who rules does; 0: nobody.", value=since)
    yield GaugeMetricFamily("weir_cluster_store_up", "1: the store has answered last.", value=view.store_error is None)
    members = GaugeMetricFamily("weir_cluster_members", "Members, by whether they are silent.", labels=("state",))
    members.add_metric(("here",), len(view.members))
    members.add_metric(("silent",), len(view.gone))
    yield members
