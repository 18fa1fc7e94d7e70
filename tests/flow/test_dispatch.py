"""Dispatch in virtual time: order, expiry, cancellation, refusals, and nothing left behind."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from msgspec import structs

from gateway.core.admission.queues import Ticket
from gateway.core.admission.retries import RetryBudget
from gateway.core.engines.choice import SCAN_AT_MOST
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.policy.policy import Policy, Routing
from gateway.core.policy.snapshot import Current, Snapshot
from gateway.core.policy.traffic import ModeRule, Modes, ShapingTier, Threshold, TrafficClass
from gateway.core.request.call import Call
from gateway.core.request.cost import CostModel
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.routes import ROUTES
from gateway.decider.dispatch import NOBODY, Dispatch
from gateway.shared.vllm.answers import EngineSample, ModelCard
from loadtest.simulate import vtime
from tests.calls import a_call

POLICY = Policy(
    classes={
        "interactive": TrafficClass(weight=8, max_queue=100),
        "default": TrafficClass(weight=4, max_queue=4),
        "batch": TrafficClass(weight=1, max_queue=100, max_concurrency=1),
    }
)


class World:
    """A fleet of engines of 1,000 tokens (927 may be promised to prompts), and a dispatch over it."""

    def __init__(self, engines: int = 1, capacity: int = 1000, policy: Policy = POLICY) -> None:
        self.loop = asyncio.get_running_loop()
        self.fleet = Fleet()
        for number in range(engines):
            engine = Engine(f"e{number}", f"http://127.0.0.1:{number}", policy, capacity=capacity)
            self.fleet.add(engine)
        for engine in self.fleet:
            self.fleet.has_models(engine, [ModelCard(id="m", max_model_len=4096)])
            engine.check(True, self.loop.time())
        self.dispatch = Dispatch(
            self.fleet,
            policy,
            random.Random(1),
            self.loop.time,
            RetryBudget(Current(Snapshot(Policy(retries=policy.retries)))),
        )

    def engine(self, number: int = 0) -> Engine:
        return self.fleet.engines[f"e{number}"]

    def call(self, tokens: int = 400, class_name: str = "interactive", within: float = 100.0, model: str = "m") -> Call:
        now = self.loop.time()
        return a_call(model=model, class_name=class_name, arrived=now, deadline=now + within, prompt_tokens=tokens)

    async def use(self, call: Call, seconds: float) -> str:
        with await self.dispatch.ask(call) as grant:
            await asyncio.sleep(seconds)
            return grant.engine.id

    def idle(self) -> None:
        """Everything has been given back."""
        for engine in self.fleet:
            assert (engine.ledger.held, engine.ledger.in_flight, engine.prefills.queued) == (0, 0, 0), engine
        assert all(not queues for queues in self.dispatch.queues.values())
        assert not any(self.dispatch.running.values())
        assert not any(traffic.drain.held for traffic in self.dispatch.traffic.values())
        assert not any(self.dispatch.left_over().values())


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
        assert (world.engine().ledger.held, world.engine().ledger.in_flight) == (800, 2)
        await asyncio.gather(*started)
        assert world.loop.time() == pytest.approx(3.0), "two at a time: 2 + 2 + 1"

    virtual(scenario)


def test_an_engine_knows_how_much_of_what_it_holds_is_output() -> None:
    async def scenario(world: World) -> None:
        call = world.call(400)
        call.prompt_tokens, call.output_tokens = 370, 30
        with await world.dispatch.ask(call):
            assert (world.engine().ledger.held, world.engine().ledger.output_held) == (400, 30)
        assert world.engine().ledger.output_held == 0

    virtual(scenario)


def test_many_engines_are_gone_through_once_however_many_calls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pump looks at a model's queue once, and a call that finds no room presses a sample."""

    async def scenario(world: World) -> None:
        for engine in world.fleet:
            engine.ledger.slots = engine.ledger.max_slots = 1
        running = [asyncio.create_task(world.use(world.call(400), 10.0)) for _ in world.fleet]
        await asyncio.sleep(1.0)
        for engine in world.fleet:
            engine.ledger.pressed_slots = False
        waiting = [asyncio.create_task(world.use(world.call(400), 1.0)) for _ in range(2)]
        await asyncio.sleep(0)
        assert 0 < sum(engine.ledger.pressed_slots for engine in world.fleet) <= 4 * SCAN_AT_MOST
        control, asked = world.dispatch.control, list[Ticket]()
        decide = control.decide_waiting

        def watched(ticket: Ticket, *more: Any) -> Any:
            asked.append(ticket)
            return decide(ticket, *more)

        monkeypatch.setattr(control, "decide_waiting", watched)
        world.dispatch.pump()
        assert len(asked) == 1, "the head of the queue, once"
        await asyncio.gather(*running, *waiting)

    virtual(scenario, engines=300)


@pytest.mark.parametrize("strict", [False, True])
def test_calls_that_wait_for_their_classs_own_bound_make_no_other_late(strict: bool) -> None:
    """`batch` runs one call at a time, and the engine has room: nobody else waits, and no engine more is wanted."""
    classes = {
        "batch": TrafficClass(max_queue=30, max_concurrency=1, strict=strict),
        "default": TrafficClass(weight=8),
    }

    async def scenario(world: World) -> None:
        bounded = []
        for second in range(150):
            for _ in range(1 if second else 31):
                bounded.append(asyncio.create_task(world.use(world.call(400, "batch", within=1e6), 20.0)))
                await asyncio.sleep(0)
            call = world.call(100, "default")
            call.ttft_by = call.arrived + 2.0
            await world.use(call, 0.5)
            assert (world.loop.time() - call.arrived, call.predicted_wait) == (pytest.approx(0.5), 0.0)
            await asyncio.sleep(0.5)
        assert world.dispatch.estimates.engines_wanted() == {"m": 1}
        ended = await asyncio.gather(*bounded, return_exceptions=True)
        assert sum([isinstance(each, Refused) for each in ended]) > 100, "its queue is full"

    virtual(scenario, policy=Policy(classes=classes), capacity=1000)


def test_calls_that_fill_gaps_make_no_other_late() -> None:
    """After a burst `batch` waits until the most that others held is forgotten: meanwhile the engine has room."""
    classes = {"default": TrafficClass(weight=4), "batch": TrafficClass(max_queue=100, headroom=0.5)}

    async def scenario(world: World) -> None:
        long = asyncio.create_task(world.use(world.call(100, "default"), 60.0))
        await asyncio.gather(*[world.use(world.call(400, "default"), 5.0) for _ in range(20)])
        filling = [asyncio.create_task(world.use(world.call(400, "batch", within=1e6), 20.0)) for _ in range(60)]
        await asyncio.sleep(0)
        assert len(world.dispatch.queues["m"]) == 60
        for _ in range(50):
            call = world.call(100, "default")
            call.ttft_by = call.arrived + 2.0
            await world.use(call, 0.5)
            assert (world.loop.time() - call.arrived, call.predicted_wait) == (pytest.approx(0.5), 0.0)
            await asyncio.sleep(0.5)
        await asyncio.gather(long, *filling)

    virtual(scenario, policy=Policy(classes=classes), capacity=10_000)


@pytest.mark.parametrize("flooded", ["m", "sql"])
def test_calls_of_one_model_have_their_turn_beside_a_flood_for_another_of_the_same_engine(flooded: str) -> None:
    """An adapter's calls and its base model's share the engine as classes do, whichever the engine names first."""
    other = "sql" if flooded == "m" else "m"

    async def scenario(world: World) -> None:
        world.fleet.has_models(world.engine(), [ModelCard(id="m", max_model_len=4096), ModelCard(id="sql", parent="m")])

        async def waited(class_name: str) -> float:
            sent = world.loop.time()
            with await world.dispatch.ask(world.call(400, class_name, model=other)):
                begun = world.loop.time()
                await asyncio.sleep(1.0)
            return begun - sent

        flood = [asyncio.create_task(world.use(world.call(400, "batch", model=flooded), 1.0)) for _ in range(60)]
        await asyncio.sleep(10.5)
        assert await waited("interactive") < 1.0
        assert max(await asyncio.gather(*[waited("interactive") for _ in range(8)])) < 6.0, "eight calls to one"
        even = [asyncio.create_task(waited("batch")) for _ in range(6)]
        assert 2.0 < max(await asyncio.gather(*even)) < 7.0, "no credit, and every other turn"
        await asyncio.gather(*flood)

    virtual(scenario, policy=Policy())


@pytest.mark.parametrize("engines", [1, 2])
def test_what_a_model_had_while_no_other_waited_is_not_held_against_it(engines: int) -> None:
    """Earlier grants cost no turn on the model's own engine, nor beside a model that waited elsewhere with a third."""

    async def scenario(world: World) -> None:
        own = ("m", "sql") if engines == 2 else ("m", "sql", "doc")
        world.fleet.has_models(world.engine(engines - 1), [ModelCard(id="m"), ModelCard(id="doc")])
        world.fleet.has_models(world.engine(), [ModelCard(id=id) for id in own])

        def flood(models: list[str], calls: int) -> list[asyncio.Task[str]]:
            each = [model for _ in range(calls) for model in models]
            return [asyncio.create_task(world.use(world.call(400, "batch", 999.0, model), 1.0)) for model in each]

        await asyncio.gather(*flood(["sql"], 100))
        flooded = flood(["m", "doc"], 60)
        await asyncio.sleep(2.5)
        mine = flood(["sql"], 10)
        await asyncio.sleep(2.0)
        sent = world.loop.time()
        with await world.dispatch.ask(world.call(400, model="sql")):
            assert world.loop.time() - sent < 3.0
        await asyncio.gather(*flooded, *mine)

    virtual(scenario, policy=Policy(), engines=engines)


def test_models_take_turns_call_by_call_when_an_engine_comes() -> None:
    async def scenario(world: World) -> None:
        world.fleet.has_models(world.engine(), [ModelCard(id="m"), ModelCard(id="sql", parent="m")])
        world.dispatch.set_lease(-math.inf)
        models = [*["m"] * 60, *["sql"] * 5]
        calls = [world.call(40, "batch" if model == "m" else "interactive", model=model) for model in models]
        tasks = [asyncio.create_task(world.use(call, 20.0)) for call in calls]
        await asyncio.sleep(1.0)
        world.dispatch.set_lease(math.inf)
        assert not world.dispatch.queues["sql"], "a full engine of the less important ones would be 20 s"
        await asyncio.gather(*tasks)

    virtual(scenario, policy=Policy())


def test_models_whose_calls_wait_for_their_classs_own_bound_are_passed() -> None:
    async def scenario(world: World) -> None:
        world.fleet.has_models(world.engine(), [ModelCard(id="m"), ModelCard(id="sql", parent="m")])
        calls = [world.call(400, "batch"), world.call(400), world.call(400, "batch"), world.call(400, model="sql")]
        tasks = [asyncio.create_task(world.use(call, 1.0 + index)) for index, call in enumerate(calls)]
        await asyncio.sleep(1.5)
        assert world.dispatch.queues["m"].length("batch") == 0
        await asyncio.gather(*tasks)

    virtual(scenario)


def test_waiting_calls_go_in_order_of_arrival() -> None:
    async def scenario(world: World) -> None:
        order: list[int] = []

        async def one(number: int) -> None:
            with await world.dispatch.ask(world.call(800)):
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


def test_a_call_that_lost_its_engine_is_not_dispatched_past_its_deadline() -> None:
    async def scenario(world: World) -> None:
        grant = await world.dispatch.ask(world.call(within=1.0))
        await asyncio.sleep(1.5)  # it was tried, and paused before it is tried again
        with pytest.raises(Refused) as refused:
            await grant.move(frozenset({"e0"}))
        assert refused.value.outcome is Outcome.EXPIRED

    virtual(scenario)


@pytest.mark.parametrize("deadlines", ["refuse", "drop"])
def test_a_call_whose_body_took_until_its_deadline_bothers_no_engine(deadlines: str) -> None:
    """It came, with its head, when its body began to come."""

    async def scenario(world: World) -> None:
        world.dispatch.apply(structs.replace(POLICY, deadlines=deadlines))
        await world.use(world.call(), 0.0)  # at once is how the model's next calls go
        slow = world.call(within=1.0)
        await asyncio.sleep(1.0)
        with pytest.raises(Refused, match="was whole: it began") as refused:
            await world.use(slow, 1.0)
        assert refused.value.outcome is Outcome.EXPIRED

    virtual(scenario)


def test_what_a_call_used_corrects_what_its_tenant_was_charged_and_nothing_else() -> None:
    """Who goes at once is charged nothing, and who moves or is hedged is not charged again."""

    async def scenario(world: World) -> None:
        def counter(tenant: str) -> float:
            return world.dispatch.queues["m"]._by_class["interactive"]._tenants[tenant].counter

        await world.use(world.call(1), 0.0)  # of a model's calls only the first is always charged
        calls = {tenant: world.call(800) for tenant in ("at once", "another", "waited")}
        for tenant, call in calls.items():
            call.tenant = tenant
        grants = [await world.dispatch.ask(calls[tenant]) for tenant in ("at once", "another")]
        waits = asyncio.create_task(world.dispatch.ask(calls["waited"]))
        await asyncio.sleep(0.5)
        moves = asyncio.create_task(grants[0].move(NOBODY))
        waited = await waits
        grants[1].close()
        await moves
        before = counter("at once")
        grants[0].finished(world.loop.time(), 500, 0, None)
        grants[0].close()
        assert counter("at once") == before
        second = world.dispatch.at_once(calls["waited"], frozenset({waited.engine.id}))
        assert second is not None
        waited.take(second)
        before = counter("waited")
        waited.finished(world.loop.time(), 700, 0, None)
        waited.close()
        assert counter("waited") == before - 100.0

    virtual(scenario, engines=2)


def test_a_second_attempt_is_never_on_an_engine_that_would_cap_the_answer_of_the_first() -> None:
    async def scenario(world: World) -> None:
        full = world.dispatch.at_once(world.call(500), frozenset({"e0"}))
        assert full is not None
        call = world.call(50)
        call.stream, call.asked, call.output_tokens, call.expected_tokens = True, 100, 50, 30
        with await world.dispatch.ask(call) as first:
            assert (first.engine.id, await first.second(None)) == ("e0", None)
            assert (call.shaped, call.output_tokens, call.expected_tokens) == (0, 50, 30)
            full.close()
            second = await first.second(None)
            assert second is not None
            second.close()

    shaping = (ShapingTier(kv_above=0.3, max_tokens=10, except_=()),)
    virtual(scenario, engines=2, policy=structs.replace(POLICY, shaping=shaping))


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
        first = await world.dispatch.ask(world.call(800))
        waiting = asyncio.create_task(world.use(world.call(800), 1.0))
        await asyncio.sleep(0)
        first.close()  # grants the waiting call: its future is set, its task has not run yet
        assert world.engine().ledger.in_flight == 1
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()

    virtual(scenario)


def test_a_call_granted_while_its_cancellation_is_on_the_way_is_not_granted() -> None:
    async def scenario(world: World) -> None:
        first = await world.dispatch.ask(world.call(800))
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
        (lambda world: world.call(tokens=921), Outcome.TOO_LARGE),
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


NOT_HELD = structs.replace(POLICY, routing=Routing(hold_unserved=0.0))


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

    virtual(scenario, policy=NOT_HELD)


def test_a_grant_tells_the_rank_of_its_class_to_an_engine_that_goes_by_priorities() -> None:
    async def scenario(world: World) -> None:
        for priorities, expected in ((False, [0, 0, 0]), (True, [0, 1, 2])):
            world.engine().priorities = priorities
            found = []
            for name in POLICY.classes:
                with await world.dispatch.ask(world.call(100, name)) as grant:
                    found.append(grant.priority)
            assert found == expected

    virtual(scenario)


def out(world: World, *, up: bool = False) -> None:
    """All engines are down, or back."""
    for engine in world.fleet:
        engine.health.up = up
    world.dispatch.pump()


def test_calls_wait_while_an_engine_restarts_and_go_in_their_order_when_it_is_back() -> None:
    async def scenario(world: World) -> None:
        early = asyncio.create_task(world.use(world.call(800), 1.0))  # it lets its engine go, which is down by then
        waits = asyncio.create_task(world.use(world.call(800), 1.0))
        await asyncio.sleep(0.5)
        out(world)
        comes = [asyncio.create_task(world.use(world.call(400), 1.0)) for _ in range(2)]
        leaves = asyncio.create_task(world.use(world.call(400), 1.0))
        await asyncio.sleep(30.0)
        leaves.cancel()
        await asyncio.sleep(20.0)
        assert not any(task.done() for task in (waits, *comes))
        out(world, up=True)
        assert not world.dispatch.waiting.for_models.timers
        await asyncio.gather(early, waits, *comes)
        assert world.loop.time() == pytest.approx(52.5), "0.5 + 50, then one by itself and two at once"

    virtual(scenario)


def test_an_engine_that_does_not_come_back_is_given_up_and_then_nobody_waits_for_it() -> None:
    async def scenario(world: World) -> None:
        out(world)
        first = asyncio.create_task(world.use(world.call(), 1.0))
        impatient = asyncio.create_task(world.use(world.call(within=5.0), 1.0))
        await asyncio.sleep(59.0)
        late = asyncio.create_task(world.use(world.call(), 1.0))
        for each, waited in ((impatient, "5.0 s"), (first, "60.0 s"), (late, "1.0 s")):
            with pytest.raises(Refused) as refused:
                await each
            assert (refused.value.outcome, refused.value.retry_after) == (Outcome.NO_ENGINE, 2.0)
            assert f"(of 1: 1 down). This call has waited {waited} for one." in refused.value.message
        assert world.loop.time() == pytest.approx(60.0)
        with pytest.raises(Refused) as refused:
            await world.use(world.call(), 1.0)
        assert "waited" not in refused.value.message
        assert world.loop.time() == pytest.approx(60.0)
        out(world, up=True)
        out(world)
        again = asyncio.create_task(world.use(world.call(), 1.0))
        await asyncio.sleep(1.0)
        world.dispatch.apply(NOT_HELD)  # and a reload takes effect on those who wait
        with pytest.raises(Refused):
            await again
        assert world.loop.time() == pytest.approx(61.0)

    virtual(scenario)


def test_move_changes_the_engine_and_waits_at_the_head_of_the_line() -> None:
    async def scenario(world: World) -> None:
        other = asyncio.create_task(world.use(world.call(800), 2.0))
        await asyncio.sleep(0)
        with await world.dispatch.ask(world.call(800)) as grant:
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
        world = World(policy=structs.replace(POLICY, deadlines="drop"))
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


def test_when_a_starving_call_leaves_those_it_held_up_go() -> None:
    async def scenario(world: World) -> None:
        first = asyncio.create_task(world.use(world.call(400), 9.0))
        await asyncio.sleep(0)
        starving = asyncio.create_task(world.use(world.call(800, within=6.0), 1.0))
        await asyncio.sleep(4.0)
        small = asyncio.create_task(world.use(world.call(100, "default"), 0.5))
        await asyncio.sleep(0.5)
        assert world.engine().ledger.held == 400, "nothing passes what has waited half of its time"
        starving.cancel()
        await small
        assert world.loop.time() == pytest.approx(5.0)
        await first

    virtual(scenario)


# -- promises: refuse, shed, come back -------------------------------------------------------------------------------

PROMISES = Policy(
    classes={
        "interactive": TrafficClass(weight=8, ttft=2.0, max_queue=100),
        "default": TrafficClass(weight=4, max_queue=4),
        "batch": TrafficClass(weight=1, max_queue=2, max_concurrency=1),
    },
    modes=Modes(
        tight=ModeRule(enter=Threshold(kv=0.9), leave=Threshold(kv=0.5), dwell=1.0, refuse=("batch",)),
    ),
)
BLIND = structs.replace(PROMISES, deadlines="drop")


def promised(world: World, tokens: int = 800, class_name: str = "interactive", body: bytes = b"") -> Call:
    """A call with its class's target, known by its body."""
    call = world.call(tokens, class_name)
    ttft = world.dispatch.policy.classes[class_name].ttft
    if ttft is not None:
        call.ttft_by = call.arrived + ttft
    call.body = body
    return call


async def refused(world: World, call: Call) -> Refused:
    with pytest.raises(Refused) as caught:
        await world.use(call, 1.0)
    return caught.value


async def busy(world: World, seconds: float, number: int = 1) -> list[asyncio.Task[str]]:
    """So many calls that fill the engine for so long, one after the other; the first has begun."""
    tasks = [asyncio.create_task(world.use(world.call(800), seconds)) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks


def test_a_mode_refuses_what_it_says_and_lets_who_waits_go() -> None:
    async def scenario(world: World) -> None:
        tasks = await busy(world, 2.0)
        waiting = asyncio.create_task(world.use(world.call(800, "batch"), 1.0))
        await asyncio.sleep(0.2)
        world.engine().sampled(EngineSample(running=1, waiting=0, kv_usage=0.95, preemptions_total=0), 0.2)
        world.dispatch.changed(world.engine())
        told = await refused(world, world.call(10, "batch"))
        assert told.outcome is Outcome.SHED
        assert "mode tight refuses class 'batch'" in told.message
        world.engine().ledger.excess = 0
        assert await world.use(world.call(10), 0.1) == "e0", "another class"
        await asyncio.gather(*tasks, waiting)

    virtual(scenario, policy=BLIND)


def test_what_cannot_make_it_is_refused_at_the_door_and_told_when_to_come_back() -> None:
    async def scenario(world: World) -> None:
        await asyncio.gather(*await busy(world, 1.5, 2))
        tasks = await busy(world, 1.5, 2)
        told = await refused(world, promised(world))
        assert told.outcome is Outcome.DEADLINE_UNREACHABLE
        assert told.kept
        assert told.retry_after is not None
        assert told.retry_after >= 1.0
        assert world.loop.time() == pytest.approx(3.0), "at once"
        await asyncio.gather(*tasks)

    virtual(scenario, policy=PROMISES)


LENGTHS = (8192, 16_384, 20_480, 32_768, 65_536, 131_072)


@pytest.mark.parametrize("class_name", Policy().classes)
@pytest.mark.parametrize("context", LENGTHS)
@pytest.mark.parametrize("at_once", [1, 8])
def test_nobody_is_refused_for_a_length_that_he_did_not_ask_for(context: int, class_name: str, at_once: int) -> None:
    """A gateway that has seen no answer, two engines of two contexts, and calls without `max_tokens`: each is taken to
    write half of its context, so what does not fit waits."""

    async def scenario(world: World) -> None:
        cost, settings = CostModel(), world.dispatch.policy.classes[class_name]

        async def one() -> None:
            call = world.call(0, class_name, settings.deadline)
            call.ascii_bytes, call.ttft_by = 10, world.loop.time() + (settings.ttft or math.inf)
            cost.estimate(call, context)
            assert call.cost > context / 2 or call.expected_tokens == 20
            await world.use(call, 0.2)
            cost.learn(call, call.prompt_tokens, 20)

        for _ in range(3):
            await asyncio.gather(*[one() for _ in range(at_once)])
            assert world.dispatch.estimates.wait("m") == 1.0, "nobody waits any more"

    virtual(scenario, engines=2, capacity=2 * context, policy=Policy())


@pytest.mark.parametrize("others", [False, True])
def test_an_idle_engine_takes_what_it_cannot_end_in_time(others: bool) -> None:
    """At once, and also where calls wait that may not have it."""

    async def scenario(world: World) -> None:
        running: list[asyncio.Task[str]] = []
        if others:
            running = [asyncio.create_task(world.use(world.call(100, "batch"), 5.0)) for _ in range(2)]
            await asyncio.sleep(0)
            assert world.engine(0).ledger.in_flight + world.engine(1).ledger.in_flight == 1, (
                "its class runs no more of them"
            )
        call = promised(world)
        call.expected_tokens = 100_000
        call.deadline = world.loop.time() + 1.0
        await world.use(call, 0.5)
        assert world.loop.time() == 0.5
        await asyncio.gather(*running)

    virtual(scenario, engines=2, policy=PROMISES)


def test_what_waits_alone_goes_when_an_engine_is_idle_though_it_will_be_late() -> None:
    async def scenario(world: World) -> None:
        tasks = await busy(world, 1.0)
        call = promised(world)
        call.expected_tokens = 100_000
        await world.use(call, 0.5)
        assert world.loop.time() == 1.5
        await asyncio.gather(*tasks)

    virtual(scenario, policy=BLIND)


def test_what_waited_too_long_for_its_target_is_shed_when_its_time_is_up() -> None:
    async def scenario(world: World) -> None:
        tasks = await busy(world, 5.0)
        told = await refused(world, promised(world))
        assert (told.outcome, world.loop.time()) == (Outcome.SHED, pytest.approx(2.0))
        assert "has become too late: its first token" in told.message
        await asyncio.gather(*tasks)

    virtual(scenario, policy=BLIND)


def test_what_would_be_late_if_it_went_now_is_shed_and_the_next_goes() -> None:
    async def scenario(world: World) -> None:
        world.engine().speed.prefill_rate = 1600.0  # its first token takes half a second, or twice that, of two
        world.engine().speed.ttft_spread = 2.0
        tasks = await busy(world, 1.5)
        late = asyncio.create_task(world.use(promised(world, 700), 1.0))
        await asyncio.sleep(0.2)
        other = asyncio.create_task(world.use(world.call(800, "default"), 1.0))
        with pytest.raises(Refused) as caught:
            await late
        assert (caught.value.outcome, world.loop.time()) == (Outcome.SHED, pytest.approx(1.5)), "before its time is up"
        assert "its first token would come after 2.4 s (1.5 s in the queue so far, 0.94 s" in caught.value.message
        await other
        assert world.loop.time() == pytest.approx(2.5)
        await asyncio.gather(*tasks)

    virtual(scenario, policy=BLIND)


def test_a_full_queue_gives_the_place_of_a_less_important_call_to_a_more_important_one() -> None:
    async def scenario(world: World) -> None:
        tasks = await busy(world, 2.0)
        batch = [asyncio.create_task(world.use(world.call(800, "batch"), 1.0)) for _ in range(2)]
        tasks += [asyncio.create_task(world.use(world.call(800, "default"), 1.0)) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(Refused) as caught:
            await batch[1]
        assert caught.value.outcome is Outcome.SHED
        assert "which is more important, took the place" in caught.value.message
        assert world.loop.time() == 0.0
        await asyncio.gather(*tasks, batch[0])

    virtual(scenario, policy=BLIND)


def test_a_reserve_is_kept_for_its_class() -> None:
    policy = Policy(classes={"interactive": TrafficClass(reserve=0.5), "default": TrafficClass(max_queue=9)})

    async def scenario(world: World) -> None:
        default = [asyncio.create_task(world.use(world.call(200, "default"), 2.0)) for _ in range(4)]
        await asyncio.sleep(0)
        assert world.engine().ledger.held == 400, "the other half is not theirs"
        await world.use(world.call(400), 1.0)
        assert world.loop.time() == pytest.approx(1.0), "it had not to wait"
        await asyncio.gather(*default)
        assert world.loop.time() == pytest.approx(4.0)

    virtual(scenario, policy=policy)


def test_a_class_at_its_limit_waits_while_others_pass() -> None:
    async def scenario(world: World) -> None:
        batch = [asyncio.create_task(world.use(world.call(10, "batch"), 2.0)) for _ in range(2)]
        await asyncio.sleep(0.5)
        await world.use(world.call(10, "default"), 0.5)
        assert world.loop.time() == pytest.approx(1.0)
        await asyncio.gather(*batch)
        assert world.loop.time() == pytest.approx(4.0)

    virtual(scenario, policy=BLIND)


def test_a_limit_of_a_class_that_frees_up_wakes_another_model() -> None:
    async def scenario(world: World) -> None:
        world.fleet.has_models(world.engine(1), [ModelCard(id="other", max_model_len=4096)])
        first = asyncio.create_task(world.use(world.call(10, "batch"), 1.0))
        await asyncio.sleep(0)
        await world.use(world.call(10, "batch", model="other"), 1.0)
        assert world.loop.time() == pytest.approx(2.0)
        await first

    virtual(scenario, engines=2, policy=BLIND)


def test_a_call_that_lost_its_engine_keeps_its_turn_and_is_not_shed_for_its_first_token() -> None:
    async def scenario(world: World) -> None:
        order: list[str] = []
        other = asyncio.create_task(world.use(world.call(800), 5.0))
        await asyncio.sleep(0)
        with await world.dispatch.ask(promised(world)) as grant:
            failed = grant.engine.id

            async def behind() -> None:
                with await world.dispatch.ask(world.call(800)):
                    order.append("behind")

            later = asyncio.create_task(behind())
            await asyncio.sleep(0)
            world.fleet.engines[failed].down()
            await grant.move(frozenset({failed}))
            order.append("moved")
            assert world.loop.time() == pytest.approx(5.0), "its target was 2 s, and passed while it waited"
            assert grant.engine.id != failed
        await asyncio.gather(other, later)
        assert order == ["moved", "behind"]

    virtual(scenario, engines=2, policy=BLIND)


def test_a_call_that_comes_back_when_told_goes_before_those_who_came_meanwhile() -> None:
    async def scenario(world: World) -> None:
        await asyncio.gather(*await busy(world, 1.0, 2))
        tasks = await busy(world, 1.0, 3)
        told = await refused(world, promised(world, body=b"again"))
        assert told.kept
        assert told.retry_after is not None
        traffic = world.dispatch.traffic["m"]
        assert len(traffic.bookings["interactive"]) == 1
        await asyncio.sleep(told.retry_after)
        order: list[str] = []

        async def one(name: str, call: Call) -> None:
            with await world.dispatch.ask(call):
                order.append(name)
                await asyncio.sleep(0.2)

        block = asyncio.create_task(world.use(world.call(800), 0.5))
        await asyncio.sleep(0)
        world.dispatch.control.apply(BLIND)  # newcomers are not turned away
        newcomers = [asyncio.create_task(one(f"new{number}", promised(world))) for number in range(2)]
        await asyncio.sleep(0)
        back = asyncio.create_task(one("back", promised(world, body=b"again")))
        await asyncio.gather(*tasks, block, back, *newcomers)
        assert order[0] == "back"
        assert len(traffic.bookings["interactive"]) == 0

    virtual(scenario, policy=PROMISES)


# -- reloads and engines that go ---------------------------------------------------------------------------------------


def drains(world: World) -> None:
    world.engine().draining = True


def loses_its_model(world: World) -> None:
    world.fleet.has_models(world.engine(), [ModelCard(id="other")])


@pytest.mark.parametrize("change", [drains, loses_its_model], ids=["drains", "loses_its_model"])
def test_when_the_last_engine_for_them_goes_those_who_wait_are_told(change: Callable[[World], None]) -> None:
    async def scenario(world: World) -> None:
        tasks = await busy(world, 5.0)
        waiting = asyncio.create_task(world.use(world.call(800), 1.0))
        await asyncio.sleep(1.0)
        change(world)
        world.dispatch.changed(world.engine())
        with pytest.raises(Refused) as caught:
            await waiting
        assert (caught.value.outcome, world.loop.time()) == (Outcome.NO_ENGINE, pytest.approx(1.0))
        await asyncio.gather(*tasks)

    virtual(scenario, policy=NOT_HELD)


def test_a_call_of_a_class_that_is_gone_goes_on_as_default() -> None:
    async def scenario(world: World) -> None:
        tasks = await busy(world, 2.0)
        waiting, arriving = world.call(800, "batch"), world.call(10, "batch")
        task = asyncio.create_task(world.use(waiting, 1.0))
        await asyncio.sleep(1.0)
        classes = {name: each for name, each in POLICY.classes.items() if name != "batch"}
        world.dispatch.apply(structs.replace(POLICY, classes=classes))
        assert waiting.class_name == "default"
        await asyncio.gather(task, *tasks)
        assert await world.use(arriving, 1.0) == "e0", "one that a batch of calls was held back for"
        assert arriving.class_name == "default"
        assert set(world.dispatch.running) == set(classes)

    virtual(scenario)


# -- work conservation -------------------------------------------------------------------------------------------------


def not_idle(world: World) -> None:
    """No head of a class waits while an engine has room for it, unless one before it starves or is not to be passed."""
    now, dispatch = world.loop.time(), world.dispatch
    paused = dispatch.control.workload.paused()
    for model, queues in dispatch.queues.items():
        engines = [engine for engine in world.fleet.serving(model) if engine.health.up and not engine.draining]
        held_up = False
        for ticket in queues.heads(now):
            name = ticket.call.class_name
            if name in paused or not ticket.waiting:
                continue
            passes = not held_up or dispatch.policy.classes[name].reserve
            held_up = held_up or not ticket.large
            usable = [engine for engine in engines if engine.id not in ticket.exclude] or engines
            fits = [engine for engine in usable if engine.takes(ticket.call.cost, ticket.call.class_name)]
            assert not (fits and passes), (now, ticket.call.class_name, fits)
            if now - ticket.since > (ticket.call.deadline - ticket.since) / 2:
                break


LIVELY = Policy(
    classes={
        "interactive": TrafficClass(weight=8, ttft=2.0, max_queue=20, reserve=0.2),
        "default": TrafficClass(weight=4, max_queue=10),
        "batch": TrafficClass(weight=1, max_queue=30, max_concurrency=3),
    },
    deadlines="drop",
)


async def live(world: World, seed: int, steps: int, *, every: float = 40.0) -> None:
    """Calls that come, wait, run, move, are cancelled and expire, over engines that come and go; looked at after every
    event of it."""
    rng = random.Random(seed)
    tasks: set[asyncio.Task[None]] = set()
    ends: list[str] = []

    async def one(call: Call, seconds: float, moves: bool) -> None:
        try:
            with await world.dispatch.ask(call) as grant:
                not_idle(world)
                await asyncio.sleep(seconds)
                if moves:
                    await grant.move(frozenset({grant.engine.id}))
                    not_idle(world)
                    await asyncio.sleep(seconds)
                grant.first_byte(world.loop.time())
        except Refused as refused:
            ends.append(refused.outcome.value)
        else:
            ends.append("ok")
        not_idle(world)

    for _ in range(steps):
        await asyncio.sleep(rng.expovariate(every))
        call = promised(world, rng.randint(1, 800), rng.choice(["interactive", "default", "batch"]))
        call.deadline = call.arrived + rng.uniform(0.2, 6.0)
        call.body = b"%d" % rng.randrange(200)
        task = asyncio.create_task(one(call, rng.uniform(0.0, 0.4), rng.random() < 0.05))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if rng.random() < 0.1:
            rng.choice(list(tasks)).cancel()
        engine = rng.choice(list(world.fleet))
        if rng.random() < 0.01:
            engine.down()
        elif rng.random() < 0.02:
            engine.draining = not engine.draining
        elif not engine.health.up and rng.random() < 0.3:
            engine.check(True, world.loop.time())
            engine.check(True, world.loop.time())
        world.dispatch.changed(engine)
        not_idle(world)
        assert all(0 <= engine.ledger.held <= 927 for engine in world.fleet)
    for engine in world.fleet:
        engine.draining = False
    await asyncio.gather(*tasks, return_exceptions=True)
    assert {"ok", "shed", "expired", "queue_full"} <= set(ends)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_nothing_is_idle_while_a_call_that_fits_waits(seed: int) -> None:
    async def scenario(world: World) -> None:
        await live(world, seed, 1500)

    virtual(scenario, engines=3, policy=LIVELY)


@pytest.mark.slow
def test_many_steps_leave_nothing_behind() -> None:
    async def scenario(world: World) -> None:
        await live(world, 99, 10_000)

    virtual(scenario, engines=3, policy=LIVELY)


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
                assert 0 <= engine.ledger.held <= 960
                if rng.random() < 0.05:
                    engine.check(True, world.loop.time())
                    engine.check(True, world.loop.time())
            world.dispatch.pump()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {type(result) for result in results}
        assert kinds == {str, Refused, asyncio.CancelledError}

    virtual(scenario, engines=3)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_stream_that_begins_before_its_prompt_is_read_teaches_nothing(path: str) -> None:
    """vLLM sends `response.created` before it reads the prompt."""
    tells = path != "/v1/responses"

    async def scenario(world: World) -> None:
        engine = world.engine()
        before = engine.speed.prefill_rate
        call = structs.replace(world.call(800), stream=True, route=ROUTES[path.encode()])
        for _ in range(8):
            with await world.dispatch.ask(call) as grant:
                await asyncio.sleep(0.005)
                grant.first_byte(world.loop.time())
                assert (engine.prefills.queued, engine.prefills.awaited) == (0 if tells else 800, 0)
                assert engine.prefills.queued_telling == 0
        assert (engine.speed.prefill_rate > 10 * before) == tells, "as fast as its first bytes"
        assert engine.prefills.queued == engine.prefills.queued_telling == 0

    virtual(scenario)


def test_a_call_that_fills_gaps_starts_as_soon_as_the_last_prompt_was_read() -> None:
    """No poll is there to wake it, and no call ends."""

    async def scenario(world: World) -> None:
        dispatch, now = world.dispatch, world.loop.time()
        one, other = (structs.replace(world.call(100), stream=True) for _ in range(2))
        with await dispatch.ask(one) as first, await dispatch.ask(other) as second:
            filler = asyncio.create_task(dispatch.ask(world.call(100, "batch")))
            await asyncio.sleep(0.1)
            first.first_byte(world.loop.time())
            await asyncio.sleep(0.1)
            assert not filler.done(), "a prompt has yet to be read"
            second.first_byte(world.loop.time())
            (await filler).close()
            assert world.loop.time() == pytest.approx(now + 0.2)

    classes = {**POLICY.classes, "batch": TrafficClass(headroom=0.4)}
    virtual(scenario, policy=Policy(classes=classes))
