"""Starts on a GPU that others fill meanwhile, in virtual time: the slower one learns nothing of that."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.engine.true_memory import TrueMemory
from loadtest.lab.residency.machine import Listing
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted, file
from loadtest.simulate import vtime
from sidecar.core.lifecycle import FIRST_REST
from tests.flow.test_manager import virtual

CLAIM, GPU = 12 * GIB, 20 * GIB
OTHERS = 7  # a process that is no engine's
LISTINGS = ["own", *(pytest.param(each, marks=pytest.mark.slow) for each in ("host", "none"))]


def model(wording: int = 0) -> Model:
    return Model(weights=6 * GIB, claim=CLAIM, true=TrueMemory(rest=CLAIM - GIB, context=GIB, wording=wording))


@pytest.mark.parametrize("listing", LISTINGS)
@pytest.mark.parametrize("apart", [0.0, 0.5, 6.0])
def test_of_two_sidecars_that_start_at_once_the_slower_one_is_served_later(listing: Listing, apart: float) -> None:
    """`apart`: seconds between the two, before the first has taken anything, or all."""

    async def run() -> None:
        text, models = file("a"), {"a": model(wording=5)}
        async with (
            Site(text, models, GPU, listing=listing) as first,
            Site(text, models, shares_with=first) as second,
        ):
            first.manager.orders.ensure("a")
            await asyncio.sleep(apart)
            second.manager.orders.ensure("a")
            await first.until("a", "running")
            await asyncio.sleep(60.0)
            assert len(first.engines.tried) == 1
            assert len(second.engines.tried) <= 1
            assert second.lessons == {}
            assert not second.entry("a").unusable
            first.manager.orders.give("a", "stop")
            await second.until("a", "running")
            assert len(second.engines.tried) <= 2
            assert max(first.machine.most_used) <= GPU

    vtime.run(run())


@pytest.mark.parametrize("listing", LISTINGS)
@pytest.mark.parametrize(("after", "failed"), [(1.0, "free_memory_too_low"), (8.0, "oom")])
def test_a_process_that_takes_the_room_meanwhile_teaches_nothing(listing: Listing, after: float, failed: str) -> None:
    async def run() -> None:
        async with Site(file("a"), {"a": model(wording=5)}, GPU, listing=listing) as made:
            made.manager.orders.ensure("a")
            await asyncio.sleep(after)
            made.machine.others_take(OTHERS, 0, 9 * GIB)
            await made.until("a", "error")
            assert [each.failed for each in made.engines.tried] == [failed]
            assert made.lessons == {}
            await asyncio.sleep(FIRST_REST + 100.0)
            assert len(made.engines.tried) == 1, "nothing is started where there is no room"
            made.machine.others_take(OTHERS, 0, 0)
            await made.until("a", "running")
            assert len(made.engines.tried) == 2
            assert counted(made, "taught") == {"a": 1}

    vtime.run(run())


@virtual
async def test_a_process_that_leaves_enough_is_not_to_blame() -> None:
    really = Model(weights=6 * GIB, claim=CLAIM, true=TrueMemory(rest=CLAIM - GIB, context=GIB, beyond=2 * GIB))
    async with Site(file("a"), {"a": really}, GPU) as made:
        made.manager.orders.ensure("a")
        await asyncio.sleep(1.0)
        made.machine.others_take(OTHERS, 0, 6 * GIB)
        await asyncio.sleep(60.0)
        assert made.engines.tried[0].failed == "oom"
        assert made.lessons["a"].beyond >= GIB // 2
        made.machine.others_take(OTHERS, 0, 0)
        await made.until("a", "running")
