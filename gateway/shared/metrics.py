"""Metric families of Prometheus, made at each scrape of numbers that are counted elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Key: TypeAlias = str | Sequence[str]  # value of the one label, or values of all labels
Values: TypeAlias = float | Mapping[Any, float] | Iterable[tuple[Key, float]]  # one number without labels, or rows
Histograms: TypeAlias = Iterable[tuple[Key, Sequence[Any], float]]  # labels, buckets, sum


def gauge(name: str, text: str, *labels: str, of: Values) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), of)


def counter(name: str, text: str, *labels: str, of: Values) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), of)


def histogram(name: str, text: str, *labels: str, of: Histograms) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, buckets, total in of:
        family.add_metric(_labels(key), buckets, total)
    return family


def _filled(family: GaugeMetricFamily | CounterMetricFamily, of: Values) -> Metric:
    if isinstance(of, (int, float)):
        family.add_metric((), of)
        return family
    for key, value in of.items() if isinstance(of, Mapping) else of:
        family.add_metric(_labels(key), value)
    return family


def _labels(key: Key) -> Sequence[str]:
    return (key,) if isinstance(key, str) else key
