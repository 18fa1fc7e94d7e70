"""Attempts over engines that fail on demand: retries, their targets and costs, and hedging without waste.

Real sockets: what matters is which reply is relayed, and which connection is closed.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest
import uvloop

from gateway.core.engines import breaker
from gateway.core.engines.breaker import Ending
from gateway.core.policy.policy import Policy, Routing, Timeouts
from gateway.core.policy.traffic import Breaker
from gateway.core.request.record import Record
from gateway.serve.assembly import Gateway
from gateway.upstream.client import EngineError
from tests.faults.scripted import ScriptedEngine, ask, gateway_over, port_of, request, settled

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

# No test waits for a timeout; each is longer than a machine stands still.
PLAIN = {"timeouts": Timeouts(first_byte=60.0, stall=60.0), "routing": Routing(slow_start=0.0)}
POLICY = Policy(**PLAIN)  # type: ignore[arg-type] # fields of a Policy
HEDGED = Policy(hedging=0.03, **PLAIN)  # type: ignore[arg-type]
PATIENT = Policy(hedging=1.0, **PLAIN)  # type: ignore[arg-type] # longer than a machine stands still
Body = Callable[[Gateway, list[ScriptedEngine]], Awaitable[None]]


def scenario(behaviours: list[str], body: Body, policy: Policy = POLICY) -> None:
    """Run `body` over engines of these behaviours; the first is the one that is chosen first. Nothing is left after."""

    async def main() -> None:
        engines = [ScriptedEngine(behaviour) for behaviour in behaviours]
        async with AsyncExitStack() as stack:
            for engine in engines:
                await stack.enter_async_context(engine.running())
            gateway = await stack.enter_async_context(gateway_over(engines, policy))
            problems: list[str] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context)))
            for number, each in enumerate(gateway.fleet):
                each.speed.prefill_rate = 9_000.0 / 3**number  # else they are equals
            await body(gateway, engines)
            await settled(gateway)
            assert not any(traffic.drain.held for traffic in gateway.dispatch.traffic.values())
            assert problems == []
        async with asyncio.timeout(60):
            while any(engine.open for engine in engines):
                await asyncio.sleep(0.001)

    uvloop.run(main())


def asked(engines: list[ScriptedEngine]) -> list[int]:
    return [len(engine.requests) for engine in engines]


# -- retries ----------------------------------------------------------------------------------------------------------


def test_a_429_is_asked_elsewhere_at_once_and_costs_budget() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request())
        assert (answer.status, asked(engines)) == (200, [1, 1])
        assert gateway.retries.recent.marked == 1
        assert [engine.breaker.failures for engine in gateway.fleet] == [0, 0], "it is busy, not broken"

    scenario(["429", "good"], body)


@pytest.mark.parametrize(
    ("engines", "retries", "calls"),
    [
        (1, 0.2, [1]),  # nobody else to ask
        (2, 0.2, [1, 1]),  # everybody was asked
        (4, 1.0, [1, 1, 1, 0]),  # as often as one call may
        (3, 0.0, [1, 0, 0]),  # there is no budget
    ],
)
def test_a_429_that_nobody_else_can_help_with_is_passed_through(engines: int, retries: float, calls: list[int]) -> None:
    async def body(gateway: Gateway, scripted: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request())
        assert (answer.status, sorted(asked(scripted), reverse=True)) == (429, calls)
        assert json.loads(answer.body)["error"]["message"] == "scripted"

    scenario(["429"] * engines, body, Policy(retries=retries, **PLAIN))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("17", "17"),
        ("0", "0"),
        ("Thu, 26 Nov 2026 09:00:25 GMT", "25"),
        ("Tue, 24 Nov 2026 00:00:00 GMT", "0"),
        ("-1", None),
        ("9" * 7, "86400"),
    ],
)
def test_seconds_after_which_an_engine_can_do_more_are_passed_through(said: str, told: str | None) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request())
        assert (answer.status, answer.headers.get("retry-after")) == (429, told)

    scenario([f"429 after {said}"], body, Policy(**PLAIN))  # type: ignore[arg-type]


def test_seconds_after_which_an_engine_is_back_are_told_with_its_failure() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request())
        assert (answer.status, 30 <= int(answer.headers["retry-after"]) <= 40) == (502, True)

    scenario(["503 after Thu, 26 Nov 2026 09:00:30 GMT"], body, Policy(**PLAIN))  # type: ignore[arg-type]


def test_when_everything_fails_retries_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        for _ in range(40):
            assert (await ask(port_of(gateway), request())).status == 502
        assert sum(asked(engines)) <= 40 + 0.2 * 40
        assert gateway.retries.left <= 1.0

    monkeypatch.setattr(breaker, "RATED", 1000)
    stubborn = Breaker(failures=1000)
    scenario(["503", "503", "503"], body, Policy(breaker=stubborn, **PLAIN))  # type: ignore[arg-type]


def test_the_move_from_one_lost_engine_is_free() -> None:
    """Many calls lose the same engine at once: the budget is for failures that retries make worse."""

    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answers = await asyncio.gather(*(ask(port_of(gateway), request(True)) for _ in range(12)))
        assert [answer.status for answer in answers] == [200] * 12
        assert gateway.retries.recent.marked == 0
        assert asked(engines)[0] > 0

    scenario(["die_before_headers", "good"], body, Policy(retries=0.0, **PLAIN))  # type: ignore[arg-type]


def test_the_move_from_the_second_lost_engine_is_not_free() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request(True))
        assert (answer.status, asked(engines)) == (502, [1, 1, 0])

    scenario(["die_before_headers", "die_before_headers", "good"], body, Policy(retries=0.0, **PLAIN))  # type: ignore[arg-type]


def test_no_move_is_free_while_the_others_fail_too() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        _, other = gateway.fleet
        other.breaker.ended(other.breaker.sent(gateway.clock()), Ending.FAILURE, gateway.clock())
        answer = await ask(port_of(gateway), request(True))
        assert (answer.status, asked(engines)) == (502, [1, 0])

    scenario(["die_before_headers", "good"], body, Policy(retries=0.0, **PLAIN))  # type: ignore[arg-type]


def test_a_time_out_at_the_deadline_is_the_deadlines_though_it_comes_a_moment_early() -> None:
    """Nobody is asked again in the last millisecond, and no engine is blamed."""

    class Early:
        def __init__(self, gateway: Gateway) -> None:
            self.gateway = gateway
            self.real = gateway.attempts.clock

        async def send(self, *_: object, timeout: float) -> None:  # noqa: ASYNC109 # as the real one
            early = self.real() + timeout - 0.002
            self.gateway.attempts.clock = lambda: early
            raise EngineError("timeout", "no answer in time")

    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        gateway.attempts.clients = dict.fromkeys(gateway.engines.clients, Early(gateway))  # type: ignore[arg-type]
        hurried = request().replace(b"host: localhost", b"host: localhost\r\nx-weir-deadline-ms: 900")
        answer = await ask(port_of(gateway), hurried)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (504, "deadline_exceeded")
        assert gateway.retries.recent.marked == 0
        assert [engine.breaker.failures for engine in gateway.fleet] == [0, 0]

    scenario(["good", "good"], body)


def test_an_engine_that_cannot_be_connected_to_is_out_at_once() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        engines[0].stop()
        await asyncio.sleep(0.01)
        assert (await ask(port_of(gateway), request())).status == 200
        assert [engine.health.up for engine in gateway.fleet] == [False, True]

    scenario(["good", "good"], body)


# -- hedging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", ["good", "long_pause"])
def test_a_stream_that_answers_in_time_is_relayed_and_nobody_else_is_asked(behaviour: str) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request(True))
        assert (answer.status, answer.complete) == (200, True)
        assert b"[DONE]" in answer.body
        assert asked(engines) == [1, 0]
        assert gateway.retries.recent.marked == 0

    scenario([behaviour, "good"], body, PATIENT)


def test_the_slower_is_cancelled_and_both_holds_come_back() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        records: list[Record] = []
        gateway.pipeline.endings.observe = records.append
        answer = await ask(port_of(gateway), request(True))
        assert (answer.status, answer.complete, asked(engines)) == (200, True, [1, 1])
        assert answer.headers["x-weir-engine"] == "engine-2"
        async with asyncio.timeout(30):
            while engines[0].open:
                await asyncio.sleep(0.001)
        await settled(gateway)
        assert gateway.retries.recent.marked == 1, "a second attempt is taken from the budget"
        assert [(record.engine, record.attempts) for record in records] == [(engines[1].url.removeprefix("http://"), 2)]
        assert [engine.breaker.failures for engine in gateway.fleet] == [0, 0], "to be slower is no failure"

    scenario(["hang", "good"], body, HEDGED)


def test_the_faster_is_relayed_to_its_end() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request(True))
        assert (answer.status, answer.complete, asked(engines)) == (200, True, [1, 1])
        assert b"[DONE]" in answer.body

    scenario(["hang", "pause"], body, HEDGED)


@pytest.mark.parametrize("loser", ["die_before_headers", "garbage", "503", "429", "500"])
def test_a_second_attempt_that_fails_is_harmless(loser: str) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        task = asyncio.create_task(ask(port_of(gateway), request(True)))
        async with asyncio.timeout(60):
            while not engines[1].requests:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert not task.done()
        first, second = gateway.fleet
        assert first.ledger.in_flight == 1
        task.cancel()
        await asyncio.wait([task])
        await settled(gateway)
        assert first.breaker.failures == 0
        assert second.breaker.failures == 0

    scenario(["hang", loser], body, HEDGED)


def test_the_first_attempt_answers_after_the_second_has_failed() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request(True))
        assert (answer.status, answer.complete, asked(engines)) == (200, True, [1, 1])
        assert answer.headers["x-weir-engine"] == "engine-1"

    scenario(["slow", "503"], body, HEDGED)


def test_no_second_attempt_without_budget_room_or_another_engine() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        _, other = gateway.fleet
        other.ledger.slots = 0
        assert (await ask(port_of(gateway), request(True))).status == 200
        other.ledger.slots = 8
        other.draining = True
        assert (await ask(port_of(gateway), request(True))).status == 200
        other.draining = False
        assert (await ask(port_of(gateway), request(False))).status == 200, "a whole answer is no late first byte"
        ample = gateway.current.policy
        gateway.current.policy = msgspec.structs.replace(ample, retries=0.0)
        assert (await ask(port_of(gateway), request(True))).status == 200
        gateway.current.policy = ample
        assert asked(engines) == [4, 0]
        gateway.dispatch.traffic["m"].level = 1
        assert (await ask(port_of(gateway), request(True))).status == 200, "none under pressure"
        gateway.dispatch.traffic["m"].level = 0
        assert asked(engines) == [5, 0]
        assert (await ask(port_of(gateway), request(True))).status == 200
        assert asked(engines) == [6, 1]

    scenario(["slow", "good"], body, HEDGED)


def test_when_both_fail_the_call_is_tried_again_or_told() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request(True))
        assert answer.status == 502
        assert asked(engines)[1] >= 1

    scenario(["slow_503", "503"], body, HEDGED)


def test_a_client_that_leaves_while_two_attempts_run_leaves_nothing_behind() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        rng = random.Random(6)
        for _ in range(15):
            engines[0].behaviour, engines[1].behaviour = rng.choice(["hang", "slow"]), rng.choice(["hang", "slow"])
            task = asyncio.create_task(ask(port_of(gateway), request(True)))
            await asyncio.sleep(rng.uniform(0.0, 0.12))
            task.cancel()
            await asyncio.wait([task])
            await settled(gateway)

    scenario(["hang", "hang"], body, HEDGED)
