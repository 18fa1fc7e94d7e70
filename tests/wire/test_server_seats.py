"""Connection limits of the data port: total and per address, idle ones closed for newcomers, and handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path

import msgspec
import pytest
import uvloop

from gateway.relay.wire import shared
from gateway.relay.wire.messages import HTTP_1_1_REQUIRED, with_token
from gateway.relay.wire.seat_board import RelaySeats, seat_board
from gateway.relay.wire.server import Server, ServerSettings
from tests.certificates import made
from tests.wire.server_harness import ALIVE, TEXT, Client, Recorder, Rig, serve

HOLD = b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is idle at once, and is looked for each time."""
    monkeypatch.setattr(shared, "IDLE_AT_LEAST", 0.0)
    monkeypatch.setattr(shared, "LOOK_EVERY", 0.0)


async def refused(client: Client) -> str:
    """The words it is refused with."""
    answer = await client.answer()
    assert (answer.status, answer.headers[b"x-weir-reason"]) == (503, b"connections")
    await client.end()
    return str(answer.error["message"])


# -- shares -----------------------------------------------------------------------------------------------------------


def test_one_address_leaves_seats_to_the_others() -> None:
    async def scenario(rig: Rig) -> None:
        for _ in range(3):
            await (await rig.client(source="127.0.0.1")).send(HOLD)
        await rig.handler.holding(3)
        for _ in range(20):  # those refused hold no seat: the others' stay free
            assert "your address" in await refused(await rig.client(source="127.0.0.1"))
        assert await (await rig.client(source="127.0.0.2")).is_alive()
        assert await (await rig.client(source="127.0.0.2")).is_alive()
        assert "your address" not in await refused(await rig.client(source="127.0.0.3"))
        rig.clients[0].reset()
        await rig.handler.until(lambda: rig.handler.gone == ["client_gone"])
        assert await (await rig.client(source="127.0.0.1")).is_alive(), "and a seat that is left can be had again"

    serve(scenario, max_connections=5, max_per_peer=3)


def test_a_trusted_proxy_is_everybody() -> None:
    async def scenario(rig: Rig) -> None:
        for _ in range(5):
            assert await (await rig.client(source="127.0.0.7")).is_alive()
        assert await (await rig.client(source="127.0.0.1")).is_alive()
        await refused(await rig.client(source="127.0.0.1"))

    serve(scenario, max_connections=9, max_per_peer=1, exempt="127.0.0.7".__eq__)


def test_a_unix_socket_has_no_addresses(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        for _ in range(4):
            assert await (await rig.client()).is_alive()
        await refused(await rig.client())

    serve(scenario, path=str(tmp_path / "s"), max_connections=4, max_per_peer=1)


# -- idle connections -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hurried")
def test_the_longest_idle_connection_gives_up_its_seat() -> None:
    async def scenario(rig: Rig) -> None:
        busy, first, second = [await rig.client() for _ in range(3)]
        for client in (busy, first, second):  # the second has been used last
            assert await client.is_alive()
            await asyncio.sleep(0.005)  # the loop counts milliseconds
        await busy.send(HOLD)
        held = await rig.handler.holding()
        newcomer = await rig.client()
        assert await newcomer.is_alive()
        assert await first.end() == (b"", "closed")
        assert await second.is_alive()
        held.send(200, TEXT, b"done")
        assert (await busy.answer()).body == b"done"

    serve(scenario, max_connections=3)


@pytest.mark.usefixtures("hurried")
def test_an_address_gives_up_its_own_seats() -> None:
    async def scenario(rig: Rig) -> None:
        other = await rig.client(source="127.0.0.2")
        assert await other.is_alive()
        mine = [await rig.client(source="127.0.0.1") for _ in range(2)]
        for client in mine:
            assert await client.is_alive()
            await asyncio.sleep(0.005)  # the loop counts milliseconds
        assert await (await rig.client(source="127.0.0.1")).is_alive()
        assert await mine[0].end() == (b"", "closed")
        assert await other.is_alive()

    serve(scenario, max_per_peer=2)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("sent", [b"GET /half", b"POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n123", HOLD])
def test_who_has_begun_a_request_keeps_the_seat(sent: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(sent)
        (connection,) = rig.server._shared.open
        async with asyncio.timeout(60):
            while connection.idle_since < 1e9:
                await asyncio.sleep(0)
        await refused(await rig.client())
        client.reset()

    serve(scenario, max_connections=1)


def test_who_has_just_come_keeps_the_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "IDLE_AT_LEAST", 1e6)

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        assert await client.is_alive()
        await refused(await rig.client())
        assert await client.is_alive()

    serve(scenario, max_connections=1)


# -- clients that speak something else --------------------------------------------------------------------------------


def test_a_client_of_http_2_is_told_in_its_own_frames() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        assert await client.end() == (HTTP_1_1_REQUIRED, "closed")
        settings, goaway = HTTP_1_1_REQUIRED[:9], HTTP_1_1_REQUIRED[9:]
        assert settings == b"\0\0\0\4\0\0\0\0\0"
        assert (int.from_bytes(goaway[:3], "big"), goaway[3]) == (len(goaway) - 9, 7)
        assert int.from_bytes(goaway[13:17], "big") == 0xD, "HTTP_1_1_REQUIRED"

    serve(scenario)


# -- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def secure(folder: Path) -> ssl.SSLContext:
    return made(folder, "first")


def trusting(folder: Path, name: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / f"{name}.pem"))


def open_sockets() -> int:
    """Descriptors of sockets that this process has."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that this listing was read with
            links.append(os.readlink(descriptor))
    return sum(link.startswith("socket:") for link in links)


def test_silent_handshakes_have_seats_and_an_end(secure: ssl.SSLContext, folder: Path) -> None:
    async def scenario(rig: Rig) -> None:
        before = open_sockets()
        silent = [await rig.client() for _ in range(3)]
        half = await rig.client()
        await half.send(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
        async with asyncio.timeout(60):
            while rig.server.connections < 4:
                await asyncio.sleep(0.001)
        with contextlib.suppress(ConnectionResetError):  # before or after this end has noticed that it is connected
            assert (await (await rig.client()).end())[1] == "reset", "there is no seat left"
        assert rig.server.connections == 4
        for client in (*silent, half):
            await client.end()
        await rig.quiet()
        assert await (await rig.client(ssl=trusting(folder, "first"))).is_alive()
        for client in rig.clients:
            client.writer.transport.abort()
        await rig.quiet()
        async with asyncio.timeout(60):
            while open_sockets() > before:
                await asyncio.sleep(0.001)

    serve(scenario, tls=secure, headers_timeout=0.3, max_connections=4)


def test_a_handshake_that_fails_gives_its_seat_back(secure: ssl.SSLContext) -> None:
    async def scenario(rig: Rig) -> None:
        for sent in (b"\x16\x03\x01\x00\x02\x01\x02", b"\x16"):
            client = await rig.client()
            await client.send(sent)
            client.writer.write_eof()
            await client.end()
            await rig.quiet()
        for _ in range(3):  # one that goes without a word, and one that resets
            client = await rig.client()
            client.reset()
            await rig.quiet()
        assert rig.server._shared.seats == 0

    serve(scenario, tls=secure)


def test_a_gentle_drain_waits_for_whoever_shakes_hands_last(secure: ssl.SSLContext, folder: Path) -> None:
    async def scenario(rig: Rig) -> None:
        last = socket.create_connection(("127.0.0.1", int(rig.server.addresses[-1].rpartition(":")[2])))
        async with asyncio.timeout(60):
            while not rig.server.connections:
                await asyncio.sleep(0.001)
        drained = asyncio.create_task(rig.server.drain(5, gently=True))
        await asyncio.sleep(0.005)
        _, writer = await asyncio.open_connection(sock=last, ssl=trusting(folder, "first"), server_hostname="localhost")
        try:
            async with asyncio.timeout(60):
                while not rig.server.connections:  # the handshake's place is given up, and its connection's taken
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0.005)
            assert not drained.done()
        finally:
            writer.transport.abort()
        await drained

    serve(scenario, tls=secure)


def test_a_drain_does_not_wait_for_handshakes(secure: ssl.SSLContext) -> None:
    async def scenario(rig: Rig) -> None:
        silent, half = await rig.client(), await rig.client()
        await half.send(b"\x16\x03\x01")
        async with asyncio.timeout(60):
            while rig.server.connections < 2:
                await asyncio.sleep(0.001)
            await rig.server.drain(60.0)
        for client in (silent, half):
            await client.end()

    serve(scenario, tls=secure)


def test_plain_http_on_the_tls_port_is_told_so(secure: ssl.SSLContext, folder: Path) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(ALIVE)
        answer = await client.answer()
        assert (answer.status, rig.server.refusals) == (400, {400: 1})
        assert "https://" in answer.error["message"]
        assert await client.end() == (b"", "closed")
        assert rig.handler.requests == []
        assert await (await rig.client(ssl=trusting(folder, "first"))).is_alive()

    serve(scenario, tls=secure, linger=0.1)


def test_a_new_certificate_is_for_new_connections(folder: Path, secure: ssl.SSLContext) -> None:
    second = made(folder, "second")

    async def scenario(rig: Rig) -> None:
        old = await rig.client(ssl=trusting(folder, "first"))
        assert await old.is_alive()
        rig.server.go_by(second)
        assert await (await rig.client(ssl=trusting(folder, "second"))).is_alive()
        with contextlib.suppress(ConnectionError), pytest.raises(ssl.SSLCertVerificationError):
            await rig.client(ssl=trusting(folder, "first"))
        assert await old.is_alive(), "and this one keeps its own"

    serve(scenario, tls=secure)


def test_a_tls_unix_socket_takes_the_place_of_one_that_was_left(tmp_path: Path, secure: ssl.SSLContext) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(ALIVE)
        assert (await client.answer()).status == 400

    serve(scenario, path=path, tls=secure, linger=0.1)
    assert not os.path.exists(path)


# -- relays that accept from the same socket --------------------------------------------------------------------------


@pytest.mark.parametrize("of_tls", [False, True])
def test_a_relay_that_is_full_leaves_newcomers_to_one_that_is_not(tmp_path: Path, of_tls: bool) -> None:
    """Twice as many connections at once as one relay has seats, and one more."""
    context = made(tmp_path, "first") if of_tls else None
    trust = trusting(tmp_path, "first") if of_tls else None

    async def main() -> None:
        board, listening = seat_board(2), socket.create_server(("127.0.0.1", 0))
        recorder = Recorder()
        rigs = []
        for index in range(2):
            server = Server(recorder, ServerSettings(max_connections=4), board=RelaySeats(board, index))
            await server.listen(listening.dup(), ssl=context)
            rigs.append(Rig(server, recorder))
        listening.close()
        clients = await asyncio.gather(*(rigs[0].client(ssl=trust) for _ in range(8)))
        for client in clients:
            await client.send(HOLD)
        await recorder.holding(8)
        assert [rig.server.connections for rig in rigs] == [4, 4]
        if not of_tls:  # there it would be a reset
            assert "your address" not in await refused(await rigs[0].client()), "all are full"
        clients[0].reset()
        await recorder.until(lambda: recorder.gone == ["client_gone"])
        assert await (await rigs[0].client(ssl=trust)).is_alive()
        for client in rigs[0].clients:
            client.writer.transport.abort()
        for rig in rigs:
            await rig.server.drain(1.0)
        assert not any(RelaySeats(board, index).elsewhere for index in range(2)), "nobody waits for who has ended"

    uvloop.run(main())


# -- ports with a token -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /half HTTP/1.1\r\nHost", ALIVE], ids=["silent", "half a head", "no token"])
@pytest.mark.parametrize("of_tls", [False, True], ids=["plain", "tls"])
def test_strangers_never_shut_out_who_has_the_token(sent: bytes, of_tls: bool, tmp_path: Path) -> None:
    """Connections that show nothing, many more than there are seats, from many addresses and from the member's own."""
    context = made(tmp_path, "first") if of_tls else None
    trust = trusting(tmp_path, "first") if of_tls else None

    async def scenario(rig: Rig) -> None:
        rig.handler.token = b"sesame"
        first = await rig.client(source="127.0.0.9", ssl=trust)
        await first.send(b"GET /hold HTTP/1.1\r\nHost: a\r\ntoken: sesame\r\n\r\n")
        await rig.handler.holding(1)
        for number in range(40):
            stranger = await rig.client(source=f"127.0.0.{2 + number % 8}")
            await stranger.send(sent)
        assert rig.server._shared.seats <= 16
        for source in ("127.0.0.9", "127.0.0.2"):
            member = await rig.client(source=source, ssl=trust)
            await member.send(b"GET /alive HTTP/1.1\r\nHost: a\r\ntoken: sesame\r\n\r\n")
            assert (await member.answer()).status == 200
        rig.handler.held[0].send(200, TEXT, b"kept")
        assert (await first.answer()).body == b"kept"

    serve(scenario, tls=context, **msgspec.structs.asdict(with_token(ServerSettings(max_connections=16))))


def test_a_member_may_have_every_seat_and_strangers_a_part() -> None:
    async def scenario(rig: Rig) -> None:
        rig.handler.token = b"sesame"
        for _ in range(16):
            member = await rig.client()
            await member.send(b"GET /hold HTTP/1.1\r\nHost: a\r\ntoken: sesame\r\n\r\n")
        await rig.handler.holding(16)
        await refused(await rig.client(source="127.0.0.2"))

    serve(scenario, **msgspec.structs.asdict(with_token(ServerSettings(max_connections=16))))


def test_who_shows_no_token_has_as_long_as_a_head_may_take() -> None:
    async def scenario(rig: Rig) -> None:
        rig.handler.token = b"sesame"
        member, silent = await rig.client(), await rig.client()
        await member.send(b"GET /alive HTTP/1.1\r\nHost: a\r\ntoken: sesame\r\n\r\n")
        assert (await member.answer()).status == 200
        assert await silent.end() == (b"", "closed")
        await member.send(b"GET /alive HTTP/1.1\r\nHost: a\r\ntoken: sesame\r\n\r\n")
        assert (await member.answer()).status == 200, "an idle connection of a member stays"

    serve(scenario, strangers=4, headers_timeout=0.1)
