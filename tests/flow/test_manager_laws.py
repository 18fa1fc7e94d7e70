"""What holds of the sidecar's manager whatever people order, whatever breaks and whenever calls come.

Every call ends within its patience, and is cut off only where its engine was harmed; nothing is sent to an engine that
does not serve; no GPU is promised twice and no two engines of one start, sleep or wake at once. When it is quiet again,
all memory belongs to an engine that runs or sleeps, and all engines have ended when the sidecar has ended them.
"""

from __future__ import annotations

import pytest

from loadtest import vtime
from loadtest.residency_faults import TEXT, TOTALS, Storm, models, storm
from loadtest.residency_site import opened


async def weathered(seed: int, *, orders: bool, events: int = 100, seconds: float = 600.0) -> Storm:
    """One storm on two GPUs, and nothing wrong after it."""
    async with opened(TEXT, models(), *TOTALS, gateways=2) as made:
        found = await storm(made, seed, events=events, seconds=seconds, orders=orders)
        assert found.wrong == []
        assert made.left_over() == []
        assert made.machine.overlaps == []
    assert made.machine.held == {}
    return found


def test_a_short_storm_of_faults_and_orders() -> None:
    found = vtime.run(weathered(3, orders=True, events=20, seconds=100.0))
    assert found.answers["served"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("orders", [False, True], ids=["faults", "faults and orders"])
@pytest.mark.parametrize("seed", range(6))
def test_a_hundred_faults_in_ten_minutes(seed: int, orders: bool) -> None:
    found = vtime.run(weathered(seed, orders=orders))
    assert found.answers["served"] > 50
    assert found.events.total() == 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_an_order_or_a_fault_every_half_second(seed: int) -> None:
    vtime.run(weathered(seed, orders=True, events=400, seconds=200.0))
