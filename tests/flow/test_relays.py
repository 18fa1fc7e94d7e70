"""Relays and their decider over socket pairs: what each does when the other dies, lies, or speaks another language."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import uvloop

from gateway.core.admission.decider import Admission, Grant
from gateway.core.engines.breaker import Ending
from gateway.core.engines.trouble import Trouble
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Limit, Limits, RateLimit
from gateway.core.policy.types import Rate
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.decider.relays.session import RelaySession
from gateway.frames.calls import ask_of, terms_of
from gateway.frames.codec import FrameWriter, from_decider
from gateway.frames.messages import (
    VERSION,
    AllHeld,
    CallEnd,
    EndedRecords,
    EngineNews,
    FirstByte,
    FleetNews,
    Held,
    SecondAsk,
    WaitAsk,
    Welcome,
)
from gateway.relay.attempts import hedged
from gateway.relay.remote import asked
from gateway.relay.remote.decider import RemoteDecider
from gateway.relay.remote.link import Link
from gateway.serve.assembly import Gateway
from gateway.upstream.client import EngineError
from loadtest.simulate.memory_wire import Sends
from loadtest.simulate.relays import relay_of
from tests.calls import a_call
from tests.faults.scripted import ask, gateway_over, port_of
from tests.over_frames import hello, hub_of, link_to
from tests.wire.client_harness import Rig, failure
from tests.wire.client_harness import run as over_sockets

ENGINES = ["http://127.0.0.1:9"]  # nobody sends it anything


ONE_A_MINUTE = Policy(limits=Limits(per_tenant=Limit(requests=RateLimit(rate=Rate(1, 60.0)))))


class Setting:
    """A decider over one engine with two places, and what is needed to be its relay."""

    def __init__(self, gateway: Gateway, **more: Any) -> None:
        self.gateway = gateway
        self.lines: list[str] = []
        gateway.say = self.lines.append
        self.engine = next(iter(gateway.fleet))
        self.engine.ledger.slots = self.engine.ledger.max_slots = 2
        self.hub = hub_of(gateway, **more)
        self.links: list[Link] = []
        self.raw: list[RawRelay] = []
        self.dead = False  # no decider can be reached

    async def relay(self, number: int = 1) -> RemoteDecider:
        link = link_to(lambda: self.hub, number, self.lines, lambda: self.dead)
        self.links.append(link)
        link.start()
        await link.ready.wait()
        return RemoteDecider(link)

    async def dies(self) -> None:
        """The decider's process is killed."""
        self.dead = True
        await self.hub.aclose()
        await until(lambda: not any(link.connected for link in self.links))

    async def until_held(self, tokens: int) -> None:
        await until(lambda: self.engine.ledger.held == tokens)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def setting(policy: Policy | None = None, engines: list[str] = ENGINES, **more: Any) -> AsyncIterator[Setting]:
    async with gateway_over(engines, policy) as gateway:
        made = Setting(gateway, **more)
        try:
            yield made
        finally:
            for relay in made.raw:
                relay.close()
            for link in made.links:
                await link.aclose()
            await made.hub.aclose()


def run(body: Callable[[Setting], Awaitable[None]], policy: Policy | None = None, **more: Any) -> None:
    async def main() -> None:
        async with setting(policy, **more) as made, asyncio.timeout(60):
            await body(made)

    uvloop.run(main())


class Asking:
    """One call's way through a decider, as the pipeline goes it."""

    def __init__(self, made: Setting, decider: RemoteDecider, id: str = "r", *, stream: bool = True) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.call: Call = a_call(
            max_tokens=50,
            ascii_bytes=400,
            body=b"x" * 400,
            tenant="anonymous",
            request_id=id,
            arrived=now,
            deadline=now + 60.0,
            stream=stream,
        )
        self.record = Record(request_id=id, route=self.call.route.path)
        self.grant: Grant | None = None
        self.admission: Admission | None = None
        self.granted, self.leave = asyncio.Event(), asyncio.Event()
        self.task = loop.create_task(self._run(made, decider))

    async def _run(self, made: Setting, decider: RemoteDecider) -> None:
        snapshot = made.gateway.current.snapshot
        account = snapshot.tenants.accounts["anonymous"]
        self.admission = decider.arrive(snapshot, account, self.record, self.call.arrived, self.call.body)
        try:
            with self.admission as admission:
                judging = admission.judge(self.call)
                if judging is not None:
                    await judging
                grant = admission.at_once(self.call)
                with grant or await admission.ask(self.call) as self.grant:
                    self.granted.set()
                    await self.leave.wait()
                    admission.settle(10, self.call.arrived)
        finally:
            self.admission.ended(Outcome.OK)

    async def end(self) -> None:
        self.leave.set()
        await self.task


def test_a_call_goes_there_and_back() -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay()
        asking = Asking(made, decider)
        await asking.granted.wait()
        assert asking.grant is not None
        assert (asking.call.class_name, asking.record.class_name) == ("default", "default")
        assert made.engine.ledger.held == asking.call.cost == asking.grant.hold.tokens > 0
        assert made.engine.prefills.queued > 0
        asking.grant.first_byte(asking.call.arrived + 0.1)
        await until(lambda: not made.engine.prefills.queued)
        await asking.end()
        await made.until_held(0)
        assert not decider.link.calls
        assert not any(session.calls for session in made.hub.sessions)

    run(body)


def test_a_relay_is_told_the_model_that_an_alias_stands_for() -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay()
        asking = Asking(made, decider)
        made.gateway.dispatch.sidecars.models.aliases = {"alias": asking.call.model}
        model, asking.call.model = asking.call.model, "alias"
        await asking.granted.wait()
        assert (asking.call.model, asking.record.model) == (model, model)
        await asking.end()
        await made.until_held(0)

    run(body)


@pytest.mark.parametrize("when", ["before it is asked", "while it waits", "granted"])
def test_a_client_that_leaves_leaves_nothing(when: str) -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay()
        others = [Asking(made, decider) for _ in range(2)] if when == "while it waits" else []
        for other in others:
            await other.granted.wait()
        asking = Asking(made, decider)
        if when == "while it waits":
            await until(lambda: made.gateway.dispatch.estimates.waiting("m"))
        elif when == "granted":
            await asking.granted.wait()
        asking.task.cancel()
        await asyncio.gather(asking.task, return_exceptions=True)
        for other in others:
            await other.end()
        await until(lambda: not any(session.calls for session in made.hub.sessions))
        assert made.engine.ledger.held == 0
        assert not made.gateway.dispatch.estimates.waiting("m")

    run(body)


def test_holds_of_a_relay_that_dies_come_back_and_let_the_other_relays_calls_go() -> None:
    async def body(made: Setting) -> None:
        first, second = await made.relay(1), await made.relay(2)
        held = [Asking(made, first) for _ in range(2)]
        for each in held:
            await each.granted.wait()
        waiting = Asking(made, second)
        await until(lambda: made.gateway.dispatch.estimates.waiting("m"))
        await first.link.aclose()
        async with asyncio.timeout(30):
            await waiting.granted.wait()
        assert made.engine.ledger.in_flight == 1
        await waiting.end()
        for each in held:
            await each.end()  # into nothing: nobody is told
        await made.until_held(0)

    run(body, lives=lambda _: False)


def test_a_new_decider_is_told_what_is_held_before_it_grants_anything_and_asks_in_the_old_order() -> None:
    async def body(made: Setting) -> None:
        first, second = await made.relay(1), await made.relay(2)
        held = [Asking(made, first, "a"), Asking(made, second, "b")]
        for each in held:
            await each.granted.wait()
        assert held[0].grant is not None
        held[0].grant.first_byte(held[0].call.arrived)
        waiting = []
        for number in range(6):
            waiting.append(Asking(made, (first, second)[number % 2], str(number)))
            await until(lambda: made.gateway.dispatch.estimates.waiting("m") == len(waiting))
        tokens = made.engine.ledger.held
        await made.dies()
        late = Asking(made, first, "late")
        waiting.append(late)

        # Another process: nothing is known there but the engine.
        async with gateway_over(ENGINES) as gateway:
            made.gateway, made.engine = gateway, next(iter(gateway.fleet))
            made.engine.ledger.slots = made.engine.ledger.max_slots = 2
            made.hub = hub_of(gateway, 2, {1: 1, 2: 1, 3: 2**22 - 1})  # the third died with the decider
            made.dead = False
            await until(lambda: gateway.dispatch.estimates.waiting("m") == len(waiting))
            assert made.engine.ledger.held == tokens
            assert made.engine.ledger.in_flight == 2
            assert made.engine.prefills.queued == held[1].call.prompt_tokens, "the other's prompt was read"
            running = list(held)
            for next_one in waiting:  # one goes, and the one that came first comes
                await running.pop(0).end()
                async with asyncio.timeout(60):
                    await next_one.granted.wait()
                assert made.engine.ledger.in_flight == 2
                running.append(next_one)
            for each in running:
                await each.end()
            await made.until_held(0)
            await made.hub.aclose()

    run(body)


def test_a_relay_that_is_handed_over_takes_its_calls_along_and_the_old_decider_hears_no_more() -> None:
    async def body(made: Setting) -> None:
        relay = await made.relay(1)
        held = [Asking(made, relay, str(number)) for number in range(2)]
        for each in held:
            await each.granted.wait()
        waiting = Asking(made, relay, "waits")
        await until(lambda: made.gateway.dispatch.estimates.waiting("m"))
        old, tokens = made.hub, made.engine.ledger.held
        async with gateway_over(ENGINES) as gateway:
            before, made.gateway, made.engine = made.engine, gateway, next(iter(gateway.fleet))
            made.engine.ledger.slots = made.engine.ledger.max_slots = 2
            made.hub = hub_of(gateway, 2, old.relays())
            old.hand_over(5.0, "another")
            await until(lambda: before.ledger.held == 0)  # it promises nothing any more
            await until(lambda: gateway.dispatch.estimates.waiting("m"))
            assert (made.engine.ledger.held, made.engine.ledger.in_flight) == (tokens, 2)
            await asyncio.wait_for(old.empty.wait(), 5)
            await held[0].end()
            await waiting.granted.wait()
            for each in (held[1], waiting):
                await each.end()
            await made.until_held(0)
            assert not any("gone" in line for line in made.lines), "no decider has died"
            await made.hub.aclose()
        await old.aclose()

    run(body)


def test_a_relay_that_comes_after_the_hand_over_is_told_of_it_too() -> None:
    """A relay that has just been started would accept beside the successor's, and be granted the same engines here."""

    async def body(made: Setting) -> None:
        old = made.hub
        old.hand_over(5.0, "another")
        async with gateway_over(ENGINES) as gateway:
            hubs = [old, hub_of(gateway, 2)]
            link = link_to(lambda: hubs.pop(0) if hubs[1:] else hubs[0], 1, made.lines, lambda: False)
            made.links.append(link)
            link.start()
            await until(lambda: hubs[-1].sessions)
            await asyncio.wait_for(old.empty.wait(), 5)
            await hubs[-1].aclose()

    run(body)


def test_nothing_is_granted_while_a_relay_that_lives_has_not_told_what_it_holds() -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay(1)
        asking = Asking(made, decider)
        await until(lambda: any(session.waiting for session in made.hub.sessions))
        await asyncio.sleep(0.25)  # two looks of the hub's
        assert not asking.granted.is_set()
        other = await made.relay(2)
        async with asyncio.timeout(30):
            await asking.granted.wait()
        await asking.end()
        assert not other.link.calls

    run(body, expected={1: 1, 2: 1})


def test_calls_that_reach_no_decider_wait_until_their_deadline_and_are_told_when_to_come_back() -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay()
        await made.dies()
        asking = Asking(made, decider)
        asking.call.deadline = asking.call.arrived + 0.2
        with pytest.raises(Refused) as told:
            await asking.task
        assert (told.value.outcome, told.value.status, told.value.retry_after) == (Outcome.NO_ENGINE, 503, 1.0)
        assert not decider.up

    run(body)


def test_nobody_waits_for_ever_for_a_list_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "ASKED_WITHIN", 0.2)

    async def body(made: Setting) -> None:
        decider = await made.relay()
        await made.dies()
        gateway = made.gateway
        gateway.pipeline.others._decider = decider
        head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
        async with asyncio.timeout(10):
            told = await ask(port_of(gateway), head)
        assert (told.status, told.headers["x-weir-reason"]) == (503, "no_engine")
        assert not decider.link.calls

    run(body)


def test_a_refusal_arrives_whole() -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay()
        first, second = Asking(made, decider), Asking(made, decider)
        await first.granted.wait()
        with pytest.raises(Refused) as told:
            await second.task
        refused = told.value
        assert (refused.outcome, refused.status) == (Outcome.RATE_LIMITED, 429)
        assert refused.limit == "1/min requests"
        assert refused.retry_after is not None
        assert b"x-ratelimit-limit-requests: 1\r\n" in refused.headers
        assert second.record.class_name in {"", "default"}
        await first.end()
        await made.until_held(0)

    run(body, ONE_A_MINUTE)


def test_a_relay_hears_that_an_engine_is_back_before_a_grant_names_it() -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay()
        up: list[bool] = []

        def on_fleet(news: FleetNews) -> None:
            up.append(news.engines[0].up)

        made.links[0].on_fleet = on_fleet
        made.engine.down(Trouble("refused", "", made.gateway.clock()))
        await until(lambda: up == [False])
        made.engine.ready(made.gateway.clock())
        asking = Asking(made, decider)
        await asking.granted.wait()
        assert up == [False, True]
        await asking.end()
        await made.until_held(0)

    run(body)


def test_a_call_that_begins_on_an_engine_that_is_dead_already_moves() -> None:
    """A grant comes before the news of the death, and the call's task runs after them."""

    async def scenario(rig: Rig) -> None:
        side = relay_of(1, 1, 1, None, lambda _: asyncio.sleep(0), {}, Sends(), 1)
        side._client_of = side._new_client
        side._on_fleet(FleetNews((EngineNews("e", rig.client.origin.url, None, None, False),), (), True))
        sending = side.clients["e"].send(b"POST", b"/v1/x", b"", b"{}", timeout=30.0)
        assert (await failure(sending)).kind == "closed"
        await side.aclose()

    over_sockets(scenario)


# -- bad input --------------------------------------------------------------------------------------------------------


class RawRelay:
    """Bytes to a decider, and its messages."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self._reader = from_decider()
        self.messages: list[Any] = []

    async def send(self, *messages: Any) -> None:
        writer = FrameWriter()
        for message in messages:
            writer.add(message)
        await self.send_bytes(writer.take())

    async def send_bytes(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def close(self) -> None:
        self._socket.close()

    async def closed(self) -> None:
        """Read up to the end of the connection."""
        async with asyncio.timeout(60):
            while True:
                try:
                    data = await asyncio.get_running_loop().sock_recv(self._socket, 65536)
                except ConnectionError:
                    return
                if not data:
                    return
                for messages in self._reader.feed(data):
                    self.messages += messages


async def raw(made: Setting) -> RawRelay:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(made.hub.channel, theirs)
    made.raw.append(RawRelay(ours))
    return made.raw[-1]


GARBAGE = [
    (b"\xff" * 64, "a relay was cut off: a frame of 4294967295 bytes, where 1 to 67108864 are taken"),
    (struct.pack(">I", 2**30), "a relay was cut off: a frame of 1073741824 bytes, where 1 to 67108864 are taken"),
    (b"POST / HTTP/1.1\r\n\r\n", "a relay was cut off: a frame of 1347375956 bytes"),
    (struct.pack(">I", 2) + b"\x91\xc0", "a relay was cut off: no frame of ours: Expected `array`, got `None`"),
]


@pytest.mark.parametrize(("data", "line"), GARBAGE, ids=["ones", "1 GiB", "HTTP", "null"])
def test_garbage_is_cut_off_with_one_line_and_changes_nothing(data: bytes, line: str) -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay()
        asking = Asking(made, decider)
        await asking.granted.wait()
        relay = await raw(made)
        await relay.send_bytes(data)
        await relay.closed()
        await until(lambda: made.lines)
        (said,) = made.lines
        assert said.startswith(line)
        assert made.engine.ledger.held == asking.call.cost
        await asking.end()
        await made.until_held(0)

    run(body)


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([WaitAsk(1, 1)], "a relay was cut off: it has not said hello"),
        ([hello(5), hello(5)], "relay 5 was cut off: it says hello twice"),
        (
            [msgspec.structs.replace(hello(), version=VERSION + 1)],
            f"a relay was cut off: it speaks version {VERSION + 1} of the frames, and this decider version {VERSION}",
        ),
        (
            [msgspec.structs.replace(hello(), decider_epoch=9)],
            "a relay was cut off: it has met a decider of epoch 9: the epoch 1 is over",
        ),
    ],
)
def test_a_relay_that_may_not_join_is_told_in_one_line(messages: list[Any], line: str) -> None:
    async def body(made: Setting) -> None:
        relay = await raw(made)
        await relay.send(*messages)
        await relay.closed()
        await until(lambda: made.lines)
        assert made.lines == [line]
        assert not made.hub.sessions

    run(body)


def test_messages_about_calls_that_are_not_there_change_nothing() -> None:
    async def body(made: Setting) -> None:
        relay = await raw(made)
        await relay.send(hello(), AllHeld(0, []), FirstByte(1, 0.0), WaitAsk(1, 1))
        await until(lambda: made.hub.sessions)
        assert not made.lines
        assert made.engine.ledger.held == 0

    run(body)


def test_a_question_about_a_call_that_has_ended_comes_too_late() -> None:
    async def body(made: Setting) -> None:
        relay, now = await raw(made), asyncio.get_running_loop().time()
        call = a_call(max_tokens=50, tenant="anonymous", arrived=now, deadline=now + 60.0)
        ends = [CallEnd(number, now) for number in range(1, 10_000)]
        late = [ask_of(number, call, 1, wait=True) for number in (1, 5000, 9999)]
        await relay.send(hello(), AllHeld(0, []), *ends, *late, ask_of(10_000, call, 1, wait=True))
        await until(lambda: [session for session in made.hub.sessions if session.calls])
        (session,) = made.hub.sessions
        assert list(session.calls) == [10_000]

    run(body)


def test_an_old_question_gives_way_to_the_one_after_it() -> None:
    """A relay that has come again asks anew; its question of the connection before may come too, before it."""

    async def body(made: Setting) -> None:
        relay, now = await raw(made), asyncio.get_running_loop().time()
        call = a_call(max_tokens=50, tenant="anonymous", arrived=now, deadline=now + 60.0)
        asked = ask_of(1, call, 1, wait=True)
        old, new = (msgspec.structs.replace(asked, turn=turn) for turn in (1, 2))
        await relay.send(hello(), old, new, old)
        await until(lambda: [session for session in made.hub.sessions if session.waiting])
        (session,) = made.hub.sessions
        await until(lambda: session.waiting[1].turn == 2)
        await relay.send(AllHeld(1, [1]))
        await until(lambda: session.calls)
        assert session.calls[1].turn == 2

    run(body)


def test_the_decider_keeps_the_records_that_its_relays_tell() -> None:
    async def body(made: Setting) -> None:
        relay = await raw(made)
        record = Record(request_id="a", route="r", tenant="acme", outcome=Outcome.SHED, reason="why")
        await relay.send(hello(), AllHeld(0, []), EndedRecords([(1.5, record)]))
        await until(lambda: made.gateway.ended_calls.last)
        assert made.gateway.ended_calls.after(0, 9) == (1, ((1.5, record),))

    run(body)


def test_a_relay_obeys_no_decider_whose_epoch_is_over() -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay()
        assert decider.link.connected
        await made.dies()
        made.hub = hub_of(made.gateway, 0)
        made.hub.epoch = 0
        made.dead = False
        await until(lambda: any("the epoch 0 is over" in line or "its epoch 0 is over" in line for line in made.lines))
        assert not decider.link.connected

    run(body, epoch=3)


def test_a_relay_that_comes_again_takes_its_own_place() -> None:
    async def body(made: Setting) -> None:
        first, again = await raw(made), await raw(made)
        await first.send(hello(1, 1), AllHeld(0, []))
        await until(lambda: made.hub.sessions)
        await again.send(hello(1, 2), AllHeld(0, []))
        await first.closed()
        assert isinstance(first.messages[0], Welcome)
        await until(lambda: [each.hello for each in made.hub.sessions] == [hello(1, 2)])
        late = await raw(made)
        await late.send(hello(1, 1))
        await late.closed()
        assert len(made.hub.sessions) == 1

    run(body)


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "given up"])
def test_a_relay_that_comes_again_tells_what_became_of_a_second_attempt(taken: bool) -> None:
    """The news of that was lost with its connection. What it does not tell of is not held, and the call is one."""

    async def body(made: Setting) -> None:
        now = asyncio.get_running_loop().time()
        call = a_call(max_tokens=50, tenant="anonymous", arrived=now, deadline=now + 60.0)
        before, again = RelaySession(made.hub), RelaySession(made.hub)
        ask = ask_of(1, call, 1, wait=True)
        for message in (hello(), AllHeld(0, []), ask, SecondAsk(1, 1)):
            before.take(message)
        served = before.calls[1]
        await until(lambda: served.second)
        first, second = served.grant, served.second
        assert first is not None
        assert second is not None
        before.lost("")
        left = (second if taken else first).hold
        ask.turn = 1
        terms = terms_of(1, 1, 1, served.call, left)
        again.take(hello())
        again.take(Held(ask, terms, 0.0))
        again.take(AllHeld(1, [1]))
        assert [engine.ledger.held for engine in made.gateway.fleet if engine.ledger.held] == [left.tokens]
        assert left.live
        assert again.calls == {1: served}
        assert not again.resync.orphans
        again.take(CallEnd(1, now, Ending.NEUTRAL, 10))
        assert not made.gateway.dispatch.holds
        again.lost("")

    run(body, engines=[*ENGINES, "http://127.0.0.1:10"])


@pytest.mark.parametrize("broken", [False, True], ids=["at once", "once more"])
def test_a_relay_that_comes_again_with_another_hold_than_was_kept_has_that_one_alone(broken: bool) -> None:
    async def body(made: Setting) -> None:
        now = asyncio.get_running_loop().time()
        call = a_call(max_tokens=50, tenant="anonymous", arrived=now, deadline=now + 60.0)
        before, again = RelaySession(made.hub), RelaySession(made.hub)
        ask = ask_of(1, call, 1, wait=True)
        for message in (hello(), AllHeld(0, []), ask):
            before.take(message)
        kept = before.calls[1]
        assert kept.grant is not None
        hold = kept.grant.hold
        before.lost("")
        terms = terms_of(1, 0, 1, kept.call, hold)
        again.take(hello())
        terms.taken_at = earlier = hold.taken_at - 5.0
        again.take(Held(ask, terms, 0.0))
        if broken:  # before it has told of all
            again.lost("")
            again = RelaySession(made.hub)
            again.take(hello())
            again.take(Held(ask, terms, 0.0))
        again.take(AllHeld(1, [1]))
        assert [each.taken_at for each in made.gateway.dispatch.holds] == [earlier]
        assert not again.resync.orphans
        again.take(CallEnd(1, now, Ending.NEUTRAL, 10))
        assert not made.gateway.dispatch.holds
        again.lost("")

    run(body)


def test_a_first_answer_waits_for_no_grant_of_a_second_attempt() -> None:
    """A decider that waits for other relays grants nothing, and nothing later either."""

    async def body(made: Setting) -> None:
        asking = Asking(made, await made.relay())
        await asking.granted.wait()
        grant, answers = asking.grant, asyncio.get_running_loop().create_future()
        assert grant is not None
        sends: list[Grant] = []

        async def send(of: Grant) -> Any:
            sends.append(of)
            return await answers

        (session,) = made.hub.sessions
        (served,) = session.calls.values()
        made.hub.expect({2: os.getpid()})
        calling = asyncio.create_task(hedged(grant, send, 0.0))
        await until(lambda: served.task is not None and served.turn == 1)
        answers.set_result(SimpleNamespace(status=200))
        assert (await calling).status == 200
        await until(lambda: served.task is None)
        assert (sends, served.second) == ([grant], None)
        await asking.end()
        await until(lambda: not session.calls)

    run(body, engines=[*ENGINES, "http://127.0.0.1:10"])


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_a_first_attempt_that_fails_leaves_the_call_to_a_second_one(remote: bool) -> None:
    """It does so while its decider is asked for the second, too, which is then paid for."""

    async def body(made: Setting) -> None:
        asking = Asking(made, await made.relay() if remote else made.gateway.decider)
        await asking.granted.wait()
        grant, answers = asking.grant, dict[str, asyncio.Future[Any]]()
        assert grant is not None
        first, broke = grant.engine.id, EngineError("reset", "it broke")

        async def send(of: Grant) -> Any:
            answer = answers[of.engine.id] = asyncio.get_running_loop().create_future()
            return await answer

        calling = asyncio.create_task(hedged(grant, send, 0.0))
        if remote:
            made.hub.expect({2: os.getpid()})
            (session,) = made.hub.sessions
            (served,) = session.calls.values()
            await until(lambda: served.task is not None and served.turn == 1)
            answers[first].set_exception(broke)
            await made.relay(2)
        await until(lambda: len(answers) == 2 or calling.done())
        if not remote:
            answers[first].set_exception(broke)
        assert not calling.done()
        answers.popitem()[1].set_result(SimpleNamespace(status=200))
        assert (await calling).status == 200
        assert (grant.engine.id == first, made.gateway.dispatch.retries.recent.marked) == (False, 1)
        await asking.end()

    run(body, engines=[*ENGINES, "http://127.0.0.1:10"])
