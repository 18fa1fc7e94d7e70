"""Copies through gateways' own queues and the sidecar's own manager, in virtual time.

Two GPUs with room for one model each. An engine runs two calls at once, ten seconds each.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted
from sidecar.core.inventory import SLEEPS_AFTER
from tests.flow.test_manager import virtual
from tests.gateway_callers import GatewayCall, GatewayCallers

POLICY = """
fleet: {sidecars: {copies: 2s}}
budget: {max_concurrency: 2}
classes: {default: {ttft: 40s, deadline: 200s}}
"""
FILE = """
gpus: [GPUS]
models:
  m: {model_path: /m/m}
  m-2: {model_path: /m/m, served_name: m}
  m-3: {model_path: /m/m, served_name: m}
  other: {model_path: /m/other}
"""
NAMES = ("m", "m-2", "m-3", "other")
MODEL = Model(weights=6 * GIB, claim=11 * GIB)
ROOM = 14 * GIB


@asynccontextmanager
async def machine(
    *, gpus: int = 2, gateways: int = 1, policy: str = POLICY
) -> AsyncIterator[tuple[Site, list[GatewayCallers]]]:
    """A machine whose engines were all made once, of which `m` alone is awake; and gateways over it."""
    text = FILE.replace("GPUS", ", ".join(map(str, range(gpus))))
    async with Site(text, dict.fromkeys(NAMES, MODEL), *[ROOM] * gpus, gateways=0) as site:
        callers = [GatewayCallers(site, policy, seed) for seed in range(gateways)]
        reports = [asyncio.ensure_future(each.run()) for each in callers]
        for name in (*NAMES, "m"):
            site.manager.orders.ensure(name)
            await site.until(name, "running")
        for name in NAMES[1:]:
            if site.manager.entries[name].serves():
                site.manager.orders.give(name, "sleep")
                await site.until(name, "sleeping")
        await asyncio.sleep(30.0)
        assert site.state() == "m running, m-2 sleeping, m-3 sleeping, other sleeping"
        yield site, callers
        await asyncio.sleep(2 * SLEEPS_AFTER)
        assert site.left_over() == []
        assert site.machine.overlaps == []
        for task in reports:
            task.cancel()
        await asyncio.wait(reports)
        for each in callers:
            assert not any(each.gateway.dispatch.queues.values())
            await each.gateway.aclose()
    assert site.machine.held == {}


async def load(callers: GatewayCallers, seconds: float, *, every: float = 2.5, model: str = "m") -> list[GatewayCall]:
    """A call of ten seconds every so often."""
    calls = []
    for _ in range(int(seconds / every)):
        calls.append(asyncio.ensure_future(callers.call(model, 10.0)))
        await asyncio.sleep(every)
    return await asyncio.gather(*calls)


def ends(calls: list[GatewayCall]) -> Counter[str]:
    return Counter(call.ending for call in calls)


@virtual
async def test_a_full_model_wakes_a_second_engine_which_sleeps_again_once_it_idles() -> None:
    async with machine() as (site, (callers,)):
        asleep_on = {name: site.entry(name).gpus for name in ("m", "m-2")}
        assert asleep_on["m"] != asleep_on["m-2"], "engines of one model are kept apart"
        hot = asyncio.ensure_future(load(callers, 200.0))
        await _until_wanted(callers)
        wish = callers.gateway.dispatch.sidecars.copies.wishes["m"]
        assert wish.place == ("machine", "m-2")
        assert wish.wait is not None
        assert wish.wait.class_name == "default"
        assert wish.wait.seconds > wish.ready_in + 2.0 > 2.0
        answers = await hot
        assert ends(answers)["served"] >= 75, ends(answers)
        metrics = callers.gateway.metrics.exposition()().decode()
        assert 'weir_copies_total{reason="waiting",result="woken"} 1.0' in metrics
        assert counted(site, "copy") == {"m-2": 1}
        lines = [line for _, line in callers.log if line.startswith("m: ")]
        assert len(lines) == 2, lines
        assert "it is wanted as a copy" in lines[0]
        assert lines[1] == "m: the copy m-2 of sidecar machine is awake"
        assert site.entry("m-2").copy
        await asyncio.sleep(SLEEPS_AFTER + 15.0)
        assert site.state() == "m running, m-2 sleeping, m-3 sleeping, other sleeping"


async def _until_wanted(callers: GatewayCallers) -> None:
    async with asyncio.timeout(60.0):
        while not callers.gateway.dispatch.sidecars.copies.counts:
            await asyncio.sleep(0.1)


@virtual
async def test_without_copies_the_model_goes_on_with_one() -> None:
    async with machine(policy=POLICY.replace("copies: 2s", "copies: null")) as (site, (callers,)):
        answers = await load(callers, 200.0)
        assert ends(answers)["served"] <= 50
        assert counted(site, "copy") == {}


@pytest.mark.slow
@virtual
async def test_a_model_in_use_does_not_lose_its_place_to_a_copy() -> None:
    async with machine() as (site, (callers,)):
        await callers.call("other", 1.0)
        assert site.entry("other").serves()
        hot = asyncio.ensure_future(load(callers, 160.0))
        answers = await _now_and_then(callers, "other", 100.0)
        assert {answer.ending for answer in answers} == {"served"}
        assert counted(site, "copy") == {}
        await hot
        assert counted(site, "copy").total() == 1, "it has not been used for long enough"


async def _now_and_then(callers: GatewayCallers, model: str, seconds: float) -> list[GatewayCall]:
    answers = []
    for _ in range(int(seconds / 5)):
        answers.append(await callers.call(model, 0.5))
        await asyncio.sleep(4.5)
    return answers


@virtual
async def test_a_copy_gives_its_place_to_a_model_that_no_engine_serves() -> None:
    async with machine() as (site, (callers,)):
        hot = asyncio.ensure_future(load(callers, 120.0))
        await site.until("m-2", "running")
        await asyncio.sleep(20.0)
        answer = await callers.call("other", 1.0)
        assert (answer.ending, answer.waited < 25.0) == ("served", True), "once the calls on the copy have ended"
        assert counted(site, "gave_place") == {"m-2": 1}
        await hot
        assert counted(site, "copy").total() <= 3


@pytest.mark.slow
@virtual
async def test_two_gateways_at_once_wake_one_copy() -> None:
    async with machine(gpus=3, gateways=2) as (site, (one, two)):
        first, second = await asyncio.gather(load(one, 77.0, every=3.5), load(two, 77.0, every=3.5))
        assert counted(site, "copy").total() == 1
        assert ends([*first, *second]) == {"served": 44}


@pytest.mark.slow
@virtual
async def test_more_load_wakes_a_third_once_calls_have_spread_over_two() -> None:
    async with machine(gpus=3) as (site, (callers,)):
        await load(callers, 150.0, every=1.5)
        assert counted(site, "copy") == {"m-2": 1, "m-3": 1}


@pytest.mark.slow
@virtual
async def test_a_copy_that_does_not_wake_is_not_tried_again_and_again() -> None:
    async with machine() as (site, (callers,)):
        site.machine.faults.fail_wake = site.machine.faults.fail_start = 1000
        answers = await load(callers, 300.0)
        tries = counted(site, "failed").total()
        site.machine.faults.fail_wake = site.machine.faults.fail_start = 0
        assert ends(answers)["served"] >= 55, "the model goes on with one"
        assert site.entry("m").serves()
        assert 1 <= tries <= 12, "five of each profile, and backoff between them"


@pytest.mark.slow
@virtual
async def test_a_copy_that_somebody_puts_to_sleep_while_calls_wait_wakes_twice_a_minute_at_most() -> None:
    async with machine() as (site, (callers,)):
        hot = asyncio.ensure_future(load(callers, 240.0))
        while not hot.done():
            for name in ("m-2", "m-3"):
                if site.entry(name).serves():
                    site.manager.orders.give(name, "sleep")
            await asyncio.sleep(1.0)
        await hot
        assert 3 <= counted(site, "copy").total() <= 240 / 15


@virtual
async def test_a_gateway_that_is_cut_off_wakes_nothing_and_goes_on() -> None:
    async with machine() as (site, (callers,)):
        callers.cut = True
        await asyncio.sleep(15.0)
        answers = await load(callers, 60.0)
        assert counted(site, "copy") == {}
        assert ends(answers)["served"] >= 10, "its engine is still there"
        callers.cut = False
        await load(callers, 60.0)
        assert counted(site, "copy").total() == 1


@virtual
async def test_what_a_person_orders_is_no_copy() -> None:
    async with machine() as (site, (callers,)):
        await callers.call("other", 1.0)
        site.manager.orders.ensure("m-2")
        await site.until("m-2", "running")
        assert counted(site, "copy") == {}
