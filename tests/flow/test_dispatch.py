"""The one wait of a call, in virtual time: order, expiry, cancellation, refusals, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from msgspec import structs

from gateway.core.call import Call
from gateway.core.fleet import Engine, Fleet
from gateway.core.outcome import Outcome, Refused
from gateway.core.policy import Policy, TrafficClass
from gateway.core.policy_traffic import Deadlines
from gateway.core.vllm import ModelCard
from gateway.dispatch import Dispatch
from loadtest import vtime
from tests.calls import a_call

POLICY = Policy(
    classes={
        "interactive": TrafficClass(weight=8, max_queue=100),
        "default": TrafficClass(weight=4, max_queue=4),
        "batch": TrafficClass(weight=1, max_queue=100, max_concurrency=1),
    }
)


class World:
    """A fleet of engines of 1,000 tokens (800 may be promised), and a dispatch over it."""

    def __init__(self, engines: int = 1, capacity: int = 1000, policy: Policy = POLICY) -> None:
        self.loop = asyncio.get_running_loop()
        self.fleet = Fleet()
        for number in range(engines):
            engine = Engine(f"e{number}", f"http://127.0.0.1:{number}", policy, capacity=capacity)
            self.fleet.add(engine)
            self.fleet.has_models(engine, [ModelCard(id="m", max_model_len=4096)])
            self.fleet.health(engine, True, self.loop.time())
        self.dispatch = Dispatch(self.fleet, policy, random.Random(1), self.loop.time)

    def engine(self, number: int = 0) -> Engine:
        return self.fleet.engines[f"e{number}"]

    def call(self, tokens: int = 400, class_name: str = "interactive", within: float = 100.0, model: str = "m") -> Call:
        now = self.loop.time()
        return a_call(model=model, class_name=class_name, arrived=now, deadline=now + within, prompt_tokens=tokens)

    async def use(self, call: Call, seconds: float) -> str:
        async with self.dispatch.admitted(call) as grant:
            await asyncio.sleep(seconds)
            return grant.engine.id

    def idle(self) -> None:
        """Everything has been given back."""
        for engine in self.fleet:
            assert (engine.held, engine.in_flight, engine.prefill_queued) == (0, 0, 0), engine
        assert all(not queues for queues in self.dispatch.queues.values())
        assert not any(self.dispatch.running.values())
        assert not self.dispatch._turns
        self.dispatch._arm()
        assert self.dispatch._timer is None


def virtual(scenario: Callable[[World], Awaitable[None]], **world: object) -> None:
    async def main() -> None:
        made = World(**world)  # type: ignore[arg-type] # keyword arguments of World, passed through
        await scenario(made)
        made.idle()

    vtime.run(main())


def test_a_call_that_fits_goes_at_once_and_one_that_does_not_waits_its_turn() -> None:
    async def scenario(world: World) -> None:
        started = [asyncio.create_task(world.use(world.call(400), 1.0)) for _ in range(5)]
        await asyncio.sleep(0.5)
        assert (world.engine().held, world.engine().in_flight) == (800, 2)
        await asyncio.gather(*started)
        assert world.loop.time() == pytest.approx(3.0), "two at a time: 2 + 2 + 1"

    virtual(scenario)


def test_waiting_calls_go_in_order_of_arrival() -> None:
    async def scenario(world: World) -> None:
        order: list[int] = []

        async def one(number: int) -> None:
            async with world.dispatch.admitted(world.call(800)):
                order.append(number)
                await asyncio.sleep(1.0)

        await asyncio.gather(*(one(number) for number in range(6)))
        assert order == list(range(6))

    virtual(scenario)


def test_a_deadline_in_the_queue_ends_the_wait_and_no_dispatch_follows() -> None:
    async def scenario(world: World) -> None:
        first = asyncio.create_task(world.use(world.call(800), 10.0))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as refused:
            await world.use(world.call(800, within=3.0), 1.0)
        assert refused.value.outcome is Outcome.EXPIRED
        assert world.loop.time() == pytest.approx(3.0)
        await first

    virtual(scenario)


def test_cancelling_a_waiting_call_frees_its_place() -> None:
    async def scenario(world: World) -> None:
        first = asyncio.create_task(world.use(world.call(800), 5.0))
        waiting = asyncio.create_task(world.use(world.call(800), 1.0))
        behind = asyncio.create_task(world.use(world.call(800), 1.0))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait((waiting, first, behind))
        assert waiting.cancelled()
        assert world.loop.time() == pytest.approx(6.0)

    virtual(scenario)


def test_a_call_cancelled_in_the_moment_of_its_grant_gives_it_back() -> None:
    async def scenario(world: World) -> None:
        first = await world.dispatch.admitted(world.call(800)).__aenter__()
        waiting = asyncio.create_task(world.use(world.call(800), 1.0))
        await asyncio.sleep(0)
        first.close()  # grants the waiting call: its future is set, its task has not run yet
        assert world.engine().in_flight == 1
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()

    virtual(scenario)


def test_a_call_granted_while_its_cancellation_is_on_the_way_is_not_granted() -> None:
    async def scenario(world: World) -> None:
        first = await world.dispatch.admitted(world.call(800)).__aenter__()
        waiting = asyncio.create_task(world.use(world.call(800), 1.0))
        await asyncio.sleep(0)
        waiting.cancel()
        first.close()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()

    virtual(scenario)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda world: world.call(model="nobody"), Outcome.NOT_FOUND),
        (lambda world: world.call(tokens=801), Outcome.TOO_LARGE),
        (lambda world: world.engine().down() or world.call(), Outcome.NO_ENGINE),
        (lambda world: world.dispatch.refuse_waiting() or world.call(), Outcome.DRAINING),
    ],
)
def test_refused_at_the_door(change: Callable[[World], Call], outcome: Outcome) -> None:
    async def scenario(world: World) -> None:
        call = change(world)
        with pytest.raises(Refused) as refused:
            await world.use(call, 1.0)
        assert refused.value.outcome is outcome

    virtual(scenario)


def test_a_full_queue_refuses_the_newcomer_with_the_time_it_takes_to_drain() -> None:
    async def scenario(world: World) -> None:
        tasks = [asyncio.create_task(world.use(world.call(800, "default"), 2.0)) for _ in range(5)]
        await asyncio.sleep(2.5)  # one is done, one runs, three wait
        tasks.append(asyncio.create_task(world.use(world.call(800, "default"), 2.0)))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as refused:
            await world.use(world.call(800, "default"), 1.0)
        assert refused.value.outcome is Outcome.QUEUE_FULL
        assert refused.value.retry_after == pytest.approx(4 * 800 / (800 / 2.0)), "queued over drained per second"
        await asyncio.gather(*tasks)

    virtual(scenario)


def test_when_the_last_engine_goes_down_those_who_wait_are_told() -> None:
    async def scenario(world: World) -> None:
        first = asyncio.create_task(world.use(world.call(800), 5.0))
        waiting = asyncio.create_task(world.use(world.call(800), 1.0))
        await asyncio.sleep(1.0)
        world.engine().down()
        world.dispatch.pump()
        with pytest.raises(Refused) as refused:
            await waiting
        assert refused.value.outcome is Outcome.NO_ENGINE
        assert world.loop.time() == pytest.approx(1.0)
        await first

    virtual(scenario)


def test_move_changes_the_engine_and_waits_at_the_head_of_the_line() -> None:
    async def scenario(world: World) -> None:
        other = asyncio.create_task(world.use(world.call(800), 2.0))
        await asyncio.sleep(0)
        async with world.dispatch.admitted(world.call(800)) as grant:
            failed = grant.engine.id
            busy = asyncio.create_task(world.use(world.call(800), 1.0))
            await asyncio.sleep(0)
            await grant.move(frozenset({failed}))
            assert grant.engine.id != failed
            assert world.loop.time() == pytest.approx(2.0)
        await asyncio.gather(other, busy)

    virtual(scenario, engines=2)


def test_a_class_limit_holds_over_all_engines_and_wakes_the_next() -> None:
    async def scenario(world: World) -> None:
        await asyncio.gather(*(world.use(world.call(10, "batch"), 1.0) for _ in range(4)))
        assert world.loop.time() == pytest.approx(4.0), "one at a time"

    virtual(scenario, engines=2)


def test_calls_that_expire_together_are_all_told_on_the_real_loop_too() -> None:
    """uvloop's handle of a timer for a time that has passed does not say when it is."""

    async def scenario() -> None:
        world = World(policy=structs.replace(POLICY, deadlines=Deadlines(predict=False)))
        problems: list[str] = []
        world.loop.set_exception_handler(lambda _, context: problems.append(str(context)))
        first = asyncio.create_task(world.use(world.call(800), 0.1))
        await asyncio.sleep(0)
        calls = [world.use(world.call(800, within=0.02), 0.0) for _ in range(5)]
        async with asyncio.timeout(5.0):
            ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [getattr(end, "outcome", end) for end in ends] == [Outcome.EXPIRED] * 5
        assert problems == []
        await first
        world.idle()

    uvloop.run(scenario())


def test_random_lives_leave_nothing_behind() -> None:
    async def scenario(world: World) -> None:
        rng = random.Random(11)
        tasks: list[asyncio.Task[str]] = []
        for _ in range(3000):
            await asyncio.sleep(rng.expovariate(20))
            call = world.call(
                rng.randint(1, 900), rng.choice(["interactive", "default", "batch"]), within=rng.uniform(0.1, 5)
            )
            tasks.append(asyncio.create_task(world.use(call, rng.uniform(0, 0.5))))
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
            if rng.random() < 0.02:
                rng.choice(list(world.fleet)).down()
            for engine in world.fleet:
                assert 0 <= engine.held <= 800
                if rng.random() < 0.05:
                    world.fleet.health(engine, True, world.loop.time())
                    world.fleet.health(engine, True, world.loop.time())
            world.dispatch.pump()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {type(result) for result in results}
        assert kinds == {str, Refused, asyncio.CancelledError}

    virtual(scenario, engines=3)
