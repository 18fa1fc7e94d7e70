"""Metric families of Prometheus, made at each scrape of numbers that are counted elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample

Key: TypeAlias = str | Sequence[str]  # value of the one label, or values of all labels
Values: TypeAlias = float | Mapping[Any, float] | Iterable[tuple[Key, float]]  # one number without labels, or rows
Histograms: TypeAlias = Iterable[tuple[Key, Sequence[Any], float]]  # labels, buckets, sum


def gauge(name: str, text: str, *labels: str, of: Values) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), name, labels, of)


def counter(name: str, text: str, *labels: str, of: Values) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), f"{name}_total", labels, of)


def histogram(name: str, text: str, *labels: str, of: Histograms) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, buckets, total in of:
        family.add_metric(_labels(key), buckets, total)
    return family


def _filled(family: Metric, name: str, labels: Sequence[str], of: Values) -> Metric:
    """Fill the family with rows as they are now. Their samples are made once, by whoever writes them, in any thread."""
    if isinstance(of, (int, float)):
        of = [((), of)]
    rows = list(of.items() if isinstance(of, Mapping) else of)
    late = (Sample(name, dict(zip(labels, _labels(key), strict=True)), value) for key, value in rows)
    family.samples = cast("list[Sample]", late)
    return family


def _labels(key: Key) -> Sequence[str]:
    return (key,) if isinstance(key, str) else key
