"""Models that an operator has switched off: nothing but an operator has them run again."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.residency import sleep_steps
from sidecar.residency.orders import Refused
from sidecar.residency.state_file import SavedState
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
                made.manager.orders.give("a", "sleep")
            assert (await made.gateways[0].call("a", 1.0)).ending == "refused"
            await asyncio.sleep(120.0)
            assert made.state() == "a stopped, b stopped"
            await made.restart(killed=killed)
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
            assert made.report("a").ready_in is None
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
async def test_what_is_switched_off_while_it_wakes_is_withdrawn_in_the_instant_it_is_awake() -> None:
    async with site("a") as made:
        await used(made, "a")
        made.manager.orders.give("a", "sleep")
        await made.until("a", "sleeping")
        entry, served = made.entry("a"), []

        async def wake() -> None:
            await sleep_steps.wake(made.manager.machine, entry)
            served.append(entry.serves())  # a report may be made now

        entry.lifecycle.step("wake", made.now)
        made.manager.machine.tasks.begin(["a"], entry.gpus, wake())
        entry.off = True
        await made.until("a", "stopped", 5.0)
        assert served == [False]


@virtual
async def test_one_that_was_left_running_and_is_off_is_never_offered_and_is_ended() -> None:
    async with site("a", sound=False) as made:
        await used(made, "a")
        record = made.manager.machine.record(made.entry("a"))
        assert record is not None
        await made._stop()
        made.manager = made._made(SavedState(engines={"a": record}, off=("a",)))
        await made.manager.open()
        assert not made.entry("a").serves(), "a report may be made now"
        running = asyncio.ensure_future(made.manager.run())
        await made.until("a", "stopped", 5.0)
        running.cancel()
        await asyncio.wait((running,))


@virtual
async def test_evictions_are_counted_by_kind_and_reason_and_starts_by_profile() -> None:
    async with site("abc", b="sleep: null, stop_after: 60s") as made:
        await used(made, "a", "b", "c")
        models = made.manager.entries.values()
        assert [each.evictions for each in models] == [{("sleep", "room"): 1}, {}, {}]
        await asyncio.sleep(90.0)
        made.manager.orders.give("c", "sleep")
        await made.until("c", "sleeping")
        made.manager.orders.give("c", "stop")
        await made.until("c", "stopped")
        made.manager.orders.give("a", "off")
        await made.until("a", "stopped")
        assert [each.evictions for each in models] == [
            {("sleep", "room"): 1, ("stop", "off"): 1},
            {("stop", "idle"): 1},
            {("sleep", "order"): 1, ("stop", "order"): 1},
        ]
        assert [each.starts for each in models] == [1, 1, 1]
        made.machine.faults.fail_start = 1
        made.manager.orders.ensure("b")
        await made.until("b", "running")
        assert (made.entry("b").starts, made.entry("b").failed_starts.total()) == (3, 1)
