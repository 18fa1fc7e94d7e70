"""Metric families of tenants' token quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from gateway.core.admission.quotas import QuotaBook


def quota_families(quotas: QuotaBook, clock: Callable[[], float]) -> Iterable[Metric]:
    """The metric families at this moment: of tenants that have a quota."""
    labels = ("tenant", "window")
    used = GaugeMetricFamily("weir_quota_used_tokens", "Tokens used in the calendar window, UTC.", labels=labels)
    amount = GaugeMetricFamily("weir_quota_tokens", "The tenant's quota of the calendar window.", labels=labels)
    for window in quotas:
        if window.amount is not None:
            used.add_metric((window.tenant, window.span), window.used(clock()))
            amount.add_metric((window.tenant, window.span), window.amount)
    yield from (used, amount)
