"""Engines that hold what nobody foresaw, and memory that goes while room is made, in virtual time."""

from __future__ import annotations

import asyncio
import functools

import pytest

from loadtest.engine.true_memory import TrueMemory
from loadtest.lab.residency.faults import OTHERS
from loadtest.lab.residency.machine import Listing
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, file
from loadtest.simulate import vtime
from sidecar.gpus.monitor import QUARANTINE
from tests.flow.test_manager import site, used, virtual

GPU = 24 * GIB
GREEDY = Model(weights=6 * GIB, claim=12 * GIB, true=TrueMemory(rest=10 * GIB, context=GIB, beyond=2 * GIB))
LARGE = Model(weights=11 * GIB, claim=21 * GIB, true=TrueMemory(rest=18 * GIB, context=2 * GIB))


@virtual
async def test_a_hung_engine_is_found_while_it_is_drained_to_make_room() -> None:
    async with site("ab", 14 * GIB, a="max_starvation: 1s", b="max_starvation: 1s") as made:
        await used(made, "a")
        call = asyncio.ensure_future(made.gateways[0].call("a", 1.0))
        await asyncio.sleep(0.5)
        made.engines.all["a"].hung = True
        hung = made.now
        wanted = asyncio.ensure_future(made.gateways[0].call("b", 1.0))
        assert (await call).how == "hung"
        assert made.now - hung <= 30.0
        assert (await wanted).ending == "served"


@virtual
async def test_nothing_starts_where_another_has_taken_the_room_that_was_made() -> None:
    async with site("ab", 13 * GIB, a="sleep: null") as made:
        await used(made, "a")
        others = functools.partial(made.machine.others_take, OTHERS, 0, 5 * GIB // 2)
        made.engines.all["a"].process.add_done_callback(lambda _: others())
        assert (await made.gateways[0].call("b", 1.0, 200.0)).ending == "refused"
        assert [name for _, name in made.engines.starts] == ["a"]
        assert made.report("b").why == "no_memory"
        assert made.machine.crowded == []
        made.machine.others_take(OTHERS, 0, 0)
        await asyncio.sleep(2.0)
        assert (await made.gateways[0].call("b", 1.0, 200.0)).ending == "served"


@pytest.mark.parametrize("listing", ["own", "host", "none"])
def test_so_does_one_that_got_ready_while_the_gpus_could_not_be_read(listing: Listing) -> None:
    async def run() -> None:
        models = {"a": GREEDY, "b": LARGE}
        async with Site(file("ab", a="sleep: null"), models, 114 * GIB // 5, listing=listing) as made:
            made.manager.orders.ensure("a")
            while not made.machine.held:
                await asyncio.sleep(0.1)
            made.machine.faults.driver = "it hangs"
            await made.until("a", "running")
            await asyncio.sleep(3.0)
            made.machine.faults.driver = ""
            await asyncio.sleep(3.0)
            assert (await made.gateways[0].call("b", 1.0, 300.0)).ending == "served"
            assert [name for _, name in made.engines.starts] == ["a", "b"]

    vtime.run(run())


@pytest.mark.parametrize("listing", ["own", "host", "none"])
def test_an_engine_that_takes_more_than_its_claim_gives_that_back_to_the_plan(listing: Listing) -> None:
    async def run() -> None:
        models = {"a": GREEDY, "b": LARGE}
        async with Site(file("ab", a="sleep: null"), models, GPU, listing=listing) as made:
            await used(made, "a")
            held = made.machine.held[made.engines.all["a"].pid][0]
            assert made.entry("a").size.claim == held > made.entry("a").size.start_needs
            assert (await made.gateways[0].call("b", 1.0, 100.0)).ending == "served"
            assert made.left_over() == []

    vtime.run(run())


@virtual
async def test_an_engine_on_several_gpus_goes_to_those_that_it_was_sized_for() -> None:
    several = Model(weights=6 * GIB, claim=12 * GIB, true=TrueMemory(rest=10 * GIB, context=GIB))
    async with Site(file("a", 3, a="tensor_parallel: 2"), {"a": several}, 16 * GIB, 40 * GIB, 40 * GIB) as made:
        made.machine.others_take(OTHERS, 0, 14 * GIB)  # the smallest is full
        await asyncio.sleep(2.0)
        assert (await made.gateways[0].call("a", 1.0, 100.0)).ending == "served"
        engine = made.engines.all["a"]
        assert engine.gpus == (1, 2)
        assert made.machine.held[engine.pid][1] <= made.entry("a").size.claim <= 13 * GIB
        made.machine.others_take(OTHERS, 0, 0)


@virtual
async def test_a_quarantine_that_nothing_ends_is_over_after_a_while() -> None:
    async with site("ab", sound=False, a="sleep: null") as made:
        await used(made, "a")
        made.machine.faults.kept = 3600.0
        made.manager.orders.give("a", "stop")
        await made.until("a", "stopped")
        assert [each.index for each in made.manager.machine.monitor.gpus if each.refused] == [0]
        made.machine.faults.kept = 0.0
        assert (await made.gateways[0].call("b", 1.0, 60.0)).ending == "refused"
        await asyncio.sleep(QUARANTINE + 2.0)
        assert (await made.gateways[0].call("b", 1.0, 60.0)).ending == "served", "11 GiB of 24 are another's now"
        await made.close()
        made.machine.held.clear()


@virtual
async def test_one_that_fails_and_held_less_than_its_claim_takes_no_more_until_it_has_ended() -> None:
    thrifty = Model(weights=6 * GIB, claim=12 * GIB, true=TrueMemory(rest=9 * GIB, context=GIB, beyond=-GIB))
    greedy = Model(weights=4 * GIB, claim=9 * GIB, true=TrueMemory(rest=8 * GIB, context=GIB // 2, beyond=GIB))
    total = 45 * GIB // 2
    async with Site(file("ab"), {"a": thrifty, "b": greedy}, total) as made:
        await used(made, "a", "b")
        assert made.state() == "a running, b running"
        assert sum(made.entry(name).size.claim for name in "ab") > total, "by the ledger, and not really"
        made.machine.faults.fail_sleep = 1
        made.manager.orders.give("a", "sleep")
        await asyncio.sleep(20.0)
        assert made.wrong == []
