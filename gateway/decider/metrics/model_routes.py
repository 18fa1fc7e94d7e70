"""Metric families of model routes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.decider.model_routes import ModelRoutes


def route_families(routes: ModelRoutes) -> Iterable[Metric]:
    """The metric families at this moment; none before the first call for a route."""
    if routes.resolved:
        labels = ("asked_model", "model", "how")
        calls = CounterMetricFamily(
            "weir_model_route_calls", "Calls for a route, by the model they got.", labels=labels
        )
        for counted, count in routes.resolved.items():
            calls.add_metric(counted, count)
        yield calls
    canaries = list(routes.canaries())
    if canaries:
        out = GaugeMetricFamily(
            "weir_canary_out", "1 where a canary was taken out of its model route.", labels=("asked_model", "model")
        )
        for name, model, why in canaries:
            out.add_metric((name, model), float(bool(why)))
        yield out
    if routes.mirrored:
        yield from _mirrors(routes)


def _mirrors(routes: ModelRoutes) -> Iterable[Metric]:
    """Both sides of each mirror: the members' answers to calls that were copied, and those to the copies."""
    sides = ("asked_model", "side")
    calls = CounterMetricFamily("weir_mirror_calls", "Calls that were copied, and copies.", labels=(*sides, "result"))
    tokens = CounterMetricFamily("weir_mirror_tokens", "Completion tokens of their answers.", labels=sides)
    ttft = CounterMetricFamily("weir_mirror_ttft_seconds", "Their times to first token, added up.", labels=sides)
    ends = CounterMetricFamily("weir_mirror_finishes", "Their finish reasons.", labels=(*sides, "reason"))
    for side, answers in routes.mirrored.items():
        for result, count in answers.results.items():
            calls.add_metric((*side, result), count)
        for reason, count in answers.finishes.items():
            ends.add_metric((*side, reason), count)
        tokens.add_metric(side, answers.tokens)
        ttft.add_metric(side, answers.ttft)
    yield from (calls, tokens, ttft, ends)
