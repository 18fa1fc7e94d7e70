"""Engines that an earlier sidecar has left, taken over by the next, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.engine.true_memory import TrueMemory
from loadtest.lab.residency.machine import Listing
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, file
from loadtest.simulate import vtime
from tests.flow.test_manager import GPU, MODEL, site, used, virtual


@virtual
async def test_engines_are_taken_over_as_they_are() -> None:
    for killed in (False, True):
        async with site("abcd", b="sleep: {level: 2}") as made:
            await used(made, "a", "b", "c", "d")
            assert made.state() == "a sleeping, b sleeping, c running, d running"
            pids = {name: made.engines.all[name].pid for name in "abcd"}
            made.engines.all["c"].kill()
            await made.restart(killed=killed)
            assert made.state() == "a sleeping, b sleeping, c stopped, d running"
            assert (made.entry("a").level, made.entry("b").level) == (1, 2)
            await used(made, "d", "a", "b")
            assert {name: made.engines.all[name].pid for name in "abd"} == {name: pids[name] for name in "abd"}


@virtual
async def test_engines_that_hang_hold_up_each_other_no_longer_than_one_would() -> None:
    async with site("abcd", *[GPU] * 4) as made:
        await used(made, *"abcd")
        for engine in made.engines.all.values():
            engine.hung = True
        began = made.now
        await made.restart(killed=True)
        assert made.now - began < 15.0, "10 s are given to each"
        assert made.state() == "a stopped, b stopped, c stopped, d stopped"


@virtual
async def test_one_whose_profile_has_changed_or_gone_is_ended_and_so_is_one_that_is_half_awake() -> None:
    async with site("abc", 36 * GIB, c="sleep: {level: 2}") as made:
        await used(made, "a", "b", "c")
        made.manager.orders.give("c", "sleep")
        await made.until("c", "sleeping")
        made.manager.orders.ensure("c")
        while made.engines.all["c"].woken_at < 0:
            await asyncio.sleep(0.01)
        made.engines.all["c"].level = 0  # its memory is back, its weights are not
        made.engines.models["a"] = Model(weights=6 * GIB, claim=11 * GIB + 1)
        await made.restart(file("ac", c="sleep: {level: 2}"), killed=True)
        assert made.state() == "a stopped, c stopped"
        assert made.machine.held == {}
        assert sum("is ended" in line for _, line in made.log) == 3


@virtual
async def test_a_sidecar_that_is_killed_while_an_engine_starts_leaves_no_engine_behind() -> None:
    async with site("ab") as made:
        await used(made, "a")
        made.manager.orders.ensure("b")
        await asyncio.sleep(8.0)
        await made.restart(killed=True)
        assert made.state() == "a running, b stopped"
        assert [*made.machine.held] == [made.engines.all["a"].pid]


@pytest.mark.parametrize("listing", ["own", "host"])
@pytest.mark.parametrize("keeps", [False, True])
def test_one_that_falls_asleep_as_the_sidecar_ends_is_taken_over_if_its_memory_is_back(
    listing: Listing, keeps: bool
) -> None:
    async def run() -> None:
        async with Site(file("a"), {"a": MODEL}, 24 * GIB, listing=listing) as made:
            await used(made, "a")
            made.machine.faults.keep_asleep = int(keeps)
            made.manager.orders.give("a", "sleep")
            await asyncio.sleep(0.3)
            assert made.state() == "a running/sleep"
            await made.restart(killed=True)
            assert made.state() == ("a stopped" if keeps else "a sleeping")
            assert any("in the middle of falling asleep" in line for _, line in made.log) is keeps
            await used(made, "a")

    vtime.run(run())


@pytest.mark.parametrize("listing", ["own", "host", "none"])
def test_one_that_was_taken_over_asleep_has_what_it_keeps_measured_anew_from_what_it_held_awake(
    listing: Listing,
) -> None:
    keeps = Model(weights=6 * GIB, claim=11 * GIB, true=TrueMemory(rest=10 * GIB, context=GIB, residue=5 * GIB))

    async def run() -> None:
        async with Site(file("a"), {"a": keeps}, 24 * GIB, listing=listing) as made:
            await used(made, "a")
            for again in (False, True):
                made.manager.orders.give("a", "sleep")
                await made.until("a", "sleeping")
                assert made.entry("a").size.residue == pytest.approx(5 * GIB, rel=0.05)
                if not again:
                    await made.restart(killed=True)
                    assert made.state() == "a sleeping"
                    await used(made, "a")

    vtime.run(run())


@virtual
async def test_a_model_that_is_wanted_while_there_is_no_sidecar_is_asked_for_once_another_listens() -> None:
    async with site("ab") as made:
        await used(made, "a")
        made.manager.orders.give("a", "sleep")
        await asyncio.sleep(0.3)
        again = asyncio.ensure_future(made.restart(killed=True))
        await asyncio.sleep(0.1)
        assert (await made.gateways[0].call("b", 1.0)).ending == "served"
        await again
