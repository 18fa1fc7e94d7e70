"""Length distributions: shapes, bounds, and reproducibility from a seed."""

from __future__ import annotations

import math
import random
from statistics import fmean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.load.lengths import Length, LogNormal, Uniform


def drawn(length: Length, seed: int = 1, count: int = 4000) -> list[int]:
    rng = random.Random(seed)
    return [length.draw(rng) for _ in range(count)]


def test_constant() -> None:
    assert set(drawn(Length(constant=7))) == {7}


def test_uniform_takes_both_ends() -> None:
    found = drawn(Length(uniform=Uniform(3, 6)))
    assert set(found) == {3, 4, 5, 6}
    assert min(found.count(value) for value in range(3, 7)) > 900


def test_log_normal_has_its_median_and_sigma() -> None:
    found = drawn(Length(log_normal=LogNormal(300, 0.6)))
    assert median(found) == pytest.approx(300, rel=0.03)
    assert stdev(map(math.log, found)) == pytest.approx(0.6, rel=0.03)


@pytest.mark.parametrize("mean", [1.0, 1.5, 6.5])
def test_geometric_has_its_mean(mean: float) -> None:
    found = drawn(Length(geometric=mean))
    assert min(found) == 1
    assert fmean(found) == pytest.approx(mean, rel=0.04)
    assert found.count(1) / len(found) == pytest.approx(1.0 / mean, rel=0.08)


def test_empirical_draws_entries_as_often_as_they_are_there() -> None:
    found = drawn(Length(empirical=(256, 512, 512, 512)))
    assert set(found) == {256, 512}
    assert found.count(512) / len(found) == pytest.approx(0.75, abs=0.03)


def test_no_distribution_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="a length of no distribution"):
        Length().draw(random.Random(1))


DISTRIBUTIONS = st.one_of(
    st.builds(Length, constant=st.integers(1, 10_000)),
    st.builds(lambda low, more: Length(uniform=Uniform(low, low + more)), st.integers(1, 500), st.integers(0, 500)),
    st.builds(lambda mid, sigma: Length(log_normal=LogNormal(mid, sigma)), st.integers(1, 9999), st.floats(0.0, 5.0)),
    st.builds(Length, geometric=st.floats(1.0, 100.0)),
    st.builds(Length, empirical=st.lists(st.integers(1, 10_000), min_size=1, max_size=9).map(tuple)),
)  # fmt: skip


@given(DISTRIBUTIONS, st.integers(1, 500), st.integers(0, 500), st.integers())
def test_bounds_hold_and_a_seed_is_enough(length: Length, least: int, more: int, seed: int) -> None:
    bounded = Length(
        constant=length.constant, uniform=length.uniform, log_normal=length.log_normal, geometric=length.geometric,
        empirical=length.empirical, least=least, most=least + more,
    )  # fmt: skip
    found = drawn(bounded, seed, 20)
    assert all(least <= value <= least + more for value in found)
    assert found == drawn(bounded, seed, 20)
