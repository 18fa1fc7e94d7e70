"""Answers: exact bytes, framing by HTTP version and method, order, 100 Continue, refusals at the head, TLS, unix."""

from __future__ import annotations

import asyncio
import itertools
import os
import ssl
import stat
from pathlib import Path

import pytest

from gateway.relay.wire.connection import DROP_PAUSE, DROPPED_AT_ONCE, ClientConnection
from gateway.relay.wire.server import Responder, Server, ServerSettings, answer
from gateway.relay.wire.states import LINGER
from tests.certificates import certificate as made_certificate
from tests.wire.server_harness import ALIVE, TEXT, Recorder, Rig, serve

HOLD = b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n"
HEAD = b"HEAD /hold HTTP/1.1\r\nHost: a\r\n\r\n"
OLD = b"GET /hold HTTP/1.0\r\n\r\n"
OLD_KEPT = b"GET /hold HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
LAST = b"GET /hold HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def whole(responder: Responder) -> None:
    responder.send(200, TEXT, b"hello")


def empty(responder: Responder) -> None:
    responder.send(204, b"x: y\r\n", b"")


def counted(responder: Responder) -> None:
    responder.start(200, TEXT, 5)
    responder.write(b"he")
    responder.write(b"")
    responder.write(b"llo")
    responder.end()


def streamed(responder: Responder) -> None:
    responder.start(200, TEXT)
    responder.write(b"hello")
    responder.write(b"")
    responder.write(b"0123456789abcdef")
    responder.end()


def streamed_nothing(responder: Responder) -> None:
    responder.start(200, TEXT)
    responder.end()


def unknown_status(responder: Responder) -> None:
    responder.send(599, b"", b"")


OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
CHUNKS = b"5\r\nhello\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"

# request, how it is answered, the exact bytes, whether the connection stays
ANSWERS = {
    "whole": (HOLD, whole, OK + b"content-length: 5\r\n\r\nhello", True),
    "whole to HEAD": (HEAD, whole, OK + b"content-length: 5\r\n\r\n", True),
    "whole, last": (LAST, whole, OK + b"content-length: 5\r\nconnection: close\r\n\r\nhello", False),
    "whole in 1.0": (OLD, whole, OK + b"content-length: 5\r\nconnection: close\r\n\r\nhello", False),
    "whole in 1.0, kept": (OLD_KEPT, whole, OK + b"content-length: 5\r\nconnection: keep-alive\r\n\r\nhello", True),
    "no content": (HOLD, empty, b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n", True),
    "unknown status": (HOLD, unknown_status, b"HTTP/1.1 599 \r\ncontent-length: 0\r\n\r\n", True),
    "counted": (HOLD, counted, OK + b"content-length: 5\r\n\r\nhello", True),
    "counted to HEAD": (HEAD, counted, OK + b"content-length: 5\r\n\r\n", True),
    "counted in 1.0": (OLD, counted, OK + b"content-length: 5\r\nconnection: close\r\n\r\nhello", False),
    "streamed": (HOLD, streamed, OK + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS, True),
    "streamed to HEAD": (HEAD, streamed, OK + b"transfer-encoding: chunked\r\n\r\n", True),
    "streamed, last": (LAST, streamed, OK + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n" + CHUNKS, False),
    "streamed in 1.0": (OLD, streamed, OK + b"connection: close\r\n\r\nhello0123456789abcdef", False),
    "streamed in 1.0, kept": (OLD_KEPT, streamed, OK + b"connection: close\r\n\r\nhello0123456789abcdef", False),
    "streamed nothing": (HOLD, streamed_nothing, OK + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", True),
}


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("name", ANSWERS)
def test_exact_bytes(name: str, later: bool) -> None:
    request, respond, expected, stays = ANSWERS[name]

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(request)
        responder = await rig.handler.holding()
        if later:
            await asyncio.sleep(0)
        assert not responder.started
        respond(responder)
        assert responder.started
        assert responder.closed
        respond(responder)  # dropped: the answer is complete
        responder.abort()
        await client.exactly(expected)
        if stays:
            assert await client.is_alive()
        else:
            assert await client.end() == (b"", "closed")
        assert rig.handler.gone == []

    serve(scenario)


def test_request_as_the_handler_sees_it() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        before = asyncio.get_running_loop().time()
        await client.send(
            b"POST /a%20b/c?x=1 HTTP/1.1\r\nHost: a\r\nX-Twice: 1 \r\n",
            b"x-twice:\t2\r\nEmpty:\r\nContent-Length: 3\r\n\r\n",
            b"a",
            b"bc",
        )
        await client.answer()
        (request,) = rig.handler.requests
        assert (request.method, request.path, request.query, request.body) == (b"POST", b"/a%20b/c", b"x=1", b"abc")
        assert request.fields == {b"host": b"a", b"x-twice": b"1, 2", b"empty": b"", b"content-length": b"3"}
        assert request.peer == "127.0.0.1"
        assert before - 0.01 <= request.at <= asyncio.get_running_loop().time()

    serve(scenario)


def test_a_repeated_connection_header_is_one_list() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(b"GET /g HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\nConnection: close\r\n\r\n")
        assert (await client.answer()).headers[b"connection"] == b"close"
        assert (await client.end())[1] == "closed"

    serve(scenario)


@pytest.mark.parametrize(
    "rest",
    [b"Content-Length: 2\r\n\r\nab", b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"],
    ids=["counted", "chunked"],
)
@pytest.mark.parametrize("split", [1, 40, 80, 100])
def test_a_last_request_may_have_a_body(rest: bytes, split: int) -> None:
    data = b"POST /p HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + rest

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(data[:split], data[split:])
        assert (await client.answer()).body == b"POST /p? ab"
        assert await client.end() == (b"", "closed")

    serve(scenario)


def test_answers_in_order_one_at_a_time() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD + ALIVE + HOLD + ALIVE)
        first = await rig.handler.holding(1)
        await asyncio.sleep(0.01)
        assert len(rig.handler.requests) == 1
        first.start(200, TEXT)
        first.write(b"x")
        first.end()
        second = await rig.handler.holding(2)
        second.send(200, TEXT, b"y")
        assert [(await client.answer()).body for _ in range(4)] == [b"x", b"GET /alive? ", b"y", b"GET /alive? "]
        assert await client.is_alive()

    serve(scenario)


def test_many_synchronous_answers_do_not_recurse() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(ALIVE * 2000)
        for _ in range(2000):
            assert (await client.answer()).status == 200
        assert await client.is_alive()

    serve(scenario, max_pipelined=5000)


@pytest.mark.parametrize(
    ("version", "framing"),
    [
        (b"1.1", b"Content-Length: 4\r\n"),
        (b"1.1", b"Transfer-Encoding: chunked\r\n"),
        (b"1.0", b"Content-Length: 4\r\n"),
    ],
)
def test_100_continue(version: bytes, framing: bytes) -> None:
    body = b"4\r\nabcd\r\n0\r\n\r\n" if b"chunked" in framing else b"abcd"
    head = b"POST /p HTTP/" + version + b"\r\nHost: a\r\nExpect: 100-Continue\r\nConnection: keep-alive\r\n" + framing

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for pieces in ((head + b"\r\n", body), (head + b"\r\n" + body,)):
            await client.send(*pieces[:1])
            if version == b"1.1":
                await client.exactly(b"HTTP/1.1 100 Continue\r\n\r\n")
            await client.send(*pieces[1:])
            assert (await client.answer()).body == b"POST /p? abcd"
        assert await client.is_alive()

    serve(scenario)


def test_no_100_for_a_body_of_nothing_and_none_before_the_earlier_answer() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(b"POST /p HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n")
        assert (await client.answer()).body == b"POST /p? "
        await client.send(HOLD + b"POST /p HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n")
        (await rig.handler.holding()).send(200, TEXT, b"first")
        assert (await client.answer()).body == b"first"
        await client.exactly(b"HTTP/1.1 100 Continue\r\n\r\n")
        await client.send(b"a")
        assert (await client.answer()).body == b"POST /p? a"

    serve(scenario)


REFUSED_AT_HEAD = {
    "with a body": (b"POST /refuse HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nabcd", b"close", True, False),
    "body to be continued": (
        b"POST /refuse HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n", b"close", True, False,
    ),
    "chunked": (b"POST /refuse HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", b"close", True, False),
    "without body": (b"GET /refuse HTTP/1.1\r\nHost: a\r\n\r\n", None, True, True),
    "without body, closing": (b"GET /refuse-close HTTP/1.1\r\nHost: a\r\n\r\n", b"close", True, False),
    "HEAD": (b"HEAD /refuse HTTP/1.1\r\nHost: a\r\n\r\n", None, False, True),
    "1.0": (b"GET /refuse HTTP/1.0\r\n\r\n", b"close", True, False),
    "last": (b"GET /refuse HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"close", True, False),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_AT_HEAD)
def test_refused_at_the_head(name: str) -> None:
    data, connection, with_body, stays = REFUSED_AT_HEAD[name]

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(data)
        refused = await client.answer(bodiless=not with_body)
        assert refused.status == 404
        assert refused.headers.get(b"connection") == connection
        assert refused.headers[b"content-length"] == b"13"
        assert refused.body == (b"no such route" if with_body else b"")
        if stays:
            assert await client.is_alive()
        else:
            assert await client.end() == (b"", "closed")
        assert not rig.handler.held

    serve(scenario)


def test_bytes_after_a_refusal_are_dropped_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces the connection is not read: whoever sends 16 MiB in vain keeps nobody waiting."""
    pieces: list[tuple[float, int]] = []
    received = ClientConnection.data_received

    def noted(self: ClientConnection, data: bytes) -> None:
        if self.state == LINGER:
            pieces.append((asyncio.get_running_loop().time(), len(data)))
        received(self, data)

    monkeypatch.setattr(ClientConnection, "data_received", noted)

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n")
        assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        client.writer.write(b"x" * 4_000_000)
        client.writer.write_eof()
        await rig.quiet()

    serve(scenario, max_body=1000, linger=30)
    assert sum(size for _, size in pieces) == 4_000_000
    pauses, dropped = 0, 0
    for (at, size), (later, _) in itertools.pairwise(pieces):
        dropped += size
        if dropped >= DROPPED_AT_ONCE:
            assert later - at >= 0.9 * DROP_PAUSE
            pauses, dropped = pauses + 1, 0
    assert pauses >= 6


@pytest.mark.parametrize(("path", "status"), [(b"/p", 413), (b"/refuse", 404)])
def test_a_refused_client_may_finish_sending_and_read_the_answer(path: bytes, status: int) -> None:
    """Closing with bytes unread would reset the connection under the answer."""

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 8000000\r\n\r\n")
        for _ in range(80):
            await client.send(b"x" * 100_000)
            await client.writer.drain()
        assert (await client.answer()).status == status
        assert await client.end() == (b"", "closed")

    serve(scenario, max_body=1000 if status == 413 else 10_000_000)


def test_answer_builds_a_whole_message() -> None:
    assert answer(404, b"x: y\r\n", b"no") == b"HTTP/1.1 404 Not Found\r\nx: y\r\ncontent-length: 2\r\n\r\nno"
    assert (
        answer(503, b"", b"", close=True)
        == b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    )
    assert answer(204, b"", b"") == b"HTTP/1.1 204 No Content\r\n\r\n"


@pytest.mark.parametrize("written", [b"four", b"sixsix"])
def test_an_answer_that_breaks_its_length_is_reset(written: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        responder.start(200, TEXT, 5)
        responder.write(written)
        assert responder.closed == (len(written) > 5)  # too much is never sent
        responder.end()
        assert responder.closed
        assert (await client.end())[1] == "reset"
        assert rig.handler.gone == []  # the client did not leave: we broke off

    serve(scenario)


def test_abort_resets() -> None:
    async def scenario(rig: Rig) -> None:
        for request in (HOLD, OLD):
            client = await rig.client()
            await client.send(request)
            responder = await rig.handler.holding(len(rig.clients))
            responder.start(200, TEXT)
            responder.write(b"some")
            await client.reader.readuntil(b"some")
            responder.abort()
            responder.abort()
            responder.write(b"more")
            responder.end()
            assert (await client.end())[1] == "reset"
        assert rig.handler.gone == []

    serve(scenario)


def test_misuse_is_told() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(HOLD)
        responder = await rig.handler.holding()
        with pytest.raises(RuntimeError):
            responder.end()
        responder.start(200, TEXT)
        with pytest.raises(RuntimeError):
            responder.start(200, TEXT)
        with pytest.raises(RuntimeError):
            responder.send(200, TEXT, b"")
        responder.end()
        assert (await client.answer()).status == 200

    serve(scenario)


def test_a_bug_in_the_handler_ends_its_connection_only() -> None:
    async def scenario(rig: Rig) -> None:
        other, client = await rig.client(), await rig.client()
        await client.send(b"GET /bug HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.end())[1] == "reset"
        pipelined = await rig.client()
        await pipelined.send(HOLD + b"GET /bug HTTP/1.1\r\nHost: a\r\n\r\n")
        (await rig.handler.holding()).send(200, TEXT, b"x")  # the next request's bug is not raised here
        assert (await pipelined.end())[1] == "reset"
        assert await other.is_alive()

    serve(scenario, errors=2)


def test_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "data.sock")

    async def scenario(rig: Rig) -> None:
        assert rig.server.addresses == [f"unix:{path}"]
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        client = await rig.client()
        await client.send(b"POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\na")
        assert (await client.answer()).body == b"POST /p? a"
        assert rig.handler.requests[0].peer == "unix"

    serve(scenario, path=path)
    assert not os.path.exists(path)


def test_a_successors_unix_socket_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "data.sock")

    async def scenario(rig: Rig) -> None:
        successor = Server(Recorder(), ServerSettings())
        await successor.listen(f"unix:{path}")
        rig.server.stop_accepting()
        client = await rig.client()
        assert await client.is_alive()
        successor.stop_accepting()
        await client.close()
        await successor.drain(1)

    serve(scenario, path=path)
    assert not os.path.exists(path)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made_certificate(tmp_path_factory.mktemp("tls"))


def test_tls(certificate: tuple[Path, Path]) -> None:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(*certificate)
    client_side = ssl.create_default_context(cafile=certificate[0])

    async def scenario(rig: Rig) -> None:
        assert rig.server.addresses[0].startswith("https://127.0.0.1:")
        client = await rig.client(ssl=client_side)
        body = b"a" * 300_000
        await client.send(b"POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n" + body)
        assert (await client.answer()).body == b"POST /p? " + body
        await client.send(HOLD)
        streamed(await rig.handler.holding(1))
        assert (await client.answer()).body == b"hello0123456789abcdef"
        assert await client.is_alive()
        await client.send(LAST)
        whole(await rig.handler.holding(2))
        assert (await client.answer()).body == b"hello"
        assert await client.end() == (b"", "closed")

        old = await rig.client(ssl=client_side)
        await old.send(OLD)
        streamed(await rig.handler.holding(3))
        assert (await old.end())[0].endswith(b"\r\n\r\nhello0123456789abcdef")

        bad = await rig.client(ssl=client_side)
        await bad.send(b"GET /g HTTP/1.1\r\n\r\n")
        assert (await bad.answer()).status == 400

        leaving = await rig.client(ssl=client_side)
        await leaving.send(HOLD)
        await rig.handler.holding(4)
        leaving.writer.transport.abort()
        await rig.handler.until(lambda: rig.handler.gone == ["client_gone"])

        slow = await rig.client(ssl=client_side, limit=1024)
        await slow.send(HOLD)
        responder = await rig.handler.holding(5)
        responder.start(200, TEXT)
        async with asyncio.timeout(60):
            while not responder.closed:  # uvloop does not count what TLS has already handed to the socket's own buffer
                responder.write(b"x" * 65536)
                await asyncio.sleep(0.001)
        assert rig.handler.gone == ["client_gone", "slow_client"]

    serve(scenario, tls=server_side, write_stall=0.1)
