"""Limits on clients of the data port: time, memory, numbers; clients that leave; draining; nothing left."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.relay.wire.body import ChunkedBody
from gateway.relay.wire.connection import ClientConnection
from gateway.relay.wire.messages import WireError
from gateway.relay.wire.server import Request, Responder, ServerSettings
from tests.wire.server_harness import ALIVE, TEXT, Client, Recorder, Rig, serve

HOLD = b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /hold HTTP/1.1\r\nHost: a\r\n"


def now() -> float:
    return asyncio.get_running_loop().time()


# -- time


@pytest.mark.parametrize("sent", [b"G", b"GET /g HTTP/1.1\r\nHost: a\r\n", b"\r"])
def test_headers_time_out(sent: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        assert await client.is_alive()
        start = now()
        await client.send(sent)
        answer = await client.answer()
        assert answer.status == 408
        assert answer.headers[b"connection"] == b"close"
        assert answer.error["code"] == "request_timeout"
        assert 0.08 <= now() - start < 5
        assert await client.end() == (b"", "closed")

    serve(scenario, headers_timeout=0.1)


def test_headers_time_out_does_not_wait_for_the_drip() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for byte in b"GET /" + b"a" * 500:
            await client.send(bytes([byte]))
            if client.reader._buffer:  # type: ignore[attr-defined]  # something has come
                break
            await asyncio.sleep(0.005)
        else:
            pytest.fail("each byte gave it more time")
        assert (await client.answer()).status == 408

    serve(scenario, headers_timeout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("framing", [b"Content-Length: 900\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n384\r\n"])
def test_body_times_out_without_progress(framing: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        start = now()
        await client.send(POST + framing)
        while now() - start < 3.5:  # longer than the limit, with progress
            last = now()
            await client.send(b"a")
            await asyncio.sleep(0.02)
        answer = await client.answer()
        assert answer.status == 408
        assert now() - last > 2.4
        assert await client.end() == (b"", "closed")
        assert not rig.handler.requests

    serve(scenario, body_timeout=2.5)  # so long may a busy machine make of a pause


class FullSink:
    """Takes no more after the first bytes, as a disk that hangs."""

    def __init__(self) -> None:
        self.fed = asyncio.Event()
        self.told = 0  # that the rest does not come

    def flow(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self.pause = pause

    def feed(self, data: bytes) -> None:
        self.pause()
        self.fed.set()

    def lost(self) -> None:
        self.told += 1


def test_a_body_whose_sink_takes_no_more_has_its_time_too() -> None:
    async def scenario(rig: Rig) -> None:
        sink = FullSink()
        monkeypatch.setattr(rig.handler, "head", lambda request: setattr(request, "sink", sink))
        client = await rig.client()
        await client.send(POST + b"Content-Length: 900\r\n\r\na")
        async with asyncio.timeout(60):
            await sink.fed.wait()
        await client.send(b"b")  # lies unread
        assert (await client.answer()).status == 408

    with pytest.MonkeyPatch.context() as monkeypatch:
        serve(scenario, body_timeout=0.3, body_total=1000.0)


@pytest.mark.parametrize("size", [10, 1000])
def test_a_sink_is_told_once_that_its_body_does_not_come(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a body that is refused by its announced length, before any byte."""

    async def scenario(rig: Rig) -> None:
        sink = FullSink()

        def head(request: Request) -> None:
            request.sink, request.limit = sink, 100

        monkeypatch.setattr(rig.handler, "head", head)
        client = await rig.client()
        await client.send(POST + b"Content-Length: %d\r\n\r\n" % size)
        if size > 100:
            assert (await client.answer()).status == 413
        else:
            client.reset()
        await rig.quiet()
        assert sink.told == 1

    serve(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", ALIVE, ALIVE + b"\r\n"])
def test_idle_connection_is_closed(sent: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        start = now()
        if sent:
            await asyncio.sleep(0.1)
            await client.send(sent)
            await client.answer()
        assert await client.end() == (b"", "closed")
        assert now() - start >= (1.08 if sent else 0.98)

    serve(scenario, keep_alive=1.0, headers_timeout=0.05)


def test_idle_connection_is_closed_however_late_the_deadline_of_its_last_call_is() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        (connection,) = rig.server._shared.open
        assert isinstance(connection, ClientConnection)
        deadline = now() + 3600.0
        responder.leave_by(deadline)
        while connection._timer_at < deadline:
            await asyncio.sleep(0.01)
        responder.send(200, TEXT, b"x")
        await client.answer()
        assert await client.end() == (b"", "closed")

    serve(scenario, keep_alive=0.1, headers_timeout=0.05)


def test_an_answer_may_take_longer_than_any_of_them() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        await asyncio.sleep(0.2)
        responder.send(200, TEXT, b"late")
        assert (await client.answer()).body == b"late"
        start = now()
        assert await client.end() == (b"", "closed")
        assert now() - start > 0.04

    serve(scenario, keep_alive=0.05, headers_timeout=0.05, body_timeout=0.05, write_stall=0.05)


def test_the_half_of_a_next_request_does_not_time_out_behind_an_answer() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD + ALIVE[:10])
        responder = await rig.handler.holding()
        await asyncio.sleep(0.3)
        responder.send(200, TEXT, b"x")
        assert (await client.answer()).status == 200
        await client.send(ALIVE[10:])
        assert (await client.answer()).status == 200

    serve(scenario, headers_timeout=0.2)


@pytest.mark.slow
def test_an_empty_line_does_not_start_a_request() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(ALIVE + b"\r\n")
        assert (await client.answer()).status == 200
        await asyncio.sleep(1.5)
        sent = now()
        await client.send(ALIVE[:10])
        await asyncio.sleep(0.02)
        await client.send(ALIVE[10:])
        assert (await client.answer()).status == 200
        assert rig.handler.requests[1].at >= sent - 0.01

    serve(scenario, headers_timeout=1.0)


def test_one_timer_however_many_requests() -> None:
    """Requests that arrive whole move no timer; the one there is stays the same."""

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        assert await client.is_alive()
        (connection,) = rig.server._shared.open
        assert isinstance(connection, ClientConnection)
        timer = connection._timer
        assert timer is not None
        for _ in range(50):
            assert await client.is_alive()
        assert connection._timer is timer

    serve(scenario)


# -- slow clients


async def fill(responder: Responder, total: int) -> None:
    responder.start(200, TEXT)
    for _ in range(total // 65536):
        responder.write(b"x" * 65536)


async def narrow(rig: Rig) -> Client:
    """A client that takes nothing it is not asked to read, but what fits the system's buffers."""
    client = await rig.client(limit=1024)
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    return client


@pytest.mark.parametrize("how", ["stream", "whole"])
def test_slow_client_is_reset(how: str) -> None:
    async def scenario(rig: Rig) -> None:
        client = await narrow(rig)
        await client.send(HOLD)
        responder = await rig.handler.holding()
        start = now()
        if how == "stream":
            await fill(responder, 16 << 20)
            await rig.handler.until(lambda: rig.handler.gone == ["slow_client"])
            assert responder.closed
            responder.write(b"dropped")
        else:
            responder.send(200, TEXT, b"x" * (16 << 20))
        await rig.quiet()
        assert 0.08 <= now() - start < 5
        assert (await client.end())[1] == "reset"

    serve(scenario, write_stall=0.1, keep_alive=5)


@pytest.mark.slow
def test_client_that_reads_steadily_is_not_slow() -> None:
    async def scenario(rig: Rig) -> None:
        client = await narrow(rig)
        await client.send(HOLD)
        responder = await rig.handler.holding()
        start = now()
        responder.send(200, TEXT, b"x" * (16 << 20))
        await client.reader.readuntil(b"\r\n\r\n")
        left = 16 << 20
        while left:
            left -= len(await client.reader.read(min(left, 65536)))
            await asyncio.sleep(0.01)
        assert now() - start > 2.0  # twice what a client that takes nothing is given
        assert await client.is_alive()

    serve(scenario, write_stall=1.0, keep_alive=60)  # which begins once the kernel has the rest, not the client


@pytest.mark.slow
def test_a_client_that_takes_little_is_not_slow() -> None:
    """Its kernel's buffer and ours hold so much that ours does not move for many times the stall."""

    async def scenario(rig: Rig) -> None:
        client = await narrow(rig)
        await client.send(HOLD)
        responder = await rig.handler.holding()
        await fill(responder, 16 << 20)
        await client.reader.readuntil(b"\r\n\r\n")
        start = now()
        while now() - start < 1.5:
            await client.reader.read(8192)
            await asyncio.sleep(0.01)
        assert rig.handler.gone == []
        client.reset()
        await rig.quiet()

    serve(scenario, write_stall=0.25, write_high_water=256 * 1024)


@pytest.mark.parametrize("unix", [False, True])
def test_a_client_that_takes_too_little_for_too_long_is_slow(
    monkeypatch: pytest.MonkeyPatch, unix: bool, tmp_path: Path
) -> None:
    monkeypatch.setattr("gateway.relay.wire.connection._STALLS", 4)

    async def scenario(rig: Rig) -> None:
        client = await narrow(rig)
        await client.send(HOLD)
        await fill(await rig.handler.holding(), 16 << 20)
        while not rig.handler.gone:
            await client.reader.read(8192)
            await asyncio.sleep(0.01)
        assert rig.handler.gone == ["slow_client"]
        await rig.quiet()

    path = str(tmp_path / "s") if unix else None
    serve(scenario, path=path, write_stall=0.1, write_high_water=8 << 20)


def test_backpressure_is_told() -> None:
    async def scenario(rig: Rig) -> None:
        client = await narrow(rig)
        await client.send(HOLD)
        responder = await rig.handler.holding()
        told: list[str] = []
        resumed = asyncio.Event()

        def resume() -> None:
            told.append("resume")
            resumed.set()

        responder.flow(lambda: told.append("pause"), resume)
        responder.start(200, TEXT)
        sent = 0
        while not told:
            responder.write(b"x" * 65536)
            sent += 65536
            await asyncio.sleep(0)
        assert told == ["pause"]
        late: list[str] = []
        responder.flow(lambda: late.append("pause"), resume)  # asked for while it is paused: told at once
        assert late == ["pause"]
        got = 0
        while not resumed.is_set():
            got += len(await client.reader.read(1 << 20))
        responder.end()
        assert told == ["pause", "resume"]
        assert rig.handler.gone == []

    serve(scenario)


@pytest.mark.parametrize("last", [False, True])
def test_an_answer_nobody_takes_does_not_keep_the_connection(last: bool) -> None:
    """Complete, below high water, never read: bounded by the idle time, or by the write stall once closing."""

    async def scenario(rig: Rig) -> None:
        client = await narrow(rig)
        await client.send(HOLD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") if last else HOLD)
        responder = await rig.handler.holding()
        responder.send(200, TEXT, b"x" * (12 << 20))
        assert responder.closed
        await rig.quiet()
        assert (await client.end())[1] == "reset"

    serve(scenario, write_high_water=1 << 30, write_stall=0.1, keep_alive=0.1)


def test_a_refusal_behind_an_answer_nobody_takes() -> None:
    async def scenario(rig: Rig) -> None:
        client = await narrow(rig)
        await client.send(HOLD + b"bad\r\n\r\n")
        responder = await rig.handler.holding()
        responder.send(200, TEXT, b"x" * (12 << 20))
        await rig.quiet()
        assert rig.server.refusals == {400: 1}
        assert (await client.end())[1] == "reset"

    serve(scenario, write_high_water=1 << 30, write_stall=0.1, linger=0.05)


# -- clients that leave


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("trailing", [0, 1000, 1_000_000])
@pytest.mark.parametrize("started", [False, True])
def test_leaving_is_seen_while_an_answer_is_pending(how: str, trailing: int, started: bool) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        if started:
            responder.start(200, TEXT)
            responder.write(b"x")
            await client.reader.readuntil(b"x")
        await client.send(b"GET /" + b"z" * trailing)
        await client.writer.drain()
        if how == "FIN":
            client.writer.write_eof()
        else:
            client.reset()
        await rig.handler.until(lambda: rig.handler.gone == ["client_gone"])
        assert responder.closed
        responder.write(b"dropped")
        responder.end()
        late: list[str] = []
        responder.watch(late.append)
        assert late == ["client_gone"]
        await rig.quiet()

    serve(scenario)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", POST + b"Content-Length: 9\r\n\r\nabc"])
@pytest.mark.parametrize("how", ["FIN", "RST"])
def test_leaving_before_the_request_is_complete(sent: bytes, how: str) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        assert await client.is_alive()
        await client.send(sent)
        await asyncio.sleep(0.005)
        if how == "FIN":
            client.writer.write_eof()
            assert await client.end() == (b"", "closed")
        else:
            client.reset()
        await rig.quiet()
        assert len(rig.handler.requests) == 1

    serve(scenario)


def test_a_fin_right_behind_an_answered_request_loses_nothing() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(ALIVE)
        client.writer.write_eof()
        rest, how = await client.end()
        assert (rest[-12:], how) == (b"GET /alive? ", "closed")

    serve(scenario)


def test_an_answer_is_told_its_time_once_and_may_be_ended_properly() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        responder.leave_by(now() + 0.05)
        await rig.handler.until(lambda: rig.handler.gone == ["deadline"])
        responder.send(504, TEXT, b"late")
        assert (await client.answer()).status == 504
        assert await client.is_alive()
        client.reset()
        await rig.quiet()
        assert rig.handler.gone == ["deadline"]

    serve(scenario)


def test_the_time_of_an_answer_ends_with_it() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for number, seconds in enumerate((0.05, 0.1), 1):
            await client.send(HOLD)
            responder = await rig.handler.holding(number)
            start = now()
            responder.leave_by(start + seconds)
            if number == 1:
                responder.send(200, TEXT, b"x")
                await client.answer()
        await rig.handler.until(lambda: rig.handler.gone == ["deadline"])
        assert now() - start > 0.05, "of the second answer, not of the first"

    serve(scenario)


def test_nobody_is_told_after_the_end() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        responder.send(200, TEXT, b"x")
        responder.watch(rig.handler.left)
        responder.flow(lambda: rig.handler.left("pause"), lambda: rig.handler.left("resume"))
        await client.answer()
        client.reset()
        await rig.quiet()
        assert rig.handler.gone == []

    serve(scenario)


def test_a_complete_answer_holds_on_to_nobody() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        watcher = Recorder()
        responder.watch(watcher.left)
        responder.flow(lambda w=watcher: w.left("pause"), lambda w=watcher: w.left("resume"))  # type: ignore[misc]
        seen = weakref.ref(watcher)
        responder.send(200, TEXT, b"x")
        del watcher
        assert seen() is None

    serve(scenario)


def test_half_open_clients_are_probed_for() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        assert await client.is_alive()
        (connection,) = rig.server._shared.open
        assert isinstance(connection, ClientConnection)
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        tcp = socket.IPPROTO_TCP
        idle, interval, count = (
            sock.getsockopt(tcp, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 15
        assert sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 15_000

    serve(scenario)


# -- floods


def test_pipelined_requests_are_bounded_in_number() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD + ALIVE * 1000)
        (await rig.handler.holding()).send(200, TEXT, b"x")
        answers = [await client.answer() for _ in range(5)]
        assert [b"connection" in answer.headers for answer in answers] == [False] * 4 + [True]
        assert (await client.end()) == (b"", "closed")
        assert len(rig.handler.requests) == 5

    serve(scenario, max_pipelined=4)


def test_what_comes_in_small_pieces_is_not_copied_for_each() -> None:
    """A head, and what follows a request that is being answered."""

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        assert await client.is_alive()
        (connection,) = rig.server._shared.open
        assert isinstance(connection, ClientConnection)
        for byte in (HOLD + ALIVE)[: len(HOLD) - 1]:
            connection.data_received(bytes([byte]))
        held = connection.requests._buffer
        assert isinstance(held, bytearray)
        connection.data_received(HOLD[-1:])
        responder = await rig.handler.holding()
        connection.data_received(b"G")
        held = connection.requests._buffer
        for byte in ALIVE[1:]:
            connection.data_received(bytes([byte]))
            assert connection.requests._buffer is held
        responder.send(200, TEXT, b"x")
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]

    serve(scenario)


def test_a_body_in_tiny_chunks_is_refused_where_each_costs_more_than_it_brings() -> None:
    """Steps of the parser per byte are bounded; a client that writes small pieces is not refused for a few."""
    one = b"1\r\nx\r\n"
    body = ChunkedBody(ServerSettings(), 10_000_000)
    assert body.feed(one * 16_384) is None
    with pytest.raises(WireError, match="chunks of less than 64 bytes"):
        body.feed(one * 1000)
    larger = ChunkedBody(ServerSettings(), 10_000_000)
    assert larger.feed((b"40\r\n" + b"x" * 64 + b"\r\n") * 40_000 + b"0\r\n\r\n") == b""


def test_pipelined_bytes_are_bounded() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        (connection,) = rig.server._shared.open
        assert isinstance(connection, ClientConnection)
        async with asyncio.timeout(60):
            while not connection.requests._last:
                await client.send(ALIVE * 1000, b"")
                assert len(connection.requests._buffer) <= 65536
        await client.send(ALIVE * 1000, b"")
        assert connection.requests._buffer == b""
        responder.send(200, TEXT, b"x")
        assert (await client.answer()).headers[b"connection"] == b"close"
        assert await client.end() == (b"", "closed")
        assert len(rig.handler.requests) == 1
        assert rig.handler.gone == []

    serve(scenario)


def test_max_connections() -> None:
    async def scenario(rig: Rig) -> None:
        first, second = await rig.client(), await rig.client()
        assert await first.is_alive()
        assert await second.is_alive()
        third = await rig.client()
        answer = await third.answer()  # without a byte of a request
        assert answer.status == 503
        assert answer.error["code"] == "server_is_overloaded"
        assert answer.headers[b"retry-after"] == b"2"
        assert answer.headers[b"connection"] == b"close"
        await third.send(b"not even HTTP")
        assert await third.end() == (b"", "closed")
        await third.close()
        client = await rig.client()
        await client.send(ALIVE)
        assert (await client.answer()).status == 503
        await client.close()
        await first.close()
        await rig.quiet(1)
        again = await rig.client()
        assert await again.is_alive()
        assert rig.server.refusals == {503: 2}

    serve(scenario, max_connections=2)


def test_far_over_max_connections_is_not_even_answered() -> None:
    async def scenario(rig: Rig) -> None:
        clients = [await rig.client() for _ in range(1 + 256 + 5)]
        ends = await asyncio.gather(*(client.end() for client in clients[1:]))
        assert sum(how == "reset" and not rest for rest, how in ends) == 5
        assert sum(rest.startswith(b"HTTP/1.1 503 ") for rest, _ in ends) == 256
        assert await clients[0].is_alive()

    serve(scenario, max_connections=1, linger=10)


# -- draining


def test_drain_lets_answers_finish_and_closes_the_idle() -> None:
    async def scenario(rig: Rig) -> None:
        idle, busy, streaming, coming = [await rig.client() for _ in range(4)]
        assert await idle.is_alive()
        await busy.send(HOLD)
        await rig.handler.holding(1)
        await streaming.send(HOLD)
        await rig.handler.holding(2)
        rig.handler.held[1].start(200, TEXT)
        rig.handler.held[1].write(b"a")
        await coming.send(POST + b"Content-Length: 2\r\n\r\na")
        await asyncio.sleep(0.005)
        drained = asyncio.create_task(rig.server.drain(5))
        assert await idle.end() == (b"", "closed")
        with pytest.raises(OSError):  # noqa: PT011 - refused, reset: as the system likes
            await rig.client()
        await coming.send(b"b")
        (await rig.handler.holding(3)).send(200, TEXT, b"x")
        assert (await coming.answer()).headers[b"connection"] == b"close"
        rig.handler.held[0].send(200, TEXT, b"late")
        answer = await busy.answer()
        assert (answer.body, answer.headers[b"connection"]) == (b"late", b"close")
        rig.handler.held[1].write(b"b")
        rig.handler.held[1].end()
        assert (await streaming.answer()).body == b"ab"
        assert await streaming.end() == (b"", "closed")
        await drained
        assert rig.server.connections == 0
        assert rig.handler.gone == []

    serve(scenario)


def test_a_gentle_drain_answers_what_comes_on_open_connections_once() -> None:
    async def scenario(rig: Rig) -> None:
        idle, busy = await rig.client(), await rig.client()
        assert await idle.is_alive()
        await busy.send(HOLD)
        await rig.handler.holding(1)
        drained = asyncio.create_task(rig.server.drain(5, gently=True))
        await asyncio.sleep(0.005)
        await idle.send(HOLD)  # it was on its way
        (await rig.handler.holding(2)).send(200, TEXT, b"late")
        assert (await idle.answer()).headers[b"connection"] == b"close"
        assert await idle.end() == (b"", "closed")
        rig.handler.held[0].send(200, TEXT, b"x")
        assert (await busy.answer()).headers[b"connection"] == b"close"
        await drained
        assert rig.server.connections == 0

    serve(scenario)


def test_a_stream_that_began_before_a_gentle_drain_has_promised_one_more_answer() -> None:
    async def scenario(rig: Rig) -> None:
        streaming = await rig.client()
        await streaming.send(HOLD)
        responder = await rig.handler.holding(1)
        responder.start(200, TEXT)
        drained = asyncio.create_task(rig.server.drain(5, gently=True))
        await asyncio.sleep(0.005)
        responder.write(b"ab")
        responder.end()
        assert b"connection" not in (await streaming.answer()).headers
        await streaming.send(HOLD)
        (await rig.handler.holding(2)).send(200, TEXT, b"x")
        assert (await streaming.answer()).headers[b"connection"] == b"close"
        assert await streaming.end() == (b"", "closed")
        await drained

    serve(scenario)


def test_a_gentle_drain_ends_too() -> None:
    async def scenario(rig: Rig) -> None:
        idle = await rig.client()
        assert await idle.is_alive()
        await rig.server.drain(0.05, gently=True)
        assert await idle.end() == (b"", "closed")

    serve(scenario)


@pytest.mark.slow
def test_drain_warns_and_then_aborts() -> None:
    async def scenario(rig: Rig) -> None:
        polite, deaf, half = [await rig.client() for _ in range(3)]
        await polite.send(HOLD)
        await rig.handler.holding(1)
        await deaf.send(HOLD)
        await rig.handler.holding(2)
        for responder in rig.handler.held:
            responder.start(200, TEXT)
        await half.send(b"GET /")
        await asyncio.sleep(0.005)
        start = time.monotonic()

        def farewell(reason: str) -> None:
            rig.handler.left("polite " + reason)
            rig.handler.held[0].write(b"data: error")
            rig.handler.held[0].end()

        rig.handler.held[0].watch(farewell)
        await rig.server.drain(0.1)
        assert time.monotonic() - start >= 0.28
        assert (await polite.answer()).body == b"data: error"
        assert await polite.end() == (b"", "closed")
        assert (await deaf.end())[1] == "reset"
        assert (await half.end())[1] == "reset"
        assert sorted(rig.handler.gone) == ["drain", "polite drain"]

    serve(scenario, drain_notice=0.2)


def test_drain_of_nothing_is_over_at_once() -> None:
    async def scenario(rig: Rig) -> None:
        async with asyncio.timeout(60):
            await rig.server.drain(math.inf)

    serve(scenario)


# -- nothing is left


def test_nothing_is_left_after_a_mix_of_everything() -> None:
    """Every kind of ending, many times; then no connection object is alive, without help of the collector."""
    rng = random.Random(7)

    async def one(rig: Rig) -> None:
        client = await rig.client()
        kind = rng.randrange(9)
        if kind == 0:
            assert await client.is_alive()
        elif kind == 1:
            await client.send(b"GET / HTTP/1.1\r\n\r\n")
            await client.end()
        elif kind == 2:
            await client.send(b"GET /g HT")
        elif kind == 3:
            await client.send(POST + b"Content-Length: 100000\r\n\r\n", b"abc")
        elif kind == 4:
            await client.send(HOLD + ALIVE)
        elif kind == 5:
            await client.send(b"GET /refuse HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        elif kind == 6:
            await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        elif kind == 7:
            await client.send(POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n", b"abc")
        else:
            await client.send(b"GET /g HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            await client.end()
        await asyncio.sleep(rng.random() * 0.02)
        for responder in rig.handler.held:
            if rng.random() < 0.3 and not responder.started:
                responder.start(200, TEXT)
                responder.write(b"x" * rng.randrange(1, 100_000))
                rng.choice([responder.end, responder.abort])()
        rng.choice([client.reset, client.writer.close, lambda: None])()

    async def scenario(rig: Rig) -> None:
        for _ in range(10):
            await asyncio.gather(*(one(rig) for _ in range(30)))
        await rig.server.drain(0.05)
        rig.handler.held.clear()
        for client in rig.clients:
            client.writer.transport.abort()
        rig.clients.clear()
        await asyncio.sleep(0)
        assert rig.server.connections == 0
        assert [item for item in gc.get_objects() if type(item) is ClientConnection] == []

    gc.collect()
    gc.disable()
    try:
        serve(scenario, headers_timeout=0.02, body_timeout=0.02, keep_alive=0.05, linger=0.02, drain_notice=0.01)
    finally:
        gc.enable()
