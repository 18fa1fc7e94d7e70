"""Quantile sketches: exact ones against values worked out by hand, long ones against the exact answer and its bound."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from loadtest.report import sketch
from loadtest.report.sketch import ERROR, EXACT, Sketch, quantile_of


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([], 0.5, 0.0),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.5),  # rank 1.5
        ([1.0, 2.0, 3.0, 4.0], 0.9, 3.7),  # rank 2.7
        ([1.0, 2.0, 3.0, 4.0], 0.0, 1.0),
        ([1.0, 2.0, 3.0, 4.0], 1.0, 4.0),
        ([10.0, 20.0, 100.0], 0.25, 15.0),  # rank 0.5
    ],
)
def test_quantiles_lie_between_the_closest_ranks(values: list[float], q: float, expected: float) -> None:
    assert quantile_of(values, q) == pytest.approx(expected)
    assert Sketch(reversed(values)).quantile(q) == pytest.approx(expected)


def test_a_short_one_is_exact() -> None:
    own = Sketch([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert (len(own), own.mean, own.deviation, own.largest, own.exact) == (8, 5.0, 2.0, 9.0, True)
    empty = Sketch()
    assert (len(empty), empty.mean, empty.deviation, empty.largest, empty.quantile(0.5)) == (0, 0.0, 0.0, 0.0, 0.0)


def in_buckets(monkeypatch: pytest.MonkeyPatch, values: list[float], exact: int) -> Sketch:
    """What comes of these values where only `exact` are kept as they are."""
    monkeypatch.setattr(sketch, "EXACT", exact)
    return Sketch(values)


def test_a_long_one_is_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    values = [0.05 * math.exp(rng.gauss(0.0, 1.5)) for _ in range(20_000)] + [0.0, 1e-7, 5_000.0]
    own = in_buckets(monkeypatch, values, 1_000)
    ordered = sorted(values)
    qs = [0.0, 0.0001, 0.01, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0]
    for q, found in zip(qs, own.quantiles(qs), strict=True):
        assert found == pytest.approx(quantile_of(ordered, q), rel=ERROR * 1.0001)
    assert ERROR <= 0.01
    assert not own.exact
    assert len(own) == 20_003
    assert own.mean == pytest.approx(statistics.fmean(values))
    assert own.deviation == pytest.approx(statistics.pstdev(values))
    assert own.largest == 5_000.0
    assert EXACT == 100_000


def test_merging_is_as_if_all_had_come_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(8)
    values = [rng.expovariate(3.0) for _ in range(5_000)]
    whole = in_buckets(monkeypatch, values, 800)
    pieces = [Sketch(values[:700]), Sketch(values[700:4_000]), Sketch(), Sketch(values[4_000:])]  # two have buckets
    for order in (pieces, pieces[::-1]):
        merged = Sketch()
        for piece in order:
            merged.merge(piece)
        assert merged.quantiles([0.01, 0.5, 0.99]) == whole.quantiles([0.01, 0.5, 0.99])
        assert (len(merged), merged.largest) == (len(whole), whole.largest)
        assert merged.mean == pytest.approx(whole.mean)
        assert merged.deviation == pytest.approx(whole.deviation)
    assert [len(piece) for piece in pieces] == [700, 3_300, 0, 1_000]


def test_memory_does_not_grow_with_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on their range: from 1 us to an hour are 4,100 buckets."""
    monkeypatch.setattr(sketch, "EXACT", 500)
    rng = random.Random(9)
    own = Sketch()
    for _ in range(40):
        own.extend(10 ** rng.uniform(-6.0, 3.55) for _ in range(1_000))
    assert own.held <= 4_100 + 500


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf, 1e31])
def test_what_is_no_latency_is_refused(bad: float) -> None:
    own = Sketch([1.0])
    with pytest.raises(ValueError, match="from 0 to"):
        own.add(bad)
    with pytest.raises(ValueError, match="from 0 to"):
        own.extend([0.5, bad, 0.5])
    assert len(own) == 1
