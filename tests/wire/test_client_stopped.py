"""Time limits of exchanges with an engine in a gateway that was stopped: what came meanwhile is no silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from gateway.relay import issuer
from gateway.relay.attempts import hedged
from gateway.relay.prefilling import Prefilling
from gateway.upstream import unread
from gateway.upstream.client import Reply
from tests.stopped_loop import StoppedLoop, stopped
from tests.wire.client_harness import CHUNKED, PLAIN, Rig, Taken, chunk, failure, run

LONG = 30.0  # seconds, more than any limit on the engine, and less than those of the tests


@pytest.fixture(autouse=True)
def _looks_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in a socket is read within LOOK, however slow the machine is."""
    monkeypatch.setattr(unread, "LOOK", 60.0)


def run_stopped(scenario: Callable[[Rig], Awaitable[None]]) -> None:
    run(scenario, loop=StoppedLoop, stall_timeout=10.0)


def test_an_answer_that_went_on_meanwhile_goes_on() -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED + chunk(b"a"))
        taken = Taken().of(reply)
        stopped(LONG, partial(peer.put, chunk(b"b")))
        await rig.until(lambda: taken.pieces[1:] == [b"b"])
        stopped(LONG, partial(peer.put, b"0\r\n\r\n"))
        assert (await taken.end(), taken.body) == (None, b"ab")
        reply.close()

    run_stopped(scenario)


def test_an_answer_that_began_meanwhile_has_begun() -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending(timeout=10.0)
        peer = await rig.peer()
        await peer.request()
        stopped(LONG, partial(peer.put, PLAIN))
        reply = await sending
        assert reply.complete
        reply.close()

    run_stopped(scenario)


def test_silence_is_a_failure_all_the_same() -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending(timeout=10.0)
        await (await rig.peer()).request()
        stopped(LONG, lambda: None)
        assert (await failure(sending)).kind == "timeout"
        _, reply = await rig.reply(CHUNKED + chunk(b"a"))
        taken = Taken().of(reply)
        stopped(LONG, lambda: None)
        error = await taken.end()
        assert error is not None
        assert error.kind == "stall"
        reply.close()

    run_stopped(scenario)


def test_a_connection_that_was_made_meanwhile_is_there() -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending()
        await asyncio.sleep(0)  # it connects
        stopped(LONG, lambda: None)
        peer = await rig.peer()
        await peer.request()
        await peer.send(PLAIN)
        (await sending).close()

    run_stopped(scenario)


def test_an_answer_that_began_meanwhile_asks_for_no_second_attempt() -> None:
    async def scenario(rig: Rig) -> None:
        sends: list[object] = []

        def send(grant: object) -> asyncio.Task[Reply]:
            sends.append(grant)
            return rig.sending()

        calling = asyncio.create_task(hedged(None, send, 10.0))  # type: ignore[arg-type] # no grant is asked
        peer = await rig.peer()
        await peer.request()
        stopped(LONG, partial(peer.put, PLAIN))
        (await calling).close()
        assert sends == [None]

    run_stopped(scenario)


def test_a_prompt_that_was_read_meanwhile_is_read() -> None:
    async def scenario(rig: Rig) -> None:
        prefilling = Prefilling({"e": rig.client}, asyncio.get_running_loop().time)
        reading = asyncio.create_task(prefilling._read("e", b"/v1/x", b"a: b\r\n", b"{}", 10.0))
        peer = await rig.peer()
        await peer.request()
        await peer.send(CHUNKED + chunk(b"a"))
        stopped(LONG, partial(peer.put, chunk(b"b") + b"0\r\n\r\n"))
        assert await reading == b"ab"

    run_stopped(scenario)


def test_keys_of_an_issuer_that_came_meanwhile_are_read() -> None:
    async def scenario(rig: Rig) -> None:
        origin = rig.client.origin
        reading = asyncio.create_task(issuer._fetched(f"http://{origin.host}:{origin.port}/keys"))
        peer = await rig.peer()
        async with asyncio.timeout(60):
            await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(CHUNKED + chunk(b"a"))
        stopped(LONG, partial(peer.put, chunk(b"b") + b"0\r\n\r\n"))
        assert await reading == b"ab"

    run_stopped(scenario)
