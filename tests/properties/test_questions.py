"""Purity of questions: of two runs of the same calls, one is asked thousands of questions, and both decide the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from msgspec import structs

from gateway.control.view import fleet_view
from gateway.core.admission.bucket import rate_lines
from gateway.core.admission.limits import LimitBook
from gateway.core.admission.retries import RetryBudget
from gateway.core.engines.breaker import Ending
from gateway.core.engines.choice import any_idle, choose, foreseen_ttft, least_ttft, predicted_ttft, usable_of
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.policy.policy import Policy
from gateway.core.policy.snapshot import Current, Snapshot
from gateway.core.policy.traffic import (
    Breaker,
    Limit,
    Limits,
    ModeRule,
    Modes,
    RateLimit,
    Threshold,
    TrafficClass,
)
from gateway.core.policy.types import Rate
from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused
from gateway.decider.dispatch import Dispatch
from gateway.shared.vllm.answers import EngineSample, ModelCard
from loadtest.simulate import vtime
from tests.calls import a_call

POLICY = Policy(
    classes={
        "interactive": TrafficClass(weight=8, ttft=1.0, max_queue=20, reserve=0.2),
        "default": TrafficClass(weight=4, max_queue=10, ttft=3.0),
        "batch": TrafficClass(weight=1, max_queue=30, max_concurrency=6),
    },
    limits=Limits(
        per_tenant=Limit(
            requests=RateLimit(rate=Rate(amount=9, period=1)), tokens=RateLimit(rate=Rate(amount=6_000, period=1))
        )
    ),
    modes=Modes(tight=ModeRule(enter=Threshold(errors=0.5), leave=Threshold(errors=0.3), dwell=1.0)),
)
BREAKER = Breaker(failures=3, open_for=0.5)


class Run:
    """Calls that come, wait, run, fail, move and leave over engines that come and go, with what became of each."""

    def __init__(self, seed: int, asked: int) -> None:
        self.asked = asked  # questions between two events
        self.rng = random.Random(seed)  # of the traffic
        self.curious = random.Random(seed + 1)  # of the questions
        self.policy = structs.replace(POLICY, breaker=BREAKER, deadlines="refuse" if seed % 3 else "drop")
        self.loop = asyncio.get_running_loop()
        self.fleet = Fleet()
        self.ends: list[tuple[float, str, str]] = []
        self.limits = LimitBook(self.policy)
        for number in range(3):
            engine = Engine(f"e{number}", f"http://127.0.0.1:{number}", self.policy, capacity=1000)
            self.fleet.add(engine)
            self.fleet.has_models(engine, [ModelCard(id="m", max_model_len=4096), ModelCard(id=f"own{number}")])
            engine.check(True, self.loop.time())
        self.dispatch = Dispatch(
            self.fleet, self.policy, random.Random(seed), self.loop.time, RetryBudget(Current(Snapshot(self.policy)))
        )

    def call(self) -> Call:
        rng, now = self.rng, self.loop.time()
        name = rng.choice(list(self.policy.classes))
        each = self.policy.classes[name]
        return a_call(
            model=rng.choice(["m", "m", "m", "own1"]),
            class_name=name,
            tenant=rng.choice("ab"),
            arrived=now,
            deadline=now + rng.uniform(0.5, 8.0),
            ttft_by=now + each.ttft if each.ttft is not None else float("inf"),
            prompt_tokens=rng.randint(1, 600),
            output_tokens=rng.randint(0, 200),
            stream=rng.random() < 0.7,
            prefix=(rng.randrange(20), 1),
            body=b"%d" % rng.randrange(100),
        )

    async def one(self, call: Call, seconds: float, ending: Ending, moves: bool) -> None:
        now = self.loop.time()
        try:
            with self.limits.charge(
                call.tenant, call.class_name, call.model, call.cost, now, None, call.body
            ) as charge:
                self.ends.append((now, call.tenant, charge.headers(now).decode()))
                with await self.dispatch.ask(call) as grant:
                    grant.ending = ending
                    await asyncio.sleep(seconds)
                    if moves:
                        await grant.move(frozenset({grant.engine.id}))
                        grant.ending = ending
                    self.ends.append((self.loop.time(), grant.engine.id, f"{call.predicted_wait} {call.shaped}"))
                    grant.first_byte(self.loop.time())
                    await asyncio.sleep(seconds)
                    grant.finished(self.loop.time(), call.prompt_tokens // 2, int(40 * seconds), None)
                    charge.settle(call.prompt_tokens, self.loop.time())
        except Refused as refused:
            self.ends.append((self.loop.time(), refused.outcome.value, f"{refused.message} {refused.retry_after}"))

    async def lives(self, steps: int) -> None:
        rng, tasks = self.rng, []
        for step in range(steps):
            await asyncio.sleep(rng.expovariate(60.0 if step // 100 % 2 else 10.0))
            self.ask()
            ending = rng.choices(list(Ending), [8, 2, 1])[0]
            tasks.append(asyncio.create_task(self.one(self.call(), rng.uniform(0.0, 0.3), ending, rng.random() < 0.1)))
            await asyncio.sleep(0)
            self.ask()
            engine = rng.choice(list(self.fleet))
            if rng.random() < 0.03:
                rng.choice(tasks).cancel()
            if rng.random() < 0.02:
                engine.down()
            elif not engine.health.up:
                for _ in range(2):
                    engine.check(True, self.loop.time())
            if rng.random() < 0.3:
                kv, waiting = rng.uniform(0.0, 0.9), rng.choice([0, 0, 9])
                running = engine.ledger.in_flight
                engine.sampled(EngineSample(running=running, waiting=waiting, kv_usage=kv), self.loop.time())
            self.dispatch.changed(engine)
            self.ask()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in self.fleet:
            self.ends.append(
                (0.0, engine.id, f"{engine.breaker.transitions} {engine.ledger.slots} {engine.ledger.trim}")
            )

    def ask(self) -> None:
        for _ in range(self.asked):
            self.curious.choice(QUESTIONS)(self, self.curious, self.loop.time() + self.curious.choice([0.0, 0.0, 0.7]))

    def newcomer(self, rng: random.Random) -> Call:
        own, self.rng = self.rng, rng
        try:
            return self.call()
        finally:
            self.rng = own


def traffic_asked(run: Run, rng: random.Random, now: float) -> None:
    """Everything that a prediction reads."""
    call = run.newcomer(rng)
    queues, traffic = run.dispatch.queues.get(call.model), run.dispatch.traffic.get(call.model)
    if queues is None or traffic is None:
        return
    ticket = rng.choice([None, *queues])
    if ticket is None:
        traffic.wait(queues, call, now, until=call.ttft_by, spare=100)
    else:
        traffic.wait(queues, ticket.call, now, ticket)
    traffic.drain.rate(now)
    traffic.drain.rate_of(call.class_name, 0.5, queues.passing(call.class_name), now)
    traffic.bookings[call.class_name].ahead(now, now + 5.0)
    traffic.refuses(call)
    traffic.usual_ttft(call.class_name, 0.9)
    queues.room(call)
    queues.victim(call)
    list(queues.heads(now))
    run.dispatch.estimates.wait(call.model)


def engines_asked(run: Run, rng: random.Random, now: float) -> None:
    call = run.newcomer(rng)
    engines = run.fleet.serving(call.model)
    engine = rng.choice(engines)
    engine.ledger.fits(call.cost, call.class_name)
    engine.ledger.fits(10**9)
    engine.prefills.ahead(now)
    engine.prefills.reading(10, now)
    engine.cache.leading(call.prefix)
    engine.ledger.flow(now)
    engine.breaker.allows(now)
    usable = usable_of(engines, now)
    any_idle(usable, call)
    least_ttft(engines, call, now)
    foreseen_ttft(engines, call, now)
    predicted_ttft(engine, 10, now)
    choose(engines, call, now, routing=run.policy.routing, rng=rng)


def limits_asked(run: Run, rng: random.Random, now: float) -> None:
    for bucket in run.limits._buckets.values():
        bucket.allows(1, now)
        bucket.admits(100, now)
        bucket.wait(5000, now)
        bucket.retry_after(5000, now)
        bucket.left(now)
        kinds = ((bucket,), ()) if bucket.key[0] == "requests" else ((), (bucket,))
        rate_lines(*kinds, now)


def dispatch_asked(run: Run, rng: random.Random, now: float) -> None:
    fleet_view(run.dispatch, now)
    control = run.dispatch.control
    control.decide(run.newcomer(rng), now, rng)
    control.to_wait(run.newcomer(rng), now, front=True)
    control.decide(structs.replace(run.newcomer(rng), model="nobody's"), now, rng)
    for queues in run.dispatch.queues.values():
        for ticket in queues:
            control.decide_waiting(ticket, queues, now, rng)
            control.overdue(ticket, now)
            control.unserved(ticket, now)
            control.too_late_for_model(ticket, now, now)
    run.dispatch.estimates.unserved("m")
    run.dispatch.estimates.waiting("own1")


QUESTIONS: list[Callable[[Run, random.Random, float], None]] = [
    traffic_asked,
    engines_asked,
    limits_asked,
    dispatch_asked,
]


def ends_of(seed: int, asked: int, steps: int) -> list[tuple[float, str, str]]:
    async def main() -> list[tuple[float, str, str]]:
        run = Run(seed, asked)
        await run.lives(steps)
        return run.ends

    return vtime.run(main())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_questions_change_no_later_decision(seed: int) -> None:
    unasked = ends_of(seed, 0, 400)
    assert {"e0", "e1", "e2", "shed"} <= {word for _, word, _ in unasked}
    assert ends_of(seed, 4, 400) == unasked


@pytest.mark.slow
def test_a_thousand_questions_between_two_events() -> None:
    assert ends_of(7, 333, 40) == ends_of(7, 0, 40)
