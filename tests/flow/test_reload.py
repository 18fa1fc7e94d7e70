"""Reloads while calls wait and run, in virtual time: nothing is lost or leaked, and every caller is answered."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from gateway.core.engines.engine import Engine
from gateway.core.engines.origin import engine_id
from gateway.core.policy.policy import Budget, EngineEntry, FleetPolicy, Policy
from gateway.core.policy.traffic import Tenant, TrafficClass
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from gateway.serve.starting import ApplyError
from gateway.shared.vllm.answers import ModelCard
from loadtest.simulate import vtime
from tests.calls import a_call

CLASSES = {
    "interactive": TrafficClass(weight=8, max_queue=200, ttft=4.0),
    "default": TrafficClass(weight=4, max_queue=200),
    "batch": TrafficClass(weight=1, max_queue=200, max_concurrency=3),
    "offline": TrafficClass(weight=1, max_queue=200, reserve=0.1),
}
URLS = [f"http://engine-{number}:8000" for number in range(4)]


def policy(*engines: int, classes: dict[str, TrafficClass] = CLASSES, models: tuple[str, ...] = ()) -> Policy:
    entries = tuple(EngineEntry(url=URLS[number], models=models) for number in engines)
    return Policy(
        classes=classes,
        fleet=FleetPolicy(engines=entries),
        budget=Budget(capacity=1000),
        deadlines="drop",
        service_tiers={},
    )


class World:
    """A gateway over engines of 1,000 tokens (800 may be promised), without its wire."""

    def __init__(self, first: Policy) -> None:
        self.loop = asyncio.get_running_loop()
        self.lines: list[str] = []
        self.gateway = Gateway(Configuration(first), (), None, random.Random(1), say=self.lines.append)
        self.dispatch = self.gateway.dispatch
        self.ready()

    def apply(self, new: Policy) -> None:
        self.gateway.apply(Configuration(new))
        self.ready()

    def ready(self) -> None:
        """Engines that are new are seen."""
        for engine in self.gateway.fleet:
            if not engine.health.up and engine.health.back_at < 0:
                self.gateway.fleet.has_models(engine, [ModelCard(id="m", max_model_len=4096)])
                engine.check(True, self.loop.time())
                self.gateway.engines.changed(engine)

    def engine(self, number: int) -> Engine:
        return self.gateway.fleet.engines[engine_id(URLS[number])]

    def engines(self) -> list[int]:
        return [number for number, url in enumerate(URLS) if engine_id(url) in self.gateway.fleet.engines]

    def call(self, tokens: int = 800, class_name: str = "default", tenant: str = "t", within: float = 100.0) -> Call:
        now = self.loop.time()
        return a_call(class_name=class_name, tenant=tenant, arrived=now, deadline=now + within, prompt_tokens=tokens)

    async def use(self, call: Call, seconds: float) -> str:
        """One call from its arrival to its record, as the pipeline has it."""
        try:
            with await self.dispatch.ask(call) as grant:
                await asyncio.sleep(seconds)
                grant.first_byte(self.loop.time())
                return grant.engine.id
        finally:
            self.gateway.recorder.observe(Record(request_id=call.request_id, route=call.route.path))

    def start(self, *calls: Call, seconds: float = 1.0) -> list[asyncio.Task[str]]:
        return [asyncio.create_task(self.use(call, seconds)) for call in calls]

    def idle(self) -> None:
        """Everything has been given back, and what was to be forgotten is."""
        for engine in self.gateway.fleet:
            assert (engine.ledger.held, engine.ledger.in_flight, engine.prefills.queued) == (0, 0, 0), engine
            assert not any(map(any, engine.ledger.used.values()))
        assert set(self.gateway.engines.clients) == set(self.gateway.fleet.engines)
        assert not self.gateway.engines.retired
        assert set(self.gateway.telemetry._watchers) == set(self.gateway.fleet.engines)
        assert not any(self.dispatch.queues.values())
        assert not any(self.dispatch.running.values())
        assert not any(traffic.drain.held for traffic in self.dispatch.traffic.values())
        assert not any(self.dispatch.left_over().values())


def virtual(scenario: Callable[[World], Awaitable[None]], first: Policy) -> None:
    async def main() -> None:
        world = World(first)
        await scenario(world)
        world.idle()
        await world.gateway.aclose()

    vtime.run(main())


def test_a_removed_class_goes_on_as_default_and_is_forgotten_when_its_last_call_ends() -> None:
    async def scenario(world: World) -> None:
        running = world.start(world.call(class_name="batch"), seconds=3.0)
        await asyncio.sleep(0)
        calls = [world.call(class_name="batch") for _ in range(2)]
        waiting = world.start(*calls)
        await asyncio.sleep(1.0)
        fewer = {name: each for name, each in CLASSES.items() if name != "batch"}
        world.apply(policy(0, classes=fewer))
        assert [call.class_name for call in calls] == ["default", "default"]
        assert world.dispatch.running["batch"] == 1, "it runs on as what it was"
        await asyncio.gather(*running, *waiting)
        assert world.loop.time() == pytest.approx(5.0)
        world.apply(policy(0, classes=fewer))
        assert "batch" not in world.dispatch.running

    virtual(scenario, policy(0))


def test_a_new_class_is_there_at_once() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(KeyError):
            world.dispatch.running["new"]
        world.apply(policy(0, classes={"new": TrafficClass(max_concurrency=1), **CLASSES}))
        await asyncio.gather(*world.start(world.call(10, "new"), world.call(10, "new")))
        assert world.loop.time() == pytest.approx(2.0)

    virtual(scenario, policy(0))


def test_what_waits_goes_by_the_new_weights() -> None:
    async def scenario(world: World) -> None:
        order: list[str] = []

        async def one(call: Call) -> None:
            await world.use(call, 1.0)
            order.append(call.tenant)

        world.start(world.call())
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(one(world.call(tenant=tenant))) for tenant in "aaaabbbb"]
        await asyncio.sleep(0.5)
        tenants = {"a": Tenant(weight=1.0), "b": Tenant(weight=3.0)}
        world.apply(structs.replace(policy(0), tenants=tenants))
        await asyncio.gather(*tasks)
        assert order[:4].count("b") == 3

    virtual(scenario, policy(0))


def test_a_lifted_limit_lets_who_waits_go() -> None:
    async def scenario(world: World) -> None:
        tasks = world.start(*(world.call(10, "batch") for _ in range(5)), seconds=4.0)
        await asyncio.sleep(1.0)
        assert world.dispatch.running["batch"] == 3
        world.apply(policy(0, classes={**CLASSES, "batch": TrafficClass()}))
        assert world.dispatch.running["batch"] == 5
        await asyncio.gather(*tasks)

    virtual(scenario, policy(0))


def test_an_added_engine_takes_who_waits() -> None:
    async def scenario(world: World) -> None:
        tasks = world.start(*(world.call() for _ in range(2)), seconds=4.0)
        await asyncio.sleep(1.0)
        world.apply(policy(0, 1))
        assert {*await asyncio.gather(*tasks)} == {"engine-0:8000", "engine-1:8000"}
        assert world.loop.time() == pytest.approx(5.0)

    virtual(scenario, policy(0))


def test_a_removed_engine_ends_what_it_runs_gets_nothing_new_and_is_forgotten() -> None:
    async def scenario(world: World) -> None:
        tasks = world.start(*(world.call() for _ in range(3)), seconds=4.0)
        await asyncio.sleep(1.0)
        client = world.gateway.engines.clients[engine_id(URLS[1])]
        world.apply(policy(0))
        assert world.engines() == [0, 1]
        assert world.engine(1).draining
        world.gateway.engines.drain(world.engine(1), False)
        assert world.engine(1).draining, "an operator cannot bring back what the policy does not name"
        world.apply(policy(0))
        assert world.engines() == [0, 1], "told twice"
        await asyncio.sleep(3.5)
        assert world.engines() == [0]
        assert client._closed
        await asyncio.gather(*tasks)
        assert world.loop.time() == pytest.approx(8.0), "the third waited for the engine that stayed"

    virtual(scenario, policy(0, 1))


def test_an_engine_that_is_named_again_while_it_drains_is_the_one_it_was() -> None:
    async def scenario(world: World) -> None:
        tasks = world.start(world.call(), world.call(), seconds=4.0)
        await asyncio.sleep(1.0)
        engine, client = world.engine(1), world.gateway.engines.clients[engine_id(URLS[1])]
        world.apply(policy(0))
        world.apply(policy(0, 1))
        assert (world.engine(1), engine.draining, engine.ledger.in_flight) == (engine, False, 1)
        assert world.gateway.engines.clients[engine.id] is client
        await asyncio.gather(*tasks)
        assert world.engines() == [0, 1]
        await world.use(world.call(), 1.0)

    virtual(scenario, policy(0, 1))


def test_an_engine_that_is_named_again_after_it_was_forgotten_is_a_new_one() -> None:
    async def scenario(world: World) -> None:
        engine = world.engine(1)
        world.apply(policy(0))
        assert world.engines() == [0]
        world.apply(policy(0, 1))
        assert world.engine(1) is not engine
        await asyncio.gather(*world.start(world.call(), world.call()))

    virtual(scenario, policy(0, 1))


def test_who_waits_for_the_last_engine_is_told_when_it_is_removed() -> None:
    async def scenario(world: World) -> None:
        running, waiting = world.start(world.call(), seconds=4.0), world.start(world.call())
        await asyncio.sleep(1.0)
        world.apply(policy())
        with pytest.raises(Refused) as refused:
            await waiting[0]
        assert (refused.value.outcome, world.loop.time()) == (Outcome.NO_ENGINE, pytest.approx(1.0))
        await running[0]
        assert world.engines() == []

    virtual(scenario, policy(0))


def test_who_waits_for_a_model_that_no_engine_may_serve_any_more_is_told() -> None:
    async def scenario(world: World) -> None:
        running, waiting = world.start(world.call(), seconds=4.0), world.start(world.call())
        await asyncio.sleep(1.0)
        world.apply(policy(0, models=("other",)))
        with pytest.raises(Refused) as refused:
            await waiting[0]
        assert (refused.value.outcome, world.loop.time()) == (Outcome.NO_ENGINE, pytest.approx(1.0))
        await running[0]

    virtual(scenario, policy(0))


def test_an_engine_serves_at_once_what_its_entry_no_longer_keeps_from_it() -> None:
    async def scenario(world: World) -> None:
        engine, fleet = world.engine(0), world.gateway.fleet
        fleet.has_models(engine, [ModelCard(id="m"), ModelCard(id="n")])
        assert (fleet.serving("m"), fleet.serving("n")) == ((engine,), ())
        world.apply(policy(0, models=("m", "n")))
        assert fleet.serving("n") == (engine,), "nobody waits for its next list of models"
        world.apply(policy(0, models=("n",)))
        assert (fleet.serving("m"), fleet.serving("n")) == ((), (engine,))

    virtual(scenario, policy(0, models=("m",)))


def test_salts_of_caches_outlast_a_reload_unless_the_secret_is_another() -> None:
    tenants = {"acme": Tenant(), "globex": Tenant()}
    first = structs.replace(policy(0), tenants=tenants)

    async def main(world: World) -> None:
        def salt() -> bytes:
            return world.gateway.current.snapshot.tenants.accounts["acme"].cache_salt

        drawn = salt()
        assert drawn
        word = "0123456789abcdef"
        world.apply(structs.replace(first, limits=first.limits))
        assert salt() == drawn
        world.gateway.apply(Configuration(first, cache_secret=word))
        of_file = salt()
        assert of_file not in (b"", drawn)
        world.gateway.apply(Configuration(first, cache_secret=word))
        assert salt() == of_file

    virtual(main, first)


def test_a_policy_that_cannot_be_used_changes_nothing() -> None:
    async def scenario(world: World) -> None:
        before, snapshot = world.gateway.policy, world.gateway.current.snapshot
        world.gateway.engines._fixed = (EngineEntry(url=URLS[3]),)
        with pytest.raises(ApplyError, match="engine-3:8000 is there twice"):
            world.gateway.apply(Configuration(policy(0, 3)))
        with pytest.raises(ValueError, match="nonsense"):
            world.gateway.apply(Configuration(structs.replace(policy(), trusted_proxies=("nonsense",))))
        assert (world.gateway.policy, world.gateway.current.snapshot) == (before, snapshot)
        assert world.engines() == [0]
        assert not world.engine(0).draining

    virtual(scenario, policy(0))


async def live(world: World, seed: int, steps: int) -> None:
    """Calls come, wait, run, are cancelled and expire, while the policy changes under them."""
    rng = random.Random(seed)
    tasks: list[asyncio.Task[str]] = []
    sent = 0
    for _ in range(steps):
        await asyncio.sleep(rng.expovariate(40.0))
        names = list(world.gateway.policy.classes)
        call = world.call(rng.randint(1, 800), rng.choice(names), rng.choice("abc"), within=rng.uniform(0.3, 6.0))
        ttft = world.gateway.policy.classes[call.class_name].ttft
        call.ttft_by = call.arrived + ttft if ttft else call.ttft_by
        tasks += world.start(call, seconds=rng.uniform(0.0, 0.4))
        sent += 1
        if rng.random() < 0.1:
            rng.choice(tasks[-20:]).cancel()
        if rng.random() < 0.05:
            kept = {
                name: structs.replace(each, weight=rng.choice([1.0, 5.0]), strict=rng.random() < 0.2)
                for name, each in CLASSES.items()
                if name == "default" or rng.random() < 0.7
            }
            engines = [number for number in range(len(URLS)) if rng.random() < 0.6]
            tenants = {name: Tenant(weight=rng.choice([1.0, 4.0])) for name in "abc" if rng.random() < 0.7}
            world.apply(structs.replace(policy(*engines, classes=kept), tenants=tenants))
            assert {engine.id for engine in world.gateway.fleet if not engine.draining} == {
                engine_id(URLS[number]) for number in engines
            }
            assert set(world.dispatch.running) >= set(kept)
        for queues in world.dispatch.queues.values():
            assert all(ticket.call.class_name in world.gateway.policy.classes for ticket in queues)
    world.apply(policy(0, 1))
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    kinds = Counter(end.outcome if isinstance(end, Refused) else type(end) for end in ends)
    assert sum(kinds.values()) == sent
    assert set(kinds) <= {
        str, asyncio.CancelledError, Outcome.NO_ENGINE, Outcome.NOT_FOUND, Outcome.EXPIRED, Outcome.SHED,
        Outcome.QUEUE_FULL,
    }, kinds  # fmt: skip
    assert kinds[str] > steps / 3
    assert set(world.dispatch.running) >= set(CLASSES)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_reloads_under_random_lives_lose_nothing_and_leak_nothing(seed: int) -> None:
    async def scenario(world: World) -> None:
        await live(world, seed, 800)

    virtual(scenario, policy(0, 1))


@pytest.mark.slow
def test_thousands_of_random_lives_under_reloads() -> None:
    async def scenario(world: World) -> None:
        await live(world, 7, 4_000)

    virtual(scenario, policy(0, 1))


def test_operators_are_told_of_engines_that_come_are_drained_and_leave() -> None:
    async def scenario(world: World) -> None:
        one, two = world.gateway.fleet
        world.gateway.engines.changed(one)
        world.gateway.engines.changed(two)
        assert world.lines == [f"engine {one.id} is up; serves m", f"engine {two.id} is up; serves m"]
        world.lines.clear()
        world.gateway.engines.drain(one, True)
        world.gateway.engines.changed(one)
        world.gateway.engines.drain(one, False)
        hold = two.hold(10, 5, world.loop.time())
        world.apply(policy(0))
        world.apply(policy(0))
        hold.release()
        world.apply(policy(0, 1))
        world.gateway.engines.changed(world.gateway.fleet.engines[two.id])
        assert world.lines == [
            f"engine {one.id} gets no new calls: drained by an operator",
            f"engine {one.id} gets new calls again",
            f"engine {two.id} gets no new calls: the policy no longer names it (1 still run)",
            f"engine {two.id} gets new calls again",
        ]

    virtual(scenario, policy(0, 1))
