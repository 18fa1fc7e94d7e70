"""Calls for a provider, in virtual time: when a waiting call leaves for one, and which call leaves for another."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from msgspec import structs

from gateway.core.checkpoint import SavedDrain
from gateway.core.engines.engine import Engine
from gateway.core.money.tariff import MICRO, Tariff
from gateway.core.policy.policy import Policy
from gateway.core.policy.providers import MoneyLimit, Provider
from gateway.core.policy.routes import ModelRoute, RouteMember
from gateway.core.policy.traffic import Tenant, TrafficClass
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.tenants import Account
from gateway.decider.local import LocalAdmission
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


class Admission(LocalAdmission):
    """Admission of a call that has its estimates and its class."""

    def _appraise(self, call: Call) -> None:
        pass


def judge(world: World, call: Call, route: ModelRoute = ROUTE, charge: Callable[..., Any] | None = None) -> None:
    """Judge a call for the route. `charge`: what limits do, where there are any."""
    limits = SimpleNamespace(limited=charge is not None, charge=charge)
    decider: Any = SimpleNamespace(
        fleet=world.fleet, dispatch=world.dispatch, limits=limits, rng=world.dispatch.rng, uncertain=False
    )
    snapshot: Any = SimpleNamespace(policy=structs.replace(POLICY, models={"support": route}), classes=None)
    record: Any = SimpleNamespace(note=lambda _: None, request_id="r")
    assert Admission(decider, snapshot, ACCOUNT, record).judge(call) is None


async def stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
        await asyncio.wait((task,))


def another(world: World, model: str) -> None:
    """Add an engine of the house with a model of its own."""
    engine = Engine(model, "http://127.0.0.1:2", world.dispatch.policy, capacity=1000)
    world.fleet.add(engine)
    world.fleet.has_models(engine, [ModelCard(id=model, max_model_len=4096)])
    engine.check(True, world.loop.time())


async def backlog(world: World, model: str, running: float, calls: int, rate: float) -> list[asyncio.Task[Any]]:
    """Fill the engine of a model for so many seconds, and its queue. `rate`: tokens per second, from now on."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(world.use(world.call(900, model=model), running))]
    await asyncio.sleep(0)
    for _ in range(calls):
        call = world.call(450, model=model)
        call.ttft_by = call.arrived + 50.0
        tasks.append(asyncio.create_task(world.use(call, 0.01)))
    await asyncio.sleep(0)
    world.dispatch.traffic[model].drain.restore(SavedDrain(rate, {"interactive": rate}, 0.0, 0.0), 0.0)
    return tasks


async def queued(world: World, *tokens: tuple[int, int]) -> tuple[list[Call], list[asyncio.Task[Any]]]:
    """Calls that wait behind a full engine for the provider's 0.1 s, and the tasks of all."""
    for _ in range(8):
        world.engine(1).firsts.add(0.1)
    running = await busy(world, 10.0)
    calls = [routed(world, *each) for each in tokens]
    tasks = [asyncio.create_task(served(world, call)) for call in calls]
    await asyncio.sleep(0)
    world.dispatch.traffic["m"].drain.restore(SavedDrain(950.0, {"interactive": 950.0}, 0.0, 0.0), 0.0)
    return calls, [*tasks, running]


SPENT = structs.replace(CLOUD, budget=(MoneyLimit(0.0001, "day"),))


@pytest.mark.parametrize(("cloud", "goes"), [(CLOUD, "out"), (SPENT, "n")])
def test_with_its_budget_spent_a_call_goes_to_the_member_that_is_in_time(cloud: Provider, goes: str) -> None:
    async def scenario(world: World) -> None:
        another(world, "n")
        tasks = [*await backlog(world, "m", 10.0, 6, 450.0), *await backlog(world, "n", 1.2, 1, 600.0)]
        route = structs.replace(ROUTE, members=(RouteMember(model="m"), RouteMember(model="n")))
        for conversation in range(8):
            call = routed(world)
            call.conversation = conversation
            judge(world, call, route)
            assert call.model == goes
        call = routed(world)
        call.others = ("n", "out")
        assert world.dispatch.routes.other(call, world.loop.time()) == goes, "also where it has waited in vain"
        await stop(*tasks)

    run(scenario, cloud)


@pytest.mark.parametrize("fallback", [("n",), ("n", "out")])
def test_a_provider_beside_it_gives_a_fallback_of_the_house_no_calls(fallback: tuple[str, ...]) -> None:
    async def scenario(world: World) -> None:
        another(world, "n")
        tasks = await backlog(world, "m", 1.2, 1, 600.0)
        call = routed(world)
        judge(world, call, structs.replace(ROUTE, fallback=fallback))
        assert call.model == "m"
        await stop(*tasks)
        tasks = [await busy(world, 1.5)]
        call = routed(world)
        call.others = fallback
        came = world.loop.time()
        model, at = await served(world, call)
        assert (model, at - came) == (("out", pytest.approx(0.9)) if "out" in fallback else ("m", pytest.approx(1.5)))
        await stop(*tasks)

    run(scenario)


@pytest.mark.parametrize(("micro", "left"), [(1800, []), (2100, ["out", "out"])])
def test_nobody_moves_where_the_provider_could_not_take_all_of_them(micro: int, left: list[str]) -> None:
    async def scenario(world: World) -> None:
        calls, tasks = await queued(world, (300, 500), (201, 199), (202, 198))
        call = routed(world, 300, 300)
        judge(world, call)
        assert [each.model for each in calls if each.model == "out"] == left
        assert call.model == ("m" if left else "out")
        if not left:
            assert (await served(world, call))[0] == "out"
        await stop(*tasks)

    run(scenario, structs.replace(CLOUD, budget=(MoneyLimit(micro / MICRO, "day"),)))


def test_a_call_that_its_limits_refuse_moves_nobody() -> None:
    def charge(*_: object) -> None:
        raise Refused(Outcome.RATE_LIMITED, "limit", retry_after=1.0)

    async def scenario(world: World) -> None:
        calls, tasks = await queued(world, (300, 300), (590, 10))
        for _ in range(3):
            with pytest.raises(Refused):
                judge(world, routed(world, 300, 300), charge=charge)
        assert [call.model for call in calls] == ["m", "m"]
        judge(world, routed(world, 300, 300), charge=lambda *_: None)
        assert [call.model for call in calls] == ["m", "out"]
        await stop(*tasks)

    run(scenario)


def test_where_another_cannot_be_moved_the_newcomer_leaves() -> None:
    async def scenario(world: World) -> None:
        calls, tasks = await queued(world, (300, 300), (590, 10))
        tasks[1].cancel()  # its task has not run yet
        judge(world, call := routed(world, 300, 300))
        assert call.model == "out"
        assert [each.model for each in calls] == ["m", "m"]
        await stop(*tasks)

    run(scenario)


def test_those_behind_a_call_that_moves_get_their_turn() -> None:
    async def scenario(world: World) -> None:
        world.engine(1).firsts.add(0.1)
        running = asyncio.create_task(world.use(world.call(500), 10.0))
        await asyncio.sleep(0)
        head, small = routed(world, 800, 20), routed(world, 100)
        small.others = ()
        tasks = [asyncio.create_task(served(world, call)) for call in (head, small)]
        await asyncio.sleep(0)
        world.dispatch.traffic["m"].drain.restore(SavedDrain(300.0, {"interactive": 300.0}, 0.0, 0.0), 0.0)
        judge(world, routed(world, 100, 200))
        assert head.model == "out"
        assert not world.dispatch.queues["m"]
        await stop(*tasks, running)

    run(scenario)


def test_whose_lease_is_over_moves_nobody() -> None:
    async def scenario(world: World) -> None:
        calls, tasks = await queued(world, (300, 300), (590, 10))
        world.dispatch.lease_until = 0.0
        judge(world, call := routed(world, 300, 300))
        assert call.model == "out"
        await asyncio.sleep(1.9)
        assert [each.model for each in calls] == ["m", "m"], "nor early"
        world.dispatch.lease_until = math.inf
        await stop(*tasks)

    run(scenario)


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
        ([(90, 10)] * 16, (300, 600), "out", []),
        ([(300, 500), (201, 199), (202, 198)], (300, 300), "m", [1, 2]),
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
        judge(world, call)
        assert call.model == goes
        assert [number for number, each in enumerate(calls) if each.model == "out"] == left
        assert [each.model for each in others] == ["m", "m"], "of another tenant, and of one that wants no fallback"
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        running.cancel()
        await asyncio.wait((running,))

    run(scenario)
