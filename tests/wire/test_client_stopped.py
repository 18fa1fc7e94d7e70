"""Time limits of exchanges with an engine in a gateway that was stopped: what came meanwhile is no silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from tests.stopped_loop import StoppedLoop, stopped
from tests.wire.client_harness import CHUNKED, PLAIN, Rig, Taken, chunk, failure, run

LONG = 30.0  # seconds, more than any limit on the engine, and less than those of the tests


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
