"""Connection pool to engines: reuse, closing, and the one silent resend. TCP, unix sockets, TLS."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

import pytest
import uvloop

from gateway.upstream.client import Client, ClientSettings, EngineError, Reply, parse_origin
from gateway.upstream.names import Names
from gateway.upstream.trust import Trust
from loadtest.processes import free_port
from tests.certificates import made
from tests.wire.client_harness import CHUNKED, OK, PLAIN, Peer, Rig, Taken, chunk, failure, open_fds, run
from tests.wire.server_harness import UnhurriedLoop


def test_the_request_as_it_is_sent() -> None:
    async def scenario(rig: Rig) -> None:
        port = rig.client.origin.port
        for size in (2, 70_000):  # in one write with its head, and in one of its own
            sending = rig.sending(b"x" * size)
            peer = await rig.peer()
            assert await peer.request() == (
                b"POST /base/v1/x HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nauthorization: Bearer k3y\r\n"
                b"a: b\r\ncontent-length: %d\r\n\r\n%b" % (port, size, b"x" * size)
            )
            await peer.send(PLAIN[:-2] + b"ok")
            reply = await sending
            peer.close()
            await peer.reader.read()
            reply.close()
        assert "k3y" not in repr(rig.client)

    run(scenario, api_key="k3y", base="/base")


async def resting(rig: Rig, count: int) -> list[Peer]:
    """So many connections in the pool, in the order in which they went there."""
    pairs = [await rig.reply(PLAIN) for _ in range(count)]
    for _, reply in pairs:
        reply.close()
    return [peer for peer, _ in pairs]


def test_repr_states_the_state() -> None:
    async def scenario(rig: Rig) -> None:
        url = rig.client.origin.url
        assert repr(rig.client) == f"<Client {url} 0 active 0 idle>"
        _, peer = await resting(rig, 2)
        reply = await rig.again(peer, PLAIN)
        assert repr(rig.client) == f"<Client {url} 1 active 1 idle>"
        reply.close()
        assert repr(rig.client) == f"<Client {url} 0 active 2 idle>"

    run(scenario)


def test_the_connection_used_last_is_used_next() -> None:
    async def scenario(rig: Rig) -> None:
        first, second, third = await resting(rig, 3)
        third_reply = await rig.again(third, PLAIN)
        second_reply = await rig.again(second, PLAIN)
        third_reply.close()
        second_reply.close()
        (await rig.again(second, PLAIN)).close()
        assert rig.peers.empty()
        assert rig.client.idle == 3
        assert not first.reader.at_eof()

    run(scenario)


def test_no_more_than_max_idle_are_kept() -> None:
    async def scenario(rig: Rig) -> None:
        first, second, third = await resting(rig, 3)
        assert (rig.client.active, rig.client.idle) == (0, 2)
        await third.ended()
        assert not first.reader.at_eof()
        assert not second.reader.at_eof()

    run(scenario, max_idle=2)


@pytest.mark.slow
def test_a_connection_rests_for_so_long_and_is_closed() -> None:
    async def scenario(rig: Rig) -> None:
        loop = asyncio.get_running_loop()
        (peer,) = await resting(rig, 1)
        rested = loop.time()
        await peer.ended()
        assert loop.time() - rested > 2.4
        assert rig.client.idle == 0
        # Use puts it off.
        (peer,) = await resting(rig, 1)
        began = loop.time()
        while loop.time() < began + 3.5:
            (await rig.again(peer, PLAIN)).close()
            await asyncio.sleep(0.005)
        assert rig.client.idle == 1

    run(scenario, idle_for=2.5, loop=UnhurriedLoop)  # no connection rests while the process is held up


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_connection_that_the_engine_closes_while_it_rests_leaves_the_pool(how: str) -> None:
    async def scenario(rig: Rig) -> None:
        first, second = await resting(rig, 2)
        getattr(first, how)()
        await rig.until(lambda: rig.client.idle == 1)
        (await rig.again(second, PLAIN)).close()
        assert rig.peers.empty()

    run(scenario)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_connection_that_the_engine_closes_before_its_reply_is_closed_does_not_rest(how: str) -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(PLAIN)
        getattr(peer, how)()
        await rig.until(lambda: reply._connection is not None and reply._connection.lost)
        assert await reply.read(10) == b"ok"
        reply.close()
        assert (rig.client.active, rig.client.idle) == (0, 0)

    run(scenario)


# -- the repetition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_stale_connection_is_replaced_once_and_nobody_sees_it(how: str) -> None:
    async def scenario(rig: Rig) -> None:
        older, stale = await resting(rig, 2)
        sending = rig.sending(b"again")
        first = await stale.request()
        getattr(stale, how)()
        fresh = await rig.peer()
        assert await fresh.request() == first
        await older.ended()  # it is as old as the stale one
        assert rig.client.active == 1
        await fresh.send(PLAIN)
        reply = await sending
        assert await reply.read(10) == b"ok"
        reply.close()
        assert (rig.client.active, rig.client.idle) == (0, 1)

    run(scenario)


def test_closed_in_the_same_turn_as_it_is_used() -> None:
    """The engine's FIN is in the kernel, and the pool does not know yet."""

    async def scenario(rig: Rig) -> None:
        (stale,) = await resting(rig, 1)
        with socket.socket(fileno=os.dup(stale.writer.get_extra_info("socket").fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)
        assert rig.client.idle == 1
        sending = rig.sending()
        fresh = await rig.peer()
        await fresh.request()
        await fresh.send(PLAIN)
        (await sending).close()

    run(scenario)


def test_nothing_counts_as_sent_on_a_connection_that_was_closed_in_the_pool() -> None:
    async def scenario(rig: Rig) -> None:
        (stale,) = await resting(rig, 1)
        rig.client._pool[0].idle = False  # as of one that has ended, and is taken before it leaves the pool
        sent: list[int] = []
        sending = asyncio.create_task(
            rig.client.send(b"POST", b"/v1/x", b"", b"{}", timeout=60.0, sends=lambda: sent.append(rig.client.active))
        )
        fresh = await rig.peer()
        await fresh.request()
        await fresh.send(PLAIN)
        (await sending).close()
        await stale.ended()
        assert sent == [1], "once"

    run(scenario)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_whole_request_is_not_sent_again_where_it_may_cost_money(how: str) -> None:
    async def scenario(rig: Rig) -> None:
        (stale,) = await resting(rig, 1)
        sending = rig.sending()
        await stale.request()
        getattr(stale, how)()
        error = await failure(sending)
        assert (error.kind, error.before_bytes, error.whole) == ("reset", True, True)
        assert rig.peers.empty()

    run(scenario, resends=False)


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("secure", [False, True])
def test_a_long_request_that_went_out_whole_is_not_sent_again(
    tls: tuple[ssl.SSLContext, Trust], secure: bool, reused: bool
) -> None:
    async def scenario(rig: Rig) -> None:
        pool = await resting(rig, 1) if reused else []
        sending = rig.sending(b"x" * 70_000)  # head and body in two writes
        peer = pool[0] if pool else await rig.peer()
        await peer.request()
        peer.reset()
        error = await failure(sending)
        assert (error.kind, error.before_bytes, error.whole) == ("reset", True, True)
        assert rig.peers.empty()

    run(scenario, resends=False, tls=tls if secure else None)


def test_a_part_of_a_request_costs_nothing_and_is_sent_again() -> None:
    async def scenario(rig: Rig) -> None:
        (stale,) = await resting(rig, 1)
        sending = rig.sending(BIG)
        await stale.reader.readuntil(b"\r\n\r\n")
        stale.reset()
        fresh = await rig.peer()
        await fresh.reader.readuntil(b"\r\n\r\n")
        fresh.reset()
        error = await failure(sending)
        assert (error.kind, error.whole) == ("reset", False)

    run(scenario, resends=False)


def test_the_repetition_is_not_repeated() -> None:
    async def scenario(rig: Rig) -> None:
        (stale,) = await resting(rig, 1)
        sending = rig.sending()
        await stale.request()
        stale.close()
        fresh = await rig.peer()
        await fresh.request()
        fresh.close()
        error = await failure(sending)
        assert (error.kind, error.before_bytes) == ("reset", True)
        assert rig.peers.empty()

    run(scenario)


@pytest.mark.parametrize("sent", [b"H", CHUNKED, b"HTTP/1.1 100 \r\n\r\n"])
def test_no_repetition_once_a_byte_of_the_answer_has_come(sent: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        (peer,) = await resting(rig, 1)
        sending = rig.sending()
        await peer.request()
        await peer.send(sent)
        peer.close()
        assert not (await failure(sending)).before_bytes
        assert rig.peers.empty()

    run(scenario)


def test_no_repetition_of_a_request_on_a_new_connection() -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending()
        peer = await rig.peer()
        await peer.request()
        peer.close()
        assert (await failure(sending)).before_bytes
        assert rig.peers.empty()

    run(scenario)


# -- both directions --------------------------------------------------------------------------------------------------

BIG = b"x" * (16 << 20)


def test_an_answer_before_the_request_is_written_is_delivered_and_ends_the_connection() -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending(BIG)
        peer = await rig.peer()
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(OK.replace(b"200", b"413") + b"content-length: 3\r\n\r\nbig")
        reply = await sending
        assert (reply.status, reply.complete) == (413, True)
        assert await reply.read(10) == b"big"
        reply.close()
        assert (rig.client.active, rig.client.idle) == (0, 0)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await peer.reader.readexactly(len(BIG))

    run(scenario)


def test_a_stream_that_begins_before_the_request_is_written_may_end_after_it() -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending(BIG)
        peer = await rig.peer()
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(CHUNKED + chunk(b"a"))
        taken = Taken().of(reply := await sending)
        assert await peer.reader.readexactly(len(BIG)) == BIG
        await peer.send(chunk(b"b") + b"0\r\n\r\n")
        assert (await taken.end(), taken.body) == (None, b"ab")
        reply.close()
        assert rig.client.idle == 1
        (await rig.again(peer, PLAIN)).close()

    run(scenario)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_aclose_closes_what_rests_and_lets_the_rest_finish() -> None:
    async def scenario(rig: Rig) -> None:
        rests, busy = await resting(rig, 2)
        reply = await rig.again(busy, CHUNKED + chunk(b"a"))
        waiting = rig.sending(b"waits")  # takes the one that rests
        await rests.request()
        last, whole = await rig.reply(PLAIN)
        whole.close()
        assert (rig.client.active, rig.client.idle) == (2, 1)
        await rig.client.aclose()
        await rig.client.aclose()
        assert (rig.client.active, rig.client.idle) == (2, 0)
        await last.ended()
        error = await failure(rig.sending())
        assert (error.kind, error.before_bytes) == ("closed", True)
        taken = Taken().of(reply)
        await busy.send(chunk(b"b"), b"0\r\n\r\n")
        assert (await taken.end(), taken.body) == (None, b"ab")
        reply.close()
        await busy.ended()
        await rests.send(PLAIN)
        (await waiting).close()
        await rests.ended()
        assert (rig.client.active, rig.client.idle) == (0, 0)

    run(scenario)


# -- transports -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Trust]:
    """The engine's context, with a certificate of its own for localhost, and the trust of a client in it."""
    folder = tmp_path_factory.mktemp("tls")
    return made(folder), Trust(ca=(folder / "localhost.pem").read_text())


@pytest.mark.parametrize("transport", ["tcp", "unix", "tls"])
def test_every_transport(transport: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        # A stream, and the same connection again.
        peer, reply = await rig.reply(CHUNKED, chunk(b"a"))
        taken = Taken().of(reply)
        await peer.send(chunk(b"b"), chunk(b"c"), b"0\r\n\r\n")
        assert (await taken.end(), taken.body) == (None, b"abc")
        reply.close()
        reply = await rig.again(peer, PLAIN)
        assert await reply.read(10) == b"ok"
        reply.close()
        # A large body both ways, paused on its way.
        sending = rig.sending(BIG[: 1 << 20])
        await peer.request()
        peer.writer.write(OK + b"content-length: %d\r\n\r\n" % len(BIG) + BIG)
        taken = Taken().of(reply := await sending)
        reply.pause()
        before = len(taken.body)
        await asyncio.sleep(0.01)
        assert len(taken.body) == before < len(BIG)
        reply.resume()
        assert (await taken.end(), len(taken.body)) == (None, len(BIG))
        reply.close()
        # A stale connection.
        assert rig.client.idle == 1
        sending = rig.sending()
        await peer.request()
        peer.writer.transport.abort()
        fresh = await rig.peer()
        await fresh.request()
        await fresh.send(CHUNKED + chunk(b"x"))
        reply = await sending
        # Left in the middle.
        reply.close()
        await fresh.ended()
        # Cancelled.
        sending = rig.sending()
        third = await rig.peer()
        await third.request()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await third.ended()
        # Until close.
        fourth, reply = await rig.reply(OK + b"\r\n", b"a")
        taken = Taken().of(reply)
        await fourth.send(b"b")
        fourth.close()
        assert (await taken.end(), taken.body) == (None, b"ab")
        reply.close()

    if transport == "tls":
        run(scenario, tls=request.getfixturevalue("tls"))
    else:
        run(scenario, path=str(tmp_path / "engine.sock") if transport == "unix" else None)


def test_a_certificate_nobody_here_trusts_is_no_connection(tls: tuple[ssl.SSLContext, Trust]) -> None:
    async def scenario(rig: Rig) -> None:
        error = await failure(rig.sending())
        assert (error.kind, error.before_bytes, rig.client.active) == ("connect", True, 0)
        assert (error.reason, str(error)) == (
            "tls_untrusted",
            "cannot connect: its TLS certificate is not trusted: self-signed certificate",
        )
        assert rig.peers.empty()

    run(scenario, tls=(tls[0], Trust()))


def test_engines_share_what_is_read_of_certificate_authorities(tls: tuple[ssl.SSLContext, Trust]) -> None:
    ours, names = tls[1], Names()
    context = names.context(ours)
    assert names.context(Trust(ca=ours.ca, name="another")) is context
    assert names.context(Trust()) is not context
    with pytest.raises(ssl.SSLError):
        names.context(Trust(ca="no certificate"))


def test_a_certificate_for_another_host_is_no_connection(tls: tuple[ssl.SSLContext, Trust]) -> None:
    async def scenario(rig: Rig) -> None:
        url = rig.client.origin.url.replace("localhost", "127.0.0.1")
        client = Client(parse_origin(url), ClientSettings(), trust=tls[1])
        error = await failure(client.send(b"POST", b"/", b"", b"", timeout=60.0))
        assert (error.kind, error.before_bytes, client.active) == ("connect", True, 0)
        assert error.reason == "tls_name"
        assert "not valid for '127.0.0.1'" in str(error)

    run(scenario, tls=tls)


def test_tls_is_the_default_for_https_and_a_plain_engine_is_no_connection() -> None:
    async def scenario(rig: Rig) -> None:
        url = rig.client.origin.url.replace("http:", "https:")
        client = Client(parse_origin(url), ClientSettings())
        sending = asyncio.create_task(client.send(b"POST", b"/", b"", b"", timeout=60.0))
        peer = await rig.peer()
        assert (await peer.reader.readexactly(1)) == b"\x16"  # a TLS handshake
        peer.writer.write(PLAIN)
        error = await failure(sending)
        assert (error.kind, error.before_bytes, client.active) == ("connect", True, 0)
        assert error.reason == "tls"

    run(scenario)


def test_refused_and_absent(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        (tmp_path / "file").write_text("no socket")
        fds = open_fds()
        for url in (f"http://127.0.0.1:{port}", f"unix://{tmp_path}/none", f"unix://{tmp_path}/file"):
            client = Client(parse_origin(url), ClientSettings())
            for _ in range(2):
                error = await failure(client.send(b"POST", b"/", b"", b"", timeout=60.0))
                assert (error.kind, error.before_bytes, client.active) == ("connect", True, 0)
            await client.aclose()
        assert open_fds() <= fds + 3  # uvloop keeps a few for itself from the first connect on

    uvloop.run(main())


def test_an_answer_that_begins_as_its_engine_is_taken_for_dead_goes_on() -> None:
    async def scenario(rig: Rig) -> None:
        sending, silent = rig.sending(), rig.sending()
        for peer in [await rig.peer(), await rig.peer()]:
            await peer.request()
        began = next(iter(rig.client._unanswered))
        began.data_received(CHUNKED + chunk(b"a"))  # read, and its sender has not run yet
        rig.client.abandon()
        replies = await asyncio.gather(sending, silent, return_exceptions=True)
        (reply,) = [each for each in replies if isinstance(each, Reply)]
        (lost,) = [each for each in replies if isinstance(each, EngineError)]
        assert (lost.kind, lost.reason) == ("closed", "reset")
        began.data_received(chunk(b"b") + b"0\r\n\r\n")
        taken = Taken().of(reply)
        assert (await taken.end(), taken.body) == (None, b"ab")
        reply.close()

    run(scenario)


def test_what_an_engine_has_not_answered_as_it_is_taken_for_dead_is_not_sent_there_again() -> None:
    async def scenario(rig: Rig) -> None:
        peer = await rig.pooled()
        sending = rig.sending()
        await peer.request()
        rig.client.abandon()
        assert (await failure(sending)).before_bytes
        assert rig.peers.empty()

    run(scenario)
