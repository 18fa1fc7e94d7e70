"""Connections that break while relay and decider live: nothing is promised twice, counted twice, or lost."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gateway.core.admission.bucket import Key
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Limit, Limits, RateLimit
from gateway.core.policy.types import Rate
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.request.routes import ROUTES
from gateway.decider.relays.session import RelaySession
from gateway.frames.calls import ask_of
from gateway.frames.messages import AllHeld, CallEnd, CountsAsk
from gateway.relay.remote import link
from gateway.relay.remote.decider import RemoteDecider
from gateway.serve.processes import relaying
from gateway.serve.processes.relaying import RelaySide
from loadtest.simulate.memory_wire import Sends
from loadtest.simulate.relays import relay_of
from tests.calls import a_call
from tests.faults.scripted import gateway_over
from tests.flow.test_relays import ENGINES, Asking, Setting, run, until
from tests.over_frames import hello, hub_of, link_to

ANONYMOUS: Key = ("requests", "anonymous", "", "")
NEVER_FULL = RateLimit(rate=Rate(1000, 86400.0), burst=1000)
COUNTED = Policy(limits=Limits(per_tenant=Limit(requests=NEVER_FULL)))


async def full(made: Setting) -> tuple[RemoteDecider, list[Asking], Asking]:
    """A relay whose two calls have the engine's two places, and its third, which waits."""
    decider = await made.relay()
    held = [Asking(made, decider, str(number)) for number in range(2)]
    for each in held:
        await each.granted.wait()
    waiting = Asking(made, decider, "waiting")
    await until(lambda: made.gateway.dispatch.estimates.waiting("m"))
    return decider, held, waiting


def test_a_relay_whose_connection_breaks_and_comes_again_never_stops_holding() -> None:
    """Nobody may be granted, meanwhile, what a stream that goes on has."""

    async def body(made: Setting) -> None:
        first, second = await made.relay(1), await made.relay(2)
        held = [Asking(made, first, str(number)) for number in range(2)]
        for each in held:
            await each.granted.wait()
        waiting, late = Asking(made, second, "waiting"), Asking(made, first, "late")
        await until(lambda: made.gateway.dispatch.estimates.waiting("m") == 2)
        least = []
        (session,) = [each for each in made.hub.sessions if each.hello and each.hello.relay == 1]
        session.close("the network is gone")
        await until(lambda: session not in made.hub.sessions)
        least.append(made.engine.ledger.in_flight)
        await until(lambda: len(made.hub.sessions) == 2 and made.gateway.dispatch.estimates.waiting("m") == 2)
        least.append(made.engine.ledger.in_flight)
        assert least == [2, 2]
        assert not waiting.granted.is_set()
        assert not late.granted.is_set()
        for each in held:
            await each.end()
        for each in (waiting, late):
            async with asyncio.timeout(60):
                await each.granted.wait()
            await each.end()
        await made.until_held(0)
        assert not any(session.calls or session.resync.orphans for session in made.hub.sessions)

    run(body)


def relay_with_a_record(made: Setting) -> RelaySide:
    """A relay's process in which a call has ended. Its link is not started."""
    connect: Any = link_to(lambda: made.hub)._connect
    side = relay_of(1, 1, 1, None, connect, {}, Sends(), 1, made.lines.append)
    side._client_of = side._new_client
    side._timer.cancel()  # the tests look at the time themselves
    side._ended.add(Record(request_id="r", route="/v1/chat/completions"), 0.0)
    return side


@pytest.mark.parametrize("handed_over", [False, True])
def test_what_a_relay_tells_last_reaches_a_decider_that_writes_to_it_meanwhile(
    monkeypatch: pytest.MonkeyPatch, handed_over: bool
) -> None:
    """The decider reads late; were the relay's end closed by then, a write would end the connection, the unread lost.
    `handed_over`: it hears no more, and the last is told to the decider that it has named."""

    monkeypatch.setattr(link, "TOLD_WITHIN", 60.0)

    async def body(made: Setting) -> None:
        side = relay_with_a_record(made)
        side.link.start()
        await side.link.ready.wait()
        (session,) = made.hub.sessions
        assert session.channel is not None
        transport: Any = session.channel._transport
        transport.pause_reading()
        signals: Any = SimpleNamespace(first=asyncio.Event())
        signals.first.set()

        async def end() -> None:
            await side.until_drained(signals)
            await side.aclose()

        ending = asyncio.create_task(end())
        await until(lambda: not side.link.connected)  # it has told
        before = made.hub
        if handed_over:
            before.hand_over(20.0, "another")
            made.hub = hub_of(made.gateway, 2)
        session.send(CountsAsk())
        session.channel.flush()
        for _ in range(20):  # a relay that waits for nothing has ended
            await asyncio.sleep(0)
        transport.resume_reading()
        async with asyncio.timeout(60):
            await ending
        await until(lambda: not before.sessions and not made.hub.sessions)
        await before.aclose()
        assert made.gateway.ended_calls.last == 1
        assert not [line for line in made.lines if "is gone" in line]

    run(body)


def test_calls_that_end_while_there_is_no_decider_are_told_to_the_next() -> None:
    async def body(made: Setting) -> None:
        side = relay_with_a_record(made)
        side._tell_counts()
        side.link.start()
        await side.link.ready.wait()
        for _ in range(2):
            side._timer.cancel()
            side._tell_counts()
        await until(lambda: made.gateway.ended_calls.last)
        await side.aclose()
        await until(lambda: not made.hub.sessions)
        assert made.gateway.ended_calls.last == 1

    run(body)


def test_what_a_relay_tells_last_is_told_once_to_a_decider_that_comes_while_it_looks_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The relay's totals are due in between: its timer runs out a thousand times a second."""
    monkeypatch.setattr(link, "TOLD_WITHIN", 60.0)
    monkeypatch.setattr(relaying, "COUNT_EVERY", 0.001)

    async def body(made: Setting) -> None:
        side = relay_with_a_record(made)
        side._tell_counts()
        signals: Any = SimpleNamespace(first=asyncio.Event())
        signals.first.set()
        ending = asyncio.create_task(side.until_drained(signals))
        await asyncio.sleep(0.02)
        side.link.start()
        async with asyncio.timeout(60):
            await ending
        await side.aclose()
        await until(lambda: not made.hub.sessions)
        assert made.gateway.ended_calls.last == 1

    run(body)


def test_a_call_that_waited_while_its_connection_broke_is_counted_once() -> None:
    async def body(made: Setting) -> None:
        _, held, waiting = await full(made)
        before = made.gateway.limits.level(ANONYMOUS)
        (session,) = made.hub.sessions
        session.close("the network is gone")
        await until(lambda: session not in made.hub.sessions and made.gateway.dispatch.estimates.waiting("m"))
        assert made.gateway.limits.level(ANONYMOUS) <= before
        for each in (*held, waiting):
            await each.end()
        await made.until_held(0)

    run(body, COUNTED)


@pytest.mark.parametrize("another", [False, True], ids=["the same decider", "another, which knows too little yet"])
def test_a_call_that_was_judged_before_its_connection_broke_is_counted_there_and_finds_an_engine(another: bool) -> None:
    """As one that may share another's request: it wants no engine when it is judged."""

    async def asks(made: Setting, judged: asyncio.Event, go: asyncio.Event) -> None:
        decider, now = await made.relay(), asyncio.get_running_loop().time()
        call = a_call(route=ROUTES[b"/v1/embeddings"], tenant="anonymous", arrived=now, deadline=now + 60.0)
        account = made.gateway.current.snapshot.tenants.accounts["anonymous"]
        record = Record(request_id="r", route=call.route.path)
        with decider.arrive(made.gateway.current.snapshot, account, record, now, b"") as admission:
            await admission.judge(call)
            judged.set()
            await go.wait()
            with await admission.ask(call):
                assert made.engine.ledger.held == call.cost
                admission.settle(10, now)
        admission.ended(Outcome.OK)

    async def broken(made: Setting, expected: dict[int, int]) -> None:
        judged, go = asyncio.Event(), asyncio.Event()
        asking = asyncio.create_task(asks(made, judged, go))
        await judged.wait()
        if expected:
            await made.dies()
            async with gateway_over(ENGINES, COUNTED) as gateway:
                made.gateway, made.engine = gateway, next(iter(gateway.fleet))
                made.hub, made.dead = hub_of(gateway, 2, expected), False
                await until(lambda: made.links[0].connected)
                go.set()
                await asyncio.sleep(0)
                await made.relay(2)
                await ended(made, asking)
                await made.hub.aclose()
        else:
            (session,) = made.hub.sessions
            session.close("the network is gone")
            await until(lambda: session not in made.hub.sessions and made.links[0].connected)
            go.set()
            await ended(made, asking)

    async def ended(made: Setting, asking: asyncio.Task[None]) -> None:
        await asking
        await made.until_held(0)
        assert 0.9 < made.gateway.limits.level(ANONYMOUS) <= 1

    run(lambda made: broken(made, {1: os.getpid(), 2: os.getpid()} if another else {}), COUNTED)


def test_a_refusal_that_was_lost_with_its_connection_counts_one_request() -> None:
    """The call is asked for once more, and refused once more."""

    async def body(made: Setting) -> None:
        now = asyncio.get_running_loop().time()
        call = a_call(max_tokens=50, tenant="anonymous", arrived=now, deadline=now + 60.0)
        before, again = RelaySession(made.hub), RelaySession(made.hub)
        first, second = (ask_of(1, call, 1, wait=True) for _ in range(2))
        second.turn = 1
        for message in (hello(), AllHeld(0, []), first):
            before.take(message)
        assert 0.9 < made.gateway.limits.level(ANONYMOUS) <= 1
        before.lost("")
        end = CallEnd(1, now, left="refused", outcome=Outcome.RATE_LIMITED)
        for message in (hello(), second, AllHeld(1, [1]), end):
            again.take(message)
        assert 0.9 < made.gateway.limits.level(ANONYMOUS) <= 1
        again.lost("")

    few = RateLimit(rate=Rate(10, 60.0))
    run(body, Policy(limits=Limits(per_tenant=Limit(requests=NEVER_FULL, tokens=few))))


def test_a_call_whose_relay_was_out_of_reach_for_too_long_is_not_counted_twice() -> None:
    """As one of a machine that is past its time in a cluster's store: what its calls held has come back by then."""
    out_of_reach = False

    async def body(made: Setting) -> None:
        nonlocal out_of_reach
        _, held, waiting = await full(made)
        made.dead = out_of_reach = True
        (session,) = made.hub.sessions
        session.close("the network is gone")
        await until(lambda: session not in made.hub.sessions)
        await until(lambda: not made.hub.orphans)
        made.dead = out_of_reach = False
        await until(lambda: made.gateway.dispatch.estimates.waiting("m"))
        assert made.engine.ledger.in_flight == 2
        for each in (*held, waiting):
            await each.end()
        await made.until_held(0)
        assert made.gateway.limits.level(ANONYMOUS) <= 3

    run(body, COUNTED, lives=lambda _: not out_of_reach)


def test_a_question_of_an_earlier_connection_opens_no_call_anew() -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay()
        asking = Asking(made, decider)
        await asking.granted.wait()
        (asked,) = decider.link.calls.values()
        assert asked.ask is not None
        ask, end = asked.ask, asked.end
        await asking.end()
        await made.until_held(0)
        (session,) = made.hub.sessions
        session.close("the network is gone")
        await until(lambda: session not in made.hub.sessions and made.hub.sessions)
        (again,) = made.hub.sessions
        await until(lambda: again.resync.done)
        again.take(ask)
        assert not again.calls
        again.take(end)
        again.take(ask)
        assert not again.calls
        assert made.engine.ledger.held == 0

    run(body)


def test_an_answer_to_an_earlier_asking_is_not_obeyed() -> None:
    async def body(made: Setting) -> None:
        decider, held, waiting = await full(made)
        old = next(iter(decider.link.calls.values())).terms
        asked = list(decider.link.calls.values())[-1]
        (session,) = made.hub.sessions
        session.close("the network is gone")
        await until(lambda: session not in made.hub.sessions and made.gateway.dispatch.estimates.waiting("m"))
        asked.take(msgspec.structs.replace(old, number=asked.number, turn=0))
        await asyncio.sleep(0)
        assert not waiting.granted.is_set()
        for each in held:
            await each.end()
        async with asyncio.timeout(60):
            await waiting.granted.wait()
        await waiting.end()
        await made.until_held(0)

    run(body)
