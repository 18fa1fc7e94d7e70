"""Rates of counters read at different times: by real elapsed time, over restarts; quantiles worked out by hand."""

from __future__ import annotations

import pytest

from gateway.top.rates import WINDOW, Grown, growth
from gateway.top.sample import Counts, Point

A, B = ("calls", "a", "ok"), ("calls", "b", "ok")


def points(*read: tuple[float, float]) -> list[Point]:
    return [Point(at, {A: count}) for at, count in read]


@pytest.mark.parametrize(
    ("older", "newer", "expected"),
    [
        ({}, {A: 3}, {A: 3}),
        ({A: 3}, {A: 5}, {A: 2}),
        ({A: 3}, {A: 5, B: 4}, {A: 2, B: 4}),
        ({A: 3}, {A: 2}, {A: 2}),  # began again: all that it counts has come since
        ({A: 3, B: 9}, {A: 4, B: 1}, {A: 4, B: 1}),  # one fell, so all began again
        ({A: 3}, {}, {}),
        ({A: 3}, {B: 7}, {B: 7}),
    ],
)
def test_growth(older: Counts, newer: Counts, expected: Counts) -> None:
    assert growth(older, newer) == expected


@pytest.mark.parametrize(
    ("read", "rate", "seconds"),
    [
        ([(0.0, 5.0)], None, 0.0),
        ([(0.0, 0.0), (1.0, 5.0)], 5.0, 1.0),
        ([(0.0, 0.0), (4.0, 5.0)], 1.25, 4.0),  # the time that passed, whatever was asked for
        ([(0.0, 0.0), (1.0, 5.0), (1.0, 9.0)], 5.0, 1.0),  # no time at all tells nothing
        ([(0.0, 0.0), (2.0, 100.0), (WINDOW + 2.0, 110.0)], 1.0, WINDOW),  # what was before the window is over
        ([(0.0, 0.0), (60.0, 120.0)], 2.0, 60.0),  # away for a minute: the last step at least
        ([(0.0, 50.0), (1.0, 60.0), (2.0, 4.0)], 7.0, 2.0),
    ],
)
def test_rate(read: list[tuple[float, float]], rate: float | None, seconds: float) -> None:
    grown = Grown(points(*read))
    assert (grown.rate(A), grown.seconds) == (rate, seconds)


def test_history_is_of_every_step_and_never_negative() -> None:
    grown = Grown(points((0.0, 0.0), (1.0, 5.0), (3.0, 6.0), (4.0, 2.0), (40.0, 2.0)))
    assert grown.history(A) == [5.0, 0.5, 2.0, 0.0]
    assert grown.history(A, B) == [5.0, 0.5, 2.0, 0.0]


def test_a_restart_is_told_as_long_as_rates_look_back_to_it() -> None:
    before = ((0.0, 9.0), (1.0, 1.0))
    assert Grown(points(*before)).restarted
    assert Grown(points(*before, (WINDOW, 2.0))).restarted
    assert not Grown(points(*before, (WINDOW + 2.0, 2.0))).restarted


def histogram(**buckets: float) -> Grown:
    counts = {("wait", "a", bound): count for bound, count in buckets.items()}
    return Grown([Point(0.0, {}), Point(1.0, counts)])


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        (0.0, 0.0),
        (0.25, 0.5),  # rank 5 of the 10 up to 1.0
        (0.5, 1.0),
        (0.75, 1.5),  # rank 15: half of those between 1 and 2
        (0.9, 1.8),
        (0.99, 2.0),  # above the last bound nothing is known
    ],
)
def test_quantile(q: float, expected: float) -> None:
    grown = histogram(**{"1.0": 10.0, "2.0": 20.0, "3.0": 20.0, "+Inf": 20.0} if q < 0.95 else
                      {"1.0": 10.0, "2.0": 15.0, "+Inf": 20.0})  # fmt: skip
    assert grown.quantile(q, "wait", "a") == pytest.approx(expected)


def test_no_quantile_of_nothing() -> None:
    assert histogram().quantile(0.5, "wait", "a") is None
    assert histogram(**{"1.0": 0.0, "+Inf": 0.0}).quantile(0.5, "wait", "a") is None
    assert histogram(**{"1.0": 3.0, "+Inf": 3.0}).quantile(0.5, "wait", "b") is None
