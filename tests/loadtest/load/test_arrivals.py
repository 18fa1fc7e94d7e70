"""Arrival processes: the statistics of each, and the properties of all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise, takewhile
from statistics import fmean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.load.arrivals import Arrivals, Closed, Gamma, Ramp, Rate, RateStep, parse_rate
from tests.loadtest.made_runs import counts_of

RUSH = (RateStep(Rate(4.0), 10.0), RateStep(Rate(0.0), 5.0), RateStep(Rate(40.0), 2.0))
OPEN = {
    "poisson": Arrivals(poisson=Rate(50.0)),
    "gamma": Arrivals(gamma=Gamma(Rate(50.0), 0.5)),
    "constant": Arrivals(constant=Rate(50.0)),
    "up": Arrivals(ramp=Ramp(Rate(0.0), Rate(100.0), 20.0)),
    "down": Arrivals(ramp=Ramp(Rate(100.0), Rate(10.0), 20.0)),
    "flat": Arrivals(ramp=Ramp(Rate(50.0), Rate(50.0), 20.0)),
    "steps": Arrivals(steps=RUSH),
}


def until(seconds: float, times: Iterator[float]) -> list[float]:
    return list(takewhile(lambda at: at < seconds, times))


# -- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"),
    [("5/s", 5.0), ("0.5/s", 0.5), ("600/min", 10.0), ("1.5k/s", 1500.0), ("36/h", 0.01), ("86400/day", 1.0)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)
    read = Rate.parse(text)
    assert read is not None
    assert Rate.parse(str(read)) == read


@pytest.mark.parametrize(
    "text", ["", "5", "5/", "5s", "-5/s", "5/ms", "5 /s", "1e3/s", "0/s", "0.0/min", "inf/s", "٣/s"]
)
def test_no_rates(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a rate such as 5/s, 0\.5/s, 600/min, above 0"):
        parse_rate(text)


# -- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", OPEN.values(), ids=OPEN)
def test_times_are_in_order_and_follow_from_the_seed(arrivals: Arrivals) -> None:
    first, again, other = (until(60.0, arrivals.times(seed)) for seed in (1, 1, 2))
    assert first == again
    assert (first == other) is (arrivals.constant is not None)
    assert first[0] >= 0.0
    assert all(before <= after for before, after in pairwise(first))


@pytest.mark.parametrize("arrivals", OPEN.values(), ids=OPEN)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_as_many_as_the_mean_rate_says(arrivals: Arrivals, factor: float) -> None:
    scaled = arrivals.scaled(factor)
    assert scaled.mean_rate(93.0) == pytest.approx(factor * arrivals.mean_rate(93.0))
    assert len(until(93.0, scaled.times(3))) == pytest.approx(93.0 * scaled.mean_rate(93.0), rel=0.08)


@given(st.floats(0.0, 50.0), st.floats(0.0, 50.0), st.floats(0.1, 100.0), st.floats(1.0, 200.0))
def test_a_ramp_never_goes_back(start: float, end: float, over: float, seconds: float) -> None:
    ramp = Arrivals(ramp=Ramp(Rate(start), Rate(end), over))
    times = list(islice(ramp.times(1), 200))
    assert all(0.0 <= before <= after for before, after in pairwise(times))
    assert end == 0.0 or len(times) == 200
    assert end > 0.0 or all(at <= over * 1.000001 for at in times)
    assert min(start, end) * 0.999 <= ramp.mean_rate(seconds) <= max(start, end) * 1.001


# -- processes --------------------------------------------------------------------------------------------------------


def index_of(times: list[float], width: float, seconds: float) -> float:
    """Return the index of dispersion of counts: sample variance over mean. 1 is Poisson, more is bursts."""
    counts = counts_of(times, width, 0.0, seconds)
    return variance(counts) / fmean(counts)


@pytest.mark.parametrize("seed", [1, 2])
def test_poisson_counts_vary_as_much_as_their_mean(seed: int) -> None:
    times = until(20_000.0, Arrivals(poisson=Rate(6.0)).times(seed))
    assert index_of(times, 1.0, 20_000.0) == pytest.approx(1.0, abs=0.1)
    assert index_of(times, 10.0, 20_000.0) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("burstiness", "index"), [(0.25, 4.0), (1.0, 1.0), (4.0, 0.25)])
def test_gamma_counts_vary_by_burstiness(burstiness: float, index: float) -> None:
    times = until(10_000.0, Arrivals(gamma=Gamma(Rate(10.0), burstiness)).times(1))
    assert index_of(times, 10.0, 10_000.0) == pytest.approx(index, rel=0.15)


def test_constant_times_do_not_drift() -> None:
    times = Arrivals(constant=Rate(10.0)).times(1)
    assert list(islice(times, 4)) == [0.0, 0.1, 0.2, 0.3]
    assert next(islice(times, 999_995, None)) == 99_999.9


def test_a_ramp_is_a_straight_line_and_then_level() -> None:
    counts = counts_of(until(60.0, OPEN["up"].scaled(20.0).times(1)), 10.0, 0.0, 60.0)
    assert counts == [pytest.approx(expected, rel=0.03) for expected in (5000, 15_000, *4 * (20_000,))]


def test_a_ramp_to_nothing_ends() -> None:
    times = list(Arrivals(ramp=Ramp(Rate(100.0), Rate(0.0), 20.0)).times(1))
    assert len(times) == pytest.approx(1000, rel=0.1)
    assert times[-1] <= 20.0


def test_steps_follow_each_other_and_begin_again() -> None:
    times = until(17_000.0, OPEN["steps"].times(1))
    phases = [at % 17.0 for at in times]
    quiet = sum(phase < 10.0 for phase in phases)
    rush = sum(phase >= 15.0 for phase in phases)
    assert quiet == pytest.approx(40_000, rel=0.03)
    assert rush == pytest.approx(80_000, rel=0.03)
    assert quiet + rush == len(times), "in the step without a rate comes nothing"


def test_a_closed_loop_has_no_times_but_those_when_its_clients_begin() -> None:
    closed = Arrivals(closed=Closed(clients=8))
    assert list(islice(closed.times(1), 3)) == [0.0, 0.0, 0.0]
    assert closed.mean_rate(10.0) == 0.0
    assert closed.scaled(1.5).closed == Closed(clients=12)
    assert closed.scaled(0.01).closed == Closed(clients=1)
    assert list(Closed(clients=4, within=2.0, rounds=2).times()) == [0.0, 0.5, 1.0, 1.5, 0.0, 0.0, 0.0, 0.0]


def test_no_arrivals_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="arrivals of no kind"):
        Arrivals().times(1)
