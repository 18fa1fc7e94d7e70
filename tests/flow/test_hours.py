"""Schedules and preloading in virtual time, in which it is midnight when a sidecar starts."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted, file
from loadtest.simulate import vtime
from tests.flow.test_file_changes import OTHER, clean, site, text

MODEL = Model(weights=6 * GIB, claim=11 * GIB)  # 13.2 s to start; two fit on the GPU
TEN = 600.0  # minutes


def test_a_model_is_off_outside_its_hours_and_a_refusal_says_when_it_is_on() -> None:
    async def scene() -> None:
        async with site(a="schedule: [{between: 00:10-00:20, keep: on}]", b="") as made:
            await asyncio.sleep(200.0)
            refused = await made.gateways[0].call("a", 1.0)
            assert refused.ending == "refused"
            assert refused.retry_after == pytest.approx(401.0, abs=1.0)
            report = made.manager.model("a")
            assert (report.why, report.ready_in) == ("hours", None)
            made.manager.orders.ensure("a")
            await asyncio.sleep(300.0)
            assert counted(made, "ready") == {}
            await asyncio.sleep(refused.retry_after - 300.0)
            assert (await made.gateways[0].call("a", 1.0)).ending == "served"
            clean(made)

    vtime.run(scene())


def test_calls_end_before_it_goes_off_and_it_is_there_again_in_the_morning() -> None:
    async def scene() -> None:
        async with site(a="schedule: [{between: 00:10-00:20, keep: off}]", b="") as made:
            await asyncio.sleep(TEN - 60.0)
            assert (await made.gateways[0].call("a", 1.0)).ending == "served"
            long = asyncio.ensure_future(made.gateways[0].call("a", 300.0))
            await asyncio.sleep(60.0)
            assert not made.gateways[0].serves("a")
            assert (await made.gateways[0].call("a", 1.0)).ending == "refused"
            assert (await made.gateways[0].call("b", 1.0)).ending == "served", "another of its GPU starts meanwhile"
            assert (await long).ending == "served"
            await made.until("a", "stopped", 20.0)
            await asyncio.sleep(TEN)
            assert (await made.gateways[0].call("a", 1.0)).ending == "served"
            clean(made)

    vtime.run(scene())


def test_a_drain_that_its_hours_overtake_is_taken_back_by_a_file_without_them() -> None:
    async def scene() -> None:
        async with site(a="schedule: [{between: 00:01-02:00, keep: off}]", b="") as made:
            await made.gateways[0].call("a", 1.0)
            long = asyncio.ensure_future(made.gateways[0].call("a", 200.0))
            await asyncio.sleep(100.0)
            assert not made.gateways[0].serves("a")
            made.reload(text(a="", b=""))
            await asyncio.sleep(2.0)
            assert made.gateways[0].serves("a")
            assert (await long).ending == "served"
            assert counted(made, "ready") == {"a": 1}
            clean(made)

    vtime.run(scene())


def test_pinned_and_preloaded_hours() -> None:
    async def scene() -> None:
        pinned = "schedule: [{between: 00:10-00:20, keep: pinned}], stop_after: 1m"
        loaded = "schedule: [{between: 00:10-00:20, keep: preloaded}], stop_after: 1m"
        async with site(a=pinned, b=loaded, c=loaded) as made:
            await asyncio.sleep(TEN - 1.0)
            assert counted(made, "ready") == {}
            await asyncio.sleep(40.0)
            assert counted(made, "ready") == {"a": 1, "b": 1}, "c has no room, and evicts nobody"
            await asyncio.sleep(300.0)
            assert made.state() == "a running, b stopped, c stopped"
            await asyncio.sleep(TEN)
            assert made.state() == "a stopped, b stopped, c stopped"
            clean(made)

    vtime.run(scene())


def test_preloaded_models_start_in_the_files_order_while_there_is_room() -> None:
    async def scene() -> None:
        names = "dcab"
        every = dict.fromkeys(names, "preload: true, stop_after: 10m")
        async with Site(file(names, **every), dict.fromkeys(names, MODEL), 24 * GIB, hot=0.0) as made:
            await asyncio.sleep(60.0)
            assert [name for _, name in made.engines.starts] == ["d", "c"]
            missed = [f"{name} is not preloaded: others would have to make room" for name in "ab"]
            assert [line for _, line in made.log if "preloaded" in line] == missed
            assert made.manager.troubles() == tuple(missed)
            await asyncio.sleep(1200.0)
            assert made.state() == "d stopped, c stopped, a stopped, b stopped", "once, and nobody takes their place"
            assert len(made.engines.starts) == 2
            assert (await made.gateways[0].call("a", 1.0)).ending == "served"
            assert made.manager.troubles() == tuple(missed[1:])
            made.reload(file(names, **every | {"b": "stop_after: 10m"}))
            assert made.manager.troubles() == ()
            clean(made)

    vtime.run(scene())


def test_a_preloaded_model_that_was_awake_comes_back_with_new_settings_at_once() -> None:
    async def scene() -> None:
        async with site(a="preload: true", b="") as made:
            await made.until("a", "running")
            made.reload(text(a=f"preload: true, {OTHER}", b="preload: true"))
            await asyncio.sleep(60.0)
            assert counted(made, "ready") == {"a": 2, "b": 1}
            made.manager.orders.give("a", "stop")
            await asyncio.sleep(5.0)
            made.reload(text(a="preload: true, context_length: 9", b="preload: true"))
            await asyncio.sleep(60.0)
            assert counted(made, "ready")["a"] == 2, "it was stopped by hand"
            clean(made)

    vtime.run(scene())
