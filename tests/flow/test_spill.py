"""Calls for a provider, in virtual time: when a waiting call leaves for one, and which call leaves for another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import pytest
from msgspec import structs

from gateway.core.checkpoint import SavedDrain
from gateway.core.money.tariff import MICRO, Tariff
from gateway.core.policy.policy import Policy
from gateway.core.policy.providers import MoneyLimit, Provider
from gateway.core.policy.routes import ModelRoute, RouteMember
from gateway.core.policy.traffic import Tenant, TrafficClass
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.tenants import Account
from gateway.shared.vllm.answers import ModelCard
from loadtest.simulate import vtime
from tests.flow.test_dispatch import World

CLOUD = Provider(
    url="https://api.example.com/v1", key_file="k", models={"out": "small"}, prices=Tariff(MICRO, MICRO, 4 * MICRO),
    budget=(MoneyLimit(100, "day"),), tenants=("t", "u"), classes=("interactive",),
)  # fmt: skip
ROUTE = ModelRoute(members=(RouteMember(model="m"),), fallback=("out",))
POLICY = Policy(
    classes={"interactive": TrafficClass(max_queue=100), "default": TrafficClass()},
    models={"support": ROUTE},
    providers={"cloud": CLOUD},
)
ACCOUNT = Account("t", Tenant(), ["interactive", "default"], b"")


def run(scenario: Callable[[World], Awaitable[None]], cloud: Provider = CLOUD) -> None:
    """Run a scenario over an engine and a provider."""

    async def main() -> None:
        world = World(engines=2, policy=structs.replace(POLICY, providers={"cloud": cloud}))
        world.fleet.has_models(world.engine(1), [ModelCard(id="out")])
        world.engine(1).provider = "cloud"
        world.dispatch.control.money.restore((), 0.0, kept=True)
        world.dispatch.control.money.ahead = False
        await scenario(world)
        world.idle()

    vtime.run(main())


def routed(world: World, prompt: int = 400, output: int = 0, tenant: str = "t") -> Call:
    call = world.call(prompt)
    call.tenant, call.output_tokens, call.asked = tenant, output, output
    call.asked_model, call.others, call.leaves, call.ttft_by = "support", ("out",), 1, call.arrived + 2.0
    return call


async def served(world: World, call: Call) -> tuple[str, float]:
    """Use a grant for a moment; the model that answered, and when."""
    with await world.dispatch.ask(call):
        at = world.loop.time()
        await asyncio.sleep(0.01)
        return call.model, at


async def busy(world: World, seconds: float) -> asyncio.Task[str]:
    """Fill the engine of the house for so long."""
    running = asyncio.create_task(world.use(world.call(900), seconds))
    await asyncio.sleep(0)
    return running


@pytest.mark.parametrize(("firsts", "at"), [(None, 0.9), (0.5, 1.4), (5.0, 0.9)])
def test_a_waiting_call_leaves_while_the_provider_can_still_answer_in_time(firsts: float | None, at: float) -> None:
    async def scenario(world: World) -> None:
        for _ in range(8 if firsts else 0):
            world.engine(1).firsts.add(firsts or 0.0)
        running = await busy(world, 10.0)
        assert await served(world, routed(world)) == ("out", pytest.approx(at))
        await running

    run(scenario)


@pytest.mark.parametrize("cloud", [structs.replace(CLOUD, tenants=("acme",)), structs.replace(CLOUD, spill="errors")])
def test_a_call_that_may_not_leave_goes_on_waiting(cloud: Provider) -> None:
    async def scenario(world: World) -> None:
        running = await busy(world, 1.8)
        assert await served(world, routed(world)) == ("m", pytest.approx(1.8))
        await running
        running = await busy(world, 10.0)
        with pytest.raises(Refused) as caught:
            await served(world, routed(world))
        assert caught.value.outcome is Outcome.SHED
        assert world.loop.time() == pytest.approx(3.8, abs=0.1)
        await running

    run(scenario, cloud)


def test_a_call_without_a_target_for_its_first_token_waits_for_its_engine() -> None:
    async def scenario(world: World) -> None:
        running = await busy(world, 10.0)
        call = routed(world)
        call.ttft_by = float("inf")
        assert await served(world, call) == ("m", pytest.approx(10.0))
        await running

    run(scenario)


@pytest.mark.parametrize(
    ("waiting", "newcomer", "goes", "left"),
    [
        ([(300, 300), (590, 10)], (300, 300), "m", [1]),
        ([(300, 300), (300, 300)], (590, 10), "out", []),
        ([(300, 300), (300, 300)], (300, 300), "out", []),
        ([(900, 0)], (100, 0), "out", []),
        ([(90, 10)] * 16, (300, 600), "out", [0, 1, 2, 3]),
    ],
)
def test_where_a_call_would_be_late_the_cheapest_tokens_of_its_tenant_leave(
    waiting: list[tuple[int, int]], newcomer: tuple[int, int], goes: Literal["m", "out"], left: list[int]
) -> None:
    async def scenario(world: World) -> None:
        for _ in range(8):
            world.engine(1).firsts.add(0.1 if len(waiting) > 1 else 1.0)  # else it leaves in half of its time
        running = await busy(world, 10.0)
        calls = [routed(world, *tokens) for tokens in waiting]
        others = routed(world, 10, 0, tenant="u"), routed(world, 10, 0)
        others[1].others = ()
        tasks = [asyncio.create_task(served(world, call)) for call in (*calls, *others)]
        await asyncio.sleep(0)
        world.dispatch.traffic["m"].drain.restore(SavedDrain(950.0, {"interactive": 950.0}, 0.0, 0.0), 0.0)
        call = routed(world, *newcomer)
        world.dispatch.routes.resolve(call, ROUTE, ACCOUNT, lambda _: None)
        assert call.model == goes
        assert [number for number, each in enumerate(calls) if each.model == "out"] == left
        assert [each.model for each in others] == ["m", "m"], "of another tenant, and of one that wants no fallback"
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        running.cancel()
        await asyncio.wait((running,))

    run(scenario)
