"""Models that an operator has switched off: nothing but an operator has them run again."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.residency.orders import Refused
from tests.flow.test_manager import site, used, virtual


@virtual
async def test_off_ends_the_engine_once_its_calls_have_ended_and_refuses_new_ones_at_once() -> None:
    async with site("ab") as made:
        await used(made, "a")
        running = asyncio.ensure_future(made.gateways[0].call("a", 10.0))
        await asyncio.sleep(0.1)
        report = made.manager.orders.give("a", "off")
        assert (report.ready_in, report.why) == (None, "off")
        await asyncio.sleep(1.0)
        assert (await made.gateways[0].call("a", 1.0)).ending == "refused"
        assert made.state() == "a running/drain, b stopped"
        assert (await running).ending == "served"
        await made.until("a", "stopped", 2.0)


@virtual
async def test_no_call_gateway_pin_or_restart_starts_what_is_off_until_it_is_on() -> None:
    async with site("ab", a="pin: true") as made:
        await made.until("a", "running")
        made.manager.orders.give("a", "off")
        await made.until("a", "stopped", 2.0)
        for killed in (False, True):
            assert made.manager.orders.ensure("a").why == "off"
            with pytest.raises(Refused, match="a is off: `on` comes first"):
                made.manager.orders.give("a", "wake")
            assert (await made.gateways[0].call("a", 1.0)).ending == "refused"
            await asyncio.sleep(120.0)
            assert made.state() == "a stopped, b stopped"
            await made.again(killed=killed)
        made.manager.orders.give("a", "on")
        await made.until("a", "running", 20.0)


@virtual
async def test_on_leaves_a_model_for_the_next_call() -> None:
    async with site("a") as made:
        made.manager.orders.give("a", "off")
        assert made.manager.orders.give("a", "on").ready_in == 60.0
        await asyncio.sleep(60.0)
        assert made.state() == "a stopped"
        await used(made, "a")


@virtual
async def test_off_while_it_starts_ends_the_start_at_any_moment() -> None:
    for after in (0.0, 0.02, 0.2, 8.0, 13.1):
        async with site("a") as made:
            made.machine.faults.slow = 0.1
            made.manager.orders.ensure("a")
            await asyncio.sleep(after)
            made.manager.orders.give("a", "off")
            assert made.manager.model("a").ready_in is None
            await made.until("a", "stopped", 3.0)
            await asyncio.sleep(60.0)
            assert made.state() == "a stopped"


@virtual
async def test_off_while_others_make_room_for_it_leaves_the_rest_of_them_as_they_are() -> None:
    async with site("abc") as made:
        await used(made, "a", "b")
        await asyncio.sleep(5.0)
        made.manager.orders.ensure("c")
        await asyncio.sleep(0.5)
        assert made.state() == "a running/sleep, b running, c stopped/start"
        made.manager.orders.give("c", "off")
        await asyncio.sleep(60.0)
        assert made.state() == "a sleeping, b running, c stopped"
        assert [name for _, name in made.engines.starts] == ["a", "b"]


@virtual
async def test_off_while_it_wakes_or_sleeps_ends_it_and_no_gateway_sees_it_serve() -> None:
    for waking in (False, True):
        async with site("a") as made:
            await used(made, "a")
            made.machine.faults.slow = 1.0
            made.manager.orders.give("a", "sleep")
            if waking:
                await made.until("a", "sleeping")
                made.manager.orders.ensure("a")
            await asyncio.sleep(0.3)
            made.manager.orders.give("a", "off")
            served = []
            while made.state() != "a stopped":
                served.append(made.entry("a").serves())
                await asyncio.sleep(0.01)
            assert not any(served)


@virtual
async def test_off_settles_one_that_has_failed() -> None:
    async with site("a") as made:
        made.machine.faults.fail_start = 1
        made.manager.orders.ensure("a")
        await made.until("a", "error")
        made.manager.orders.give("a", "off")
        await asyncio.sleep(60.0)
        assert made.state() == "a stopped"
        assert len(made.engines.starts) <= 1


@virtual
async def test_one_that_was_left_running_and_is_off_is_ended_and_never_offered() -> None:
    async with site("a") as made:
        await used(made, "a")
        made.entry("a").off = True
        await made.again(killed=True)
        assert not made.entry("a").serves()
        await made.until("a", "stopped", 5.0)
