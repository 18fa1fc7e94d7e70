"""Calls for a model route that have waited for a member in vain, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import pytest
from msgspec import structs

from gateway.core.money.tariff import MICRO, Tariff
from gateway.core.policy.policy import Policy, Routing
from gateway.core.policy.providers import MoneyLimit, Provider
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.shared.vllm.answers import ModelCard
from loadtest.simulate import vtime
from tests.flow.test_dispatch import World

POLICY = Policy(
    classes={"interactive": TrafficClass(weight=8, max_queue=100), "default": TrafficClass(weight=4, max_queue=4)},
    routing=Routing(hold_unserved=20.0),
)
MODELS = ("m", "n", "o")


def run(scenario: Callable[[World], Awaitable[None]], policy: Policy = POLICY) -> None:
    """A scenario over three engines, of which each has a model of its own."""

    async def main() -> None:
        world = World(engines=3, policy=policy)
        for engine, model in zip(world.fleet, MODELS, strict=True):
            world.fleet.has_models(engine, [ModelCard(id=model, max_model_len=4096)])
        await scenario(world)
        world.idle()

    vtime.run(main())


def routed(world: World, tokens: int = 400, within: float = 100.0, others: tuple[str, ...] = ("n", "o")) -> Call:
    call = world.call(tokens, within=within)
    call.asked_model, call.others = "support", others
    return call


async def model_of(world: World, call: Call, seconds: float = 1.0) -> str:
    await world.use(call, seconds)
    return call.model


def test_a_call_whose_engine_does_not_come_back_goes_to_another_model() -> None:
    async def scenario(world: World) -> None:
        world.engine(0).down()
        assert await model_of(world, routed(world)) == "n"
        assert world.loop.time() == pytest.approx(21.0)
        assert world.dispatch.routes.resolved == {("support", "n", "late"): 1}

    run(scenario)


def test_a_call_whose_engine_goes_while_it_waits_goes_to_the_first_model_that_can_serve_it() -> None:
    async def scenario(world: World) -> None:
        running = asyncio.create_task(world.use(world.call(800), 5.0))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(model_of(world, routed(world))) for _ in range(5)]
        await asyncio.sleep(1.0)
        world.engine(0).down()
        world.engine(1).down()
        world.dispatch.pump()
        assert await asyncio.gather(*waiting) == ["o"] * 5
        await running

    run(scenario, structs.replace(POLICY, routing=Routing(hold_unserved=0.0)))


@pytest.mark.parametrize(
    ("spill", "tenants", "model"),
    [
        ("late", ("t",), "n"),
        ("late", ("acme",), "o"),
        ("errors", ("t",), "o"),
        ("never", ("t",), "o"),
    ],
)
def test_a_call_that_waited_in_vain_leaves_the_house_only_by_the_providers_rules(
    spill: Literal["late", "errors", "never"], tenants: tuple[str, ...], model: str
) -> None:
    cloud = Provider(
        url="https://api.example.com/v1", key_file="k", models={"n": "small"}, prices=Tariff(MICRO, MICRO, 2 * MICRO),
        budget=(MoneyLimit(100, "day"),), tenants=tenants, classes=("interactive",), spill=spill,
    )  # fmt: skip

    async def scenario(world: World) -> None:
        world.engine(1).provider = "cloud"
        world.dispatch.control.money.restore((), 0.0, kept=True)
        world.dispatch.control.money.ahead = False
        world.engine(0).down()
        call = routed(world)
        call.leaves = 1
        assert await model_of(world, call) == model

    run(scenario, structs.replace(POLICY, providers={"cloud": cloud}))


@pytest.mark.parametrize(("others", "served"), [(("n", "o"), "n"), (("o",), "o"), ((), None)])
def test_a_call_whose_place_a_more_important_one_takes_goes_to_another_model(
    others: tuple[str, ...], served: str | None
) -> None:
    async def scenario(world: World) -> None:
        running = asyncio.create_task(world.use(world.call(800), 5.0))
        await asyncio.sleep(0)
        pushed_out = routed(world, others=others)
        pushed_out.class_name = "default"
        waiting = asyncio.create_task(model_of(world, pushed_out))
        await asyncio.sleep(0.5)
        first = [asyncio.create_task(world.use(world.call(800), 1.0)) for _ in range(2)]
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
        if served is None:
            assert isinstance(outcome, Refused)
            assert outcome.outcome is Outcome.SHED
        else:
            assert outcome == served
            assert world.dispatch.routes.resolved == {("support", served, "late"): 1}
        assert world.loop.time() < 2.0, "it did not wait for its own model"
        await asyncio.gather(running, *first)

    small = POLICY.classes | {"default": TrafficClass(weight=4, max_queue=1), "interactive": TrafficClass(max_queue=1)}
    run(scenario, structs.replace(POLICY, classes=small))


def test_calls_that_change_places_while_two_are_late_are_each_refused_once() -> None:
    """Two heads of `m` are late at once. One of them goes to `n`, and pushes out a call there that comes to `m`."""
    classes = {
        "interactive": TrafficClass(reserve=0.05),
        "default": TrafficClass(max_queue=1, reserve=0.05),
        "batch": TrafficClass(max_queue=2),
    }

    async def scenario(world: World) -> None:
        world.engine(0).speed.tpot = 50.0

        def call(model: str, class_name: str, others: tuple[str, ...], ttft: float) -> Call:
            made = routed(world, 100, others=others)
            made.model, made.class_name, made.ttft_by = model, class_name, made.arrived + ttft
            return made

        running = [asyncio.create_task(world.use(world.call(850, model=m), s)) for m, s in (("m", 5.0), ("n", 9.0))]
        await asyncio.sleep(0)
        calls = [
            call("m", "interactive", (), 10.0), call("m", "default", ("n",), 10.0), call("n", "default", (), 90.0),
            call("n", "batch", ("m",), 90.0), call("n", "batch", ("m",), 90.0),
        ]  # fmt: skip
        ended = await asyncio.gather(*running, *(model_of(world, each) for each in calls), return_exceptions=True)
        assert ended[:2] == ["e0", "e1"]
        assert [each.outcome if isinstance(each, Refused) else each for each in ended[2:]] == [
            Outcome.SHED, "n", "n", "n", "m",
        ]  # fmt: skip

    run(scenario, structs.replace(POLICY, classes=classes, deadlines="drop"))


def test_a_call_that_waits_with_another_model_leaves_nothing_behind() -> None:
    async def scenario(world: World) -> None:
        world.engine(0).down()
        running = asyncio.create_task(world.use(world.call(800, model="n"), 60.0))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(model_of(world, routed(world, others=("n",))))
        await asyncio.sleep(30.0)
        assert [len(world.dispatch.queues[model]) for model in ("m", "n")] == [0, 1]
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert not world.dispatch.queues["n"]
        running.cancel()
        await asyncio.wait((running,))

    run(scenario)


@pytest.mark.parametrize("others", [(), ("n",)])
def test_a_call_that_no_model_can_serve_in_time_is_refused(others: tuple[str, ...]) -> None:
    async def scenario(world: World) -> None:
        world.engine(0).down()
        world.engine(1).down()
        with pytest.raises(Refused) as caught:
            await world.dispatch.ask(routed(world, others=others))
        assert caught.value.outcome is Outcome.NO_ENGINE
        assert not world.dispatch.routes.resolved

    run(scenario)


def test_a_call_whose_deadline_is_over_goes_nowhere() -> None:
    async def scenario(world: World) -> None:
        running = asyncio.create_task(world.use(world.call(800), 30.0))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as caught:
            await world.dispatch.ask(routed(world, within=10.0))
        assert caught.value.outcome is Outcome.EXPIRED
        await running

    run(scenario, structs.replace(POLICY, deadlines="drop"))


def test_a_drain_refuses_a_call_that_another_model_could_serve() -> None:
    async def scenario(world: World) -> None:
        world.engine(0).down()
        waiting = asyncio.create_task(model_of(world, routed(world)))
        await asyncio.sleep(1.0)
        world.dispatch.refuse_waiting()
        with pytest.raises(Refused) as caught:
            await waiting
        assert caught.value.outcome is Outcome.DRAINING

    run(scenario)
