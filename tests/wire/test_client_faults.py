"""Faults of engines and callers during an exchange: the right error, and the connection closed at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Iterator

import pytest

from gateway.upstream.client import Client, ClientSettings, EngineError, Reply, parse_origin
from gateway.upstream.connection import EngineConnection
from tests.wire.client_harness import CHUNKED, OK, PLAIN, Peer, Rig, Taken, chunk, failure, open_fds, run
from tests.wire.server_harness import UnhurriedLoop


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    ("sent", "kind", "before_bytes"),
    [
        (b"", "reset", True),
        (b"\r\n", "reset", False),
        (b"HTTP/1.1 200", "reset", False),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "reset", False),
        (OK + b"content-length: 2\r\n\r\n", "truncated", False),
        (CHUNKED, "truncated", False),
    ],
)
def test_an_engine_that_leaves_before_its_first_body_byte(how: str, sent: bytes, kind: str, before_bytes: bool) -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending()
        peer = await rig.peer()
        await peer.request()
        await peer.send(sent)
        getattr(peer, how)()
        error = await failure(sending)
        assert (error.kind, error.before_bytes) == (kind, before_bytes)
        assert "the engine closed the connection" in str(error)

    run(scenario)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    "sent",
    [
        OK + b"content-length: 10\r\n\r\nhello",
        CHUNKED + chunk(b"hello"),
        CHUNKED + b"a\r\nhello",
        CHUNKED + chunk(b"hello") + b"0\r\n",
    ],
)
@pytest.mark.parametrize("taken_first", [True, False])
def test_an_engine_that_leaves_in_the_middle(how: str, sent: bytes, taken_first: bool) -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(sent)
        taken = Taken()
        if taken_first:
            taken.of(reply)
        getattr(peer, how)()
        if not taken_first:
            await rig.until(lambda: reply._connection is not None and reply._connection.lost)
            taken.of(reply)
        error = await taken.end()
        assert error is not None
        assert (error.kind, error.before_bytes, taken.body, reply.complete) == ("truncated", False, b"hello", False)
        reply.close()

    run(scenario)


def test_a_body_until_close_is_not_whole_after_a_reset() -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(OK + b"\r\nhello")
        taken = Taken().of(reply)
        peer.reset()
        error = await taken.end()
        assert error is not None
        assert error.kind == "truncated"
        reply.close()

    run(scenario)


def test_a_read_of_an_answer_that_is_cut_raises() -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(OK + b"content-length: 10\r\n\r\nhello")
        reading = asyncio.create_task(reply.read(100))
        await asyncio.sleep(0)
        peer.close()
        with pytest.raises(EngineError) as cut:
            await reading
        assert cut.value.kind == "truncated"
        reply.close()

    run(scenario)


@pytest.mark.parametrize("first", [b"", b"SSH-2.0-x\r\n", PLAIN])
def test_an_engine_that_speaks_first_or_not_at_all(first: bytes) -> None:
    """It does so as soon as it has accepted: its bytes are there before the request is, or soon after."""

    async def scenario(rig: Rig) -> None:
        engine = rig.accepted

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            engine(reader, writer)
            writer.write(first)
            if not first:
                rig.all[-1].reset()

        rig.accepted = accepted  # type: ignore[method-assign] # the harness calls what is here
        for _ in range(20):
            try:
                reply = await rig.sending(timeout=60.0)
            except EngineError as error:
                assert (error.kind in ("reset", "garbage"), rig.client.active) == (True, 0)  # noqa: PT017 # or an answer
            else:
                assert first == PLAIN
                reply.close()
            await rig.client.aclose()
            rig.client._closed = False

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("at_rest", [True, False])
def test_a_connection_that_is_over_is_kept_by_nothing(at_rest: bool) -> None:
    """Not by its timer, which would be due in a minute."""

    async def scenario(rig: Rig) -> None:
        def connections() -> int:
            gc.collect()
            return sum(type(thing) is EngineConnection for thing in gc.get_objects())

        before = connections()
        if at_rest:
            (await rig.pooled()).close()
            await rig.until(lambda: rig.client.idle == 0)
        else:
            peer, reply = await rig.reply(CHUNKED, chunk(b"x"))
            reply.close()
            await peer.ended()
            del reply
        assert connections() == before

    run(scenario, idle_for=60.0)


# -- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sent", "before_bytes"), [(b"", True), (b"HTTP/1.1 2", False), (CHUNKED, False)])
def test_no_first_byte_in_time(sent: bytes, before_bytes: bool) -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending(timeout=0.03)
        peer = await rig.peer()
        await peer.request()
        await peer.send(sent)
        error = await failure(sending)
        assert (error.kind, error.before_bytes) == ("timeout", before_bytes)
        await peer.ended()

    run(scenario)


def test_the_first_byte_time_out_holds_on_a_reused_connection_and_is_not_repeated() -> None:
    async def scenario(rig: Rig) -> None:
        peer = await rig.pooled()
        error = await failure(rig.sending(timeout=0.03))
        assert (error.kind, error.before_bytes) == ("timeout", True)
        assert b"POST" in await peer.request()
        await peer.ended()
        assert rig.peers.empty()

    run(scenario)


def test_a_time_out_that_is_over_already() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.pooled()
        for timeout in (-1.0, 0.0, -1.0):  # on a connection from the pool, then on new ones
            assert (await failure(rig.sending(timeout=timeout))).kind == "timeout"

    run(scenario)


def test_a_first_byte_that_comes_with_the_time_out_is_an_answer() -> None:
    """The timer may be due in the very turn of the loop in which the sender has been woken."""

    async def scenario(rig: Rig) -> None:
        sending = rig.sending(timeout=0.02)
        peer = await rig.peer()
        await peer.request()
        (connection,) = [thing for thing in gc.get_objects() if type(thing) is EngineConnection and thing._waiter]
        time.sleep(0.03)  # noqa: ASYNC251 # the loop stands still while time passes
        connection.data_received(CHUNKED + chunk(b"x"))
        connection._wake()
        reply = await sending
        await peer.send(b"0\r\n\r\n")
        assert await reply.read(10) == b"x"
        reply.close()

    run(scenario)


@pytest.mark.slow
def test_a_stall_ends_an_answer_and_progress_puts_it_off() -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED, chunk(b"first"))
        taken = Taken().of(reply)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while loop.time() < began + 3.5:  # longer than the limit
            last = loop.time()
            await peer.send(chunk(b"more"))
            await asyncio.sleep(0.01)
        assert not taken.ends
        error = await taken.end()
        assert error is not None
        assert (error.kind, error.before_bytes) == ("stall", False)
        assert loop.time() - last > 2.4
        await peer.ended()
        reply.close()

    run(scenario, stall_timeout=2.5, loop=UnhurriedLoop)  # a process that is held up is not silent


def test_a_paused_reply_does_not_stall_and_a_resumed_one_has_all_its_time() -> None:
    async def scenario(rig: Rig) -> None:
        loop = asyncio.get_running_loop()
        _, reply = await rig.reply(CHUNKED, chunk(b"first"))
        taken = Taken().of(reply)
        reply.pause()
        reply.pause()
        await asyncio.sleep(0.1)  # twice and a half the stall time-out: what must not happen has no event
        assert taken.ends == []
        resumed = loop.time()
        reply.resume()
        reply.resume()
        error = await taken.end()
        assert error is not None
        assert error.kind == "stall"
        assert loop.time() - resumed > 0.035
        reply.close()

    run(scenario, stall_timeout=0.04)


def test_a_stall_time_out_counts_from_the_first_byte_also_before_anybody_takes_the_answer() -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED, chunk(b"first"))
        await peer.ended()
        taken = Taken().of(reply)
        error = await taken.end()
        assert error is not None
        assert (error.kind, taken.body) == ("stall", b"first")
        reply.close()

    run(scenario, stall_timeout=0.03)


# -- backpressure -----------------------------------------------------------------------------------------------------


def test_a_paused_reply_blocks_the_engine_and_loses_nothing() -> None:
    size, blocks = 64 * 1024, 256  # 16 MiB, far over what the kernel's buffers take

    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED, chunk(b"first"))
        taken = Taken().of(reply)
        reply.pause()
        written = 0

        async def engine() -> None:
            nonlocal written
            for _ in range(blocks):
                peer.writer.write(chunk(b"x" * size))
                await peer.writer.drain()
                written += size
            peer.writer.write(b"0\r\n\r\n")

        writing = asyncio.create_task(engine())
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.05)
        assert written < size * blocks  # blocked
        assert taken.body == b"first"
        reply.resume()
        assert await taken.end() is None
        assert len(taken.body) == 5 + size * blocks
        await writing
        reply.close()
        assert rig.client.idle == 1

    run(scenario)


def test_who_takes_what_came_early_may_pause() -> None:
    """Also where so much had come that the socket was not read any more."""

    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED, chunk(b"first"))
        for _ in range(40):
            peer.writer.write(chunk(b"x" * 1000))
        await rig.until(lambda: reply._connection is not None and reply._connection._full)
        taken = Taken()

        def data(data: bytes) -> None:
            taken.data(data)
            reply.pause()

        reply.relay(data, taken.done)
        early = len(taken.body)
        peer.writer.write(chunk(b"last") + b"0\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0)
        assert (len(taken.body), taken.ends) == (early, [])
        while not taken.ends:
            reply.resume()
            await asyncio.sleep(0)
        assert (await taken.end(), len(taken.body)) == (None, 5 + 40_000 + 4)
        reply.close()

    run(scenario, buffer=10_000)


def test_a_reply_closed_while_paused_leaves_no_paused_connection() -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED + chunk(b"x") + b"0\r\n\r\n")
        reply.pause()
        Taken().of(reply)
        reply.close()
        next_reply = await rig.again(peer, PLAIN)
        reply.pause()  # a reply that is over has no say any more
        next_reply.close()
        after = await rig.again(peer, PLAIN)
        reply.pause()
        assert await after.read(10) == b"ok"
        after.close()
        reply.close()
        assert rig.client.active == 0

    run(scenario)


# -- leaving ----------------------------------------------------------------------------------------------------------


def test_closing_in_the_middle_closes_the_connection_at_once_and_for_good() -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED, chunk(b"first"))
        taken = Taken().of(reply)
        fds = open_fds()
        reply.close()
        assert rig.client.active == 0
        reply.close()
        assert (rig.client.active, rig.client.idle) == (0, 0)
        await peer.ended()
        assert open_fds() < fds
        assert (taken.ends, reply.complete) == ([], False)
        with pytest.raises(RuntimeError, match="closed"):
            reply.relay(taken.data, taken.done)

    run(scenario)


def test_a_second_close_does_not_give_the_connection_back_twice() -> None:
    async def scenario(rig: Rig) -> None:
        _, reply = await rig.reply(PLAIN)
        assert reply.complete
        reply.close()
        reply.close()
        assert (rig.client.active, rig.client.idle, reply.complete) == (0, 1, True)

    run(scenario)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_who_takes_the_answer_may_close_it(early: bool, ended: bool) -> None:
    """Inside its callback, with more pieces at hand: not one more comes, and no other answer's bytes either."""

    async def scenario(rig: Rig) -> None:
        pieces = chunk(b"a") + chunk(b"b") + chunk(b"c") + (b"0\r\n\r\n" if ended else b"")
        peer, reply = await rig.reply(CHUNKED + pieces if early else CHUNKED + chunk(b"-"))
        got: list[bytes] = []
        ends: list[EngineError | None] = []

        def data(data: bytes) -> None:
            got.append(data)
            if data == b"a":
                reply.close()

        reply.relay(data, ends.append, data)
        if not early:
            await peer.send(pieces)
        assert got == ([b"a"] if early else [b"-", b"a"])
        assert ends == []
        assert rig.client.active == 0
        if early and ended:
            after = await rig.again(peer, PLAIN)
            assert await after.read(10) == b"ok"
            after.close()
        else:
            await peer.ended()
        assert len(got) == (1 if early else 2)

    run(scenario)


@pytest.mark.parametrize("where", ["data", "whole", "done", "early data", "early done"])
def test_an_exception_of_who_takes_the_answer_is_heard_and_harms_nobody_else(where: str) -> None:
    early = where.startswith("early")

    async def scenario(rig: Rig) -> None:
        other_peer, other = await rig.reply(CHUNKED, chunk(b"other"))
        other_taken = Taken().of(other)
        ending = chunk(b"bytes") + b"0\r\n\r\n"
        peer, reply = await rig.reply(CHUNKED + ending if early else CHUNKED + chunk(b"-"))
        ends: list[EngineError | None] = []

        def bug(data: bytes) -> None:
            if where.endswith("data") and data == b"bytes":
                raise ZeroDivisionError("a bug of ours")

        def whole(data: bytes) -> None:
            if where == "whole":
                raise ZeroDivisionError("a bug of ours")

        def done(error: EngineError | None) -> None:
            ends.append(error)
            if where.endswith("done"):
                raise ZeroDivisionError("a bug of ours")

        with pytest.raises(ZeroDivisionError) if early else contextlib.nullcontext():
            reply.relay(bug, done, whole)
        if not early:
            await peer.send(*([chunk(b"bytes")] if where == "whole" else [ending]))
            await peer.ended()
            (seen,) = rig.errors
            exception = seen["exception"]
            assert isinstance(exception, ZeroDivisionError) or isinstance(exception.__context__, ZeroDivisionError)
            assert [error and error.kind for error in ends] == ([None] if where == "done" else ["closed"])
        reply.close()
        assert rig.client.active == 1
        await other_peer.send(chunk(b"wise"), b"0\r\n\r\n")
        assert (await other_taken.end(), other_taken.body) == (None, b"otherwise")
        other.close()
        after = await rig.again(other_peer, PLAIN)
        assert await after.read(10) == b"ok"
        after.close()

    run(scenario, errors=0 if early else 1)


# -- cancellation -----------------------------------------------------------------------------------------------------


async def cancelled(sending: asyncio.Task[Reply]) -> None:
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


@pytest.mark.parametrize("reused", [True, False])
@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200", CHUNKED])
def test_cancelling_the_wait_for_an_answer_closes_the_connection(reused: bool, sent: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        peer: Peer | None = await rig.pooled() if reused else None
        sending = rig.sending()
        peer = peer or await rig.peer()
        await peer.request()
        await peer.send(sent)
        assert rig.client.active == 1
        await cancelled(sending)
        assert (rig.client.active, rig.client.idle) == (0, 0)
        await peer.ended()

    run(scenario)


def test_cancelling_with_the_answer_at_the_door() -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending()
        peer = await rig.peer()
        await peer.request()
        peer.writer.write(PLAIN)
        # The bytes are in the kernel; the loop will see them in the turn in which the task is cancelled, or before.
        for _ in range(10):
            asyncio.get_running_loop().call_soon(lambda: None)
        await asyncio.sleep(0)
        await cancelled(sending)
        assert (rig.client.active, rig.client.idle) == (0, 0)
        await peer.ended()

    run(scenario)


@pytest.mark.parametrize("turns", range(12))
def test_cancelling_at_every_turn_of_the_loop(turns: int) -> None:
    """From before the connect, over the connect, to the wait: nothing is left."""

    async def scenario(rig: Rig) -> None:
        fds = open_fds()
        sending = rig.sending()
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancelled(sending)
        assert rig.client.active == 0
        for peer in rig.all:
            with contextlib.suppress(ConnectionError):
                await peer.reader.read()
            peer.writer.transport.abort()
        await rig.until(lambda: open_fds() <= fds)

    run(scenario)


def test_cancelling_a_connect_that_hangs() -> None:
    async def scenario(rig: Rig) -> None:
        fds = open_fds()
        with full_backlog() as client:
            inside = open_fds()
            sending = asyncio.create_task(client.send(b"POST", b"/", b"", b"", timeout=60.0))
            await rig.until(lambda: open_fds() > inside)
            assert client.active == 1
            await cancelled(sending)
            assert client.active == 0
            await rig.until(lambda: open_fds() == inside)
        await rig.until(lambda: open_fds() == fds)

    run(scenario)


def test_a_connect_that_hangs_times_out() -> None:
    async def scenario(_: Rig) -> None:
        with full_backlog(connect_timeout=0.05) as client:
            error = await failure(client.send(b"POST", b"/", b"", b"", timeout=60.0))
            assert (error.kind, error.before_bytes) == ("connect", True)
            assert "0.1 s" in str(error)
            # A call that has less time than a connect may take is out of time; the engine is not to blame.
            error = await failure(client.send(b"POST", b"/", b"", b"", timeout=0.02))
            assert (error.kind, error.before_bytes) == ("timeout", True)
            assert client.active == 0

    run(scenario)


@contextlib.contextmanager
def full_backlog(connect_timeout: float = 60.0) -> Iterator[Client]:
    """A port that neither accepts nor refuses: Linux drops what comes to a full backlog."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = server.getsockname()[1]
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield Client(parse_origin(f"http://127.0.0.1:{port}"), ClientSettings(connect_timeout=connect_timeout))
