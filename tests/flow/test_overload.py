"""Whole gateway under overload and failing engines, in virtual time: invariants for all numbers.

After every run: each call has had exactly one ending and one record that agrees with it, nothing is held, queued or
running any more, and no engine still works for somebody who is gone. While calls wait, no engine that can be used is
idle.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import pytest

from gateway.core.engines.choice import usable_of
from loadtest.clients.calls import Try
from loadtest.clients.retries import NOTHING_SAID, Clients
from loadtest.engine.config import sim_config
from loadtest.load.lengths import Length, LogNormal
from loadtest.load.plan import poisson
from loadtest.load.workload import Kind, Planned
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget, targets_of
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.simulation import Fault, SimulationRun

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

POLICY = b"""
version: 1
classes:
  interactive: {weight: 8, ttft: 2s, deadline: 30s, max_queue: 64}
  default: {weight: 4, ttft: 5s, deadline: 60s, max_queue: 64}
  batch: {weight: 1, deadline: 10m, max_queue: 200}
routing: {slow_start: 5s}
"""
PROMPT = Length(log_normal=LogNormal(150), least=16)
MIX = (
    Kind(class_name="interactive", share=0.4, prompt=PROMPT, output=Length(empirical=(64, 128))),
    Kind(class_name="default", share=0.4, prompt=PROMPT, output=Length(empirical=(128, 256))),
    Kind(class_name="batch", share=0.2, prompt=PROMPT, output=Length(constant=256)),
)
CAPACITY = 25.0  # calls of MIX per second that one engine answers, about
# What a client sees, and what the gateway may call it; anything else has the same name on both sides.
AGREES = {
    "timed_out": {"client_gone"},
    "left": {"client_gone"},
    "unfinished": {"client_gone"},
    "truncated": {"truncated", "expired"},
}


class World:
    """Engines small enough to be overloaded by a few calls a second, a gateway over them, and what it did."""

    def __init__(self, engines: int = 2, policy: bytes = POLICY) -> None:
        config = sim_config("a100-8b", num_gpu_blocks=1024, max_model_len=4096).engine
        self.engines = [MemoryEngine(config, seed=number) for number in range(engines)]
        self.target = GatewayTarget(policy, self.engines, seed=1)
        self.idle_while_waiting: list[float] = []
        self.levels: list[tuple[float, int]] = []
        self._loop = asyncio.get_running_loop()

    async def run(
        self,
        calls: Iterable[Planned],
        seconds: float,
        *,
        faults: tuple[Fault, ...] = (),
        clients: Clients | None = None,
        grace: float = 900.0,
    ) -> SimulationRun:
        patience = {name: target.deadline for name, target in targets_of(POLICY).items()}
        run = SimulationRun(
            self.engines, self.target, calls, clients=clients or Clients(patience=patience), seed=1, faults=faults
        )
        self._loop.call_later(1.0, self._look, seconds)
        result = await run.until(seconds, grace=grace)
        self.settled(result)
        return result

    def _look(self, until: float) -> None:
        now = self._loop.time()
        dispatch = self.target.gateway.dispatch
        waiting = sum(map(len, dispatch.queues.values()))
        usable = {engine.id for engine in usable_of(list(self.target.gateway.fleet), now)}
        working = zip(self.target.gateway.fleet, self.engines, strict=True)
        idle = [
            memory
            for engine, memory in working
            if engine.id in usable and memory.condition == "up" and memory.errors < 1.0 and not memory.engine.busy
        ]
        if waiting and idle:
            self.idle_while_waiting.append(now)
        self.levels += [(now, traffic.level) for traffic in dispatch.traffic.values()]
        if now < until:
            self._loop.call_later(0.25, self._look, until)

    def settled(self, result: SimulationRun) -> None:
        """The invariants of every run."""
        assert self.target.left_over() == []
        assert not any(engine.open for engine in self.engines)
        assert result.orphans == 0
        assert len({id(tried) for tried in result.tries}) == len(result.tries)
        assert sum(tried.number == 1 for tried in result.tries) == result.driver.calls
        for tried in result.tries:
            assert tried.recorded in AGREES.get(tried.outcome, {tried.outcome}), tried
            assert tried.sent <= tried.finished <= tried.recorded_at + 1e-9, tried
        assert "bug" not in {tried.recorded for tried in result.tries}
        assert self.idle_while_waiting == []


def outcomes(tries: Iterable[Try]) -> Counter[str]:
    return Counter(tried.outcome for tried in tries)


@pytest.mark.parametrize("factor", [2.0, 5.0])
def test_overload_refuses_some_serves_the_rest_and_loses_nobody(factor: float) -> None:
    async def scenario() -> None:
        world = World()
        seconds = 20.0 / factor
        result = await world.run(poisson(MIX, factor * 2 * CAPACITY, seconds, 1), seconds)
        ended = outcomes(result.tries)
        assert ended["ok"] > 0.5 * 2 * CAPACITY * seconds
        refused = {"queue_full", "deadline_unreachable", "shed", "expired"}
        assert set(ended) <= {"ok", "timed_out"} | refused
        assert sum(ended[word] for word in refused) > 0
        assert all(tried.advised > 0.0 for tried in result.tries if tried.outcome in refused), "each is told when"
        assert all(tried.upstream == 0 for tried in result.tries if tried.outcome in refused)

    vtime.run(scenario())


def test_under_a_flood_of_better_classes_batch_still_progresses() -> None:
    async def scenario() -> None:
        world = World(engines=1)
        flood = tuple(kind for kind in MIX if kind.class_name != "batch")
        batch = [kind for kind in MIX if kind.class_name == "batch"]
        calls = sorted(
            [*poisson(flood, 3 * CAPACITY, 40.0, 1), *poisson((batch[0],), 3.0, 40.0, 2)],
            key=lambda planned: planned.at,
        )
        result = await world.run(calls, 40.0, clients=Clients(retries=0))
        done = [tried for tried in result.tries if tried.class_name == "batch" and tried.outcome == "ok"]
        for begins in (10.0, 25.0):
            assert any(begins <= tried.finished < begins + 15.0 for tried in done)
        meanwhile = outcomes(t for t in result.tries if t.class_name == "interactive" and t.finished < 40.0)
        assert meanwhile["ok"] > 5 * sum(tried.finished < 40.0 for tried in done)

    vtime.run(scenario())


def test_a_killed_engine_costs_only_the_answers_it_had_begun() -> None:
    async def scenario() -> None:
        world = World(engines=3)
        faults = (Fault(at=20.0, what="die", engines=(0,)), Fault(at=30.0, what="recover", engines=(0,)))
        calls = poisson(MIX, 1.2 * CAPACITY, 50.0, 1)
        result = await world.run(calls, 50.0, faults=faults, clients=Clients(retries=0))
        assert set(outcomes(result.tries)) == {"ok", "truncated"}
        cut = [tried for tried in result.tries if tried.outcome == "truncated"]
        assert all(tried.sent < 20.0 and tried.first_byte > 0.0 for tried in cut)
        assert {tried.engine for tried in cut} == {"engine-0:8000"}
        late = [tried for tried in result.tries if tried.sent > 42.0]
        assert {tried.engine for tried in late} == {f"engine-{n}:8000" for n in range(3)}, "it is back in use"

    vtime.run(scenario())


def test_a_hung_engine_is_left_and_its_unanswered_calls_go_elsewhere() -> None:
    async def scenario() -> None:
        world = World(engines=3)
        faults = (Fault(at=20.0, what="stop", engines=(0,)),)
        calls = poisson(MIX, 0.8 * CAPACITY, 40.0, 1)
        result = await world.run(calls, 40.0, faults=faults, clients=Clients(retries=0))
        assert world.engines[0].posted_at < 25.0
        caught = [tried for tried in result.tries if tried.sent < 25.0 and not 0.0 <= tried.first_byte <= 20.0]
        assert any(tried.upstream > 1 for tried in caught)
        assert all(0.0 <= tried.first_byte - max(tried.sent, 20.0) < 6.0 for tried in caught), "none waits on it"
        lost = [tried for tried in caught if tried.status != 200]
        assert len(lost) <= 1, "what was meant to be fast may be too late by now"

    vtime.run(scenario())


def test_an_engine_that_is_well_and_works_on_nothing_is_taken_out_but_for_probes() -> None:
    async def scenario() -> None:
        world = World(engines=3)
        faults = (Fault(at=20.0, what="stall", engines=(0,)),)
        result = await world.run(
            poisson(MIX, 0.5 * CAPACITY, 150.0, 1), 150.0, faults=faults, clients=Clients(retries=0)
        )
        (stalled, *_), late = world.target.gateway.fleet, [tried for tried in result.tries if tried.sent > 55.0]
        assert stalled.health.trouble is not None
        assert "read and written no token for 1" in stalled.health.trouble.words, "of a probe"
        assert {tried.status for tried in late} == {200}
        waited = [tried for tried in late if tried.first_byte - tried.sent > 2.0]
        assert len(waited) == stalled.breaker.transitions["open"] - 1, "probes alone waited for it"

    vtime.run(scenario())


def test_while_every_engine_fails_retries_stay_within_their_budget() -> None:
    async def scenario() -> None:
        world = World()
        faults = (Fault(at=10.0, what="errors", value=1.0, status=503), Fault(at=30.0, what="recover"))
        result = await world.run(poisson(MIX, 0.6 * CAPACITY, 60.0, 1), 60.0, faults=faults)
        during = [tried for tried in result.tries if 10.0 <= tried.sent < 30.0]
        assert sum(tried.upstream for tried in during) <= 1.3 * len(during)
        after = outcomes(tried for tried in result.tries if tried.sent > 50.0)
        assert after["ok"] > 0.9 * after.total()

    vtime.run(scenario())


def test_failing_engines_degrade_the_mode_and_recovery_brings_it_back() -> None:
    async def scenario() -> None:
        world = World()
        faults = (Fault(at=10.0, what="errors", value=0.4, status=500), Fault(at=40.0, what="recover"))
        result = await world.run(poisson(MIX, 0.6 * CAPACITY, 90.0, 1), 90.0, faults=faults)
        assert max(level for at, level in world.levels if at < 45.0) > 0
        assert {level for at, level in world.levels if at > 85.0} == {0}
        assert set(outcomes(tried for tried in result.tries if tried.sent > 80.0)) == {"ok"}

    vtime.run(scenario())


def test_clients_that_leave_take_their_work_with_them() -> None:
    async def scenario() -> None:
        world = World()
        clients = Clients(leaves=0.5, leaves_after=1.0)
        result = await world.run(poisson(MIX, 3 * 2 * CAPACITY, 12.0, 1), 12.0, clients=clients)
        gone = [tried for tried in result.tries if tried.outcome == "left"]
        assert len(gone) > 200
        assert max(tried.recorded_at - tried.finished for tried in gone) < 0.01

    vtime.run(scenario())


def test_the_end_of_a_run_in_full_overload_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        world = World()
        result = await world.run(poisson(MIX, 5 * 2 * CAPACITY, 8.0, 1), 8.0, grace=0.0)
        assert result.unfinished > 50

    vtime.run(scenario())


LONG = Length(log_normal=LogNormal(3000, 0.6), least=16, most=7000)
CHATS_AND_PROMPTS = (
    Kind(class_name="interactive", share=0.6, output=Length(constant=512)),
    Kind(class_name="default", share=0.4, output=Length(constant=512), prompt=LONG),
)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_cold_gateway_keeps_the_watermark_and_the_targets_at_three_times_the_capacity(retries: int) -> None:
    """Calls at three times what an H100 can do, of whose speed, places and answers nothing is known."""

    async def scenario() -> None:
        engine = MemoryEngine(sim_config("h100-8b").engine, seed=3)
        target = GatewayTarget(b"", [engine], seed=3)
        calls = poisson(CHATS_AND_PROMPTS, 54.0, 30.0, 3)
        run = SimulationRun([engine], target, calls, clients=Clients(retries=retries, timeout=120.0), seed=3)
        result = await run.until(30.0, grace=90.0)
        assert not target.left_over()
        assert engine.engine.stats.preemptions == 0
        assert max(kv for _, [(kv, _, _), *_] in result.samples) < 0.92, "where calls start up to 0.8"
        assert max(running for _, [(_, running, _), *_] in result.samples) > 300, (
            "places are found out while calls wait"
        )
        firsts = [t for t in result.tries if t.class_name == "interactive" and t.number == 1]
        assert all(t.first_byte - t.sent <= 2.0 for t in firsts if t.outcome == "ok")
        assert sum(t.outcome == "ok" for t in firsts) >= 0.9 * len(firsts)
        refused = [t for t in result.tries if t.status == 503]
        assert len(refused) > 20
        assert all(t.advised != NOTHING_SAID for t in refused)

    vtime.run(scenario())
