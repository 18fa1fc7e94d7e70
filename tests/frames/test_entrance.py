"""Entrance of a member: who is let in, who is not, and what each of them is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from gateway.frames import entrance, visitors
from gateway.frames.entrance import Accepted, Challenge, ClusterToken, Entrance, Proof, Unwanted, VoteRequest, visit
from gateway.frames.messages import VERSION
from gateway.frames.visitors import Visitors

GOOD = ClusterToken("prod", ("sixteen-characters-or-more",))
OTHER = "another-token-of-sixteen"
NONCE = b"n" * 32


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is cut off for being late, however slow the machine is."""
    monkeypatch.setattr(entrance, "WITHIN", 60.0)


def proof(vote: VoteRequest | None = None, version: int = VERSION) -> Proof:
    return Proof(version, "prod", "10.0.0.2:8010", "life", NONCE, vote)


class Echo(asyncio.Protocol):
    """What follows: it sends back what comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]


def member(use: Callable[[tuple[str, int], list[str]], Awaitable[None]], token: ClusterToken = GOOD) -> list[str]:
    """Lines that a member has said while somebody used its address. It gives its vote to 10.0.0.2:8010."""
    said: list[str] = []

    def enter(proof: Proof) -> tuple[asyncio.Protocol | None, bool]:
        if proof.member == "10.0.0.3:8010":
            raise Unwanted("it does not lead")
        return (Echo(), False) if proof.vote is None else (None, proof.vote.leader == proof.member)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        coming = Visitors(said.append)
        server = await loop.create_server(lambda: Entrance(token, enter, coming), "127.0.0.1", 0)
        await use(server.sockets[0].getsockname()[:2], said)
        server.close()
        await asyncio.sleep(0)

    asyncio.run(main())
    return said


def test_a_visitor_with_the_token_is_let_in_and_its_connection_goes_on() -> None:
    async def use(address: tuple[str, int], said: list[str]) -> None:
        got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        class Stays(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport
                transport.write(b"hello")  # type: ignore[attr-defined]

            def data_received(self, data: bytes) -> None:
                got.set_result(data)
                self.transport.close()

        assert not await visit(address, GOOD, proof(), None, None, Stays)
        assert await got == b"hello"

    assert member(use) == []


def test_both_ends_find_out_that_the_other_machine_has_vanished() -> None:
    """A machine without power says nothing: the leader would keep what its calls hold, and relays would ask a leader
    that is gone."""
    found: list[asyncio.BaseTransport] = []

    class Stays(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            found.append(transport)

    async def main() -> None:
        entered = asyncio.Event()

        def enter(_: Proof) -> tuple[asyncio.Protocol | None, bool]:
            entered.set()
            return Stays(), False

        loop, coming, tcp, most = asyncio.get_running_loop(), Visitors(str), socket.IPPROTO_TCP, 5
        server = await loop.create_server(lambda: Entrance(GOOD, enter, coming), "127.0.0.1", 0)
        await visit(server.sockets[0].getsockname()[:2], GOOD, proof(), None, None, Stays)
        await entered.wait()
        for transport in found:
            each = transport.get_extra_info("socket")
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, every, count = (
                each.getsockopt(tcp, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + every * count <= most
            assert 0 < each.getsockopt(tcp, socket.TCP_USER_TIMEOUT) <= most * 1000
            transport.close()
        assert len(found) == 2
        server.close()
        await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.parametrize(("leader", "given"), [("10.0.0.2:8010", True), ("10.0.0.9:8010", False)])
def test_a_vote_is_given_at_the_entrance(leader: str, given: bool) -> None:
    async def use(address: tuple[str, int], said: list[str]) -> None:
        assert await visit(address, GOOD, proof(VoteRequest(leader, 3)), None, None) is given

    assert member(use) == []


@pytest.mark.parametrize(
    ("token", "shown", "told"),
    [
        (ClusterToken("prod", (OTHER,)), proof(), "it has another token"),
        (ClusterToken("test", ("sixteen-characters-or-more",)), proof(), "it is of the cluster 'prod'"),
        (GOOD, proof(version=VERSION + 1), f"it speaks version {VERSION + 1} of the frames"),
    ],
)
def test_others_are_told_why_and_so_is_the_log(token: ClusterToken, shown: Proof, told: str) -> None:
    async def use(address: tuple[str, int], said: list[str]) -> None:
        with pytest.raises(Unwanted, match=told):
            await visit(address, token, shown, None, None)

    said = member(use)
    assert [told in line for line in said] == ([] if token.cluster == "test" else [True])


def test_a_member_that_comes_to_one_that_does_not_lead_is_told_and_the_log_is_not() -> None:
    """It comes again twenty times a second, until somebody rules."""

    async def use(address: tuple[str, int], said: list[str]) -> None:
        with pytest.raises(Unwanted, match="it does not lead"):
            await visit(address, GOOD, msgspec.structs.replace(proof(), member="10.0.0.3:8010"), None, None)

    assert member(use) == []


@pytest.mark.parametrize("own", [("sixteen-characters-or-more",), (OTHER, "sixteen-characters-or-more")])
def test_while_a_token_takes_the_place_of_another_members_with_either_are_let_in(own: tuple[str, ...]) -> None:
    """Each member has its new file at its own time: what one shows first, all others accept."""

    async def use(address: tuple[str, int], said: list[str]) -> None:
        assert await visit(address, ClusterToken("prod", own), proof(VoteRequest("10.0.0.2:8010", 3)), None, None)

    assert member(use, ClusterToken("prod", ("sixteen-characters-or-more", OTHER))) == []


def test_a_proof_that_was_overheard_opens_nothing() -> None:
    async def use(address: tuple[str, int], said: list[str]) -> None:
        heard = proof()
        heard.proof = GOOD.proofs(Challenge(VERSION, "prod", b"o" * 32), heard)[0]
        reader, writer = await asyncio.open_connection(*address)
        await reader.readexactly(4)
        body = msgspec.msgpack.encode([heard])
        writer.write(struct.pack(">I", len(body)) + body)
        await reader.read()
        writer.close()
        assert "another token" in said[0]

    member(use)


def test_a_member_that_does_not_have_the_token_is_not_believed() -> None:
    async def main() -> None:
        async def false(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for message in (Challenge(VERSION, "prod", b"c" * 32), Accepted(True, b"x" * 32)):
                body = msgspec.msgpack.encode([message])
                writer.write(struct.pack(">I", len(body)) + body)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(false, "127.0.0.1", 0)
        with pytest.raises(Unwanted, match="has not shown that it has the token"):
            await visit(server.sockets[0].getsockname()[:2], GOOD, proof(VoteRequest("10.0.0.2:8010", 3)), None, None)
        server.close()
        await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"\x40\x00\x00\x00", "a frame of 1073741824 bytes, where 1 to 4096 are taken"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of"),
        (b"\x00\x00\x00\x01\x00", "no frame of ours"),
        (b"", "it has not said who it is"),
    ],
)
def test_garbage_and_silence_are_cut_off(sent: bytes, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "WITHIN", 0.1)

    async def use(address: tuple[str, int], said: list[str]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()

    (line,) = member(use)
    assert line.startswith(f"cluster: 127.0.0.1 was not let in: {told}")


@pytest.mark.slow
def test_strangers_get_a_line_an_address_and_a_count_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a scan of ports would have it: each connection is cut off, and the log keeps its size."""
    monkeypatch.setattr(visitors, "EVERY", 3.0)  # all come in that time
    monkeypatch.setattr(visitors, "NAMED", 2)

    async def use(address: tuple[str, int], said: list[str]) -> None:
        for source in ("127.0.0.5", "127.0.0.6", "127.0.0.7", "127.0.0.8"):
            for _ in range(10):
                reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
                writer.close()
        assert [line.split(":")[1] for line in said] == [
            " 127.0.0.5 was not let in", " 127.0.0.6 was not let in", " other addresses was not let in"
        ]  # fmt: skip
        async with asyncio.timeout(60):
            while len(said) < 6:
                await asyncio.sleep(0.01)

    counted = member(use)[3:]
    assert [line.split(": a frame")[0] for line in counted] == [
        "cluster: 127.0.0.5 was not let in 9 more times in 3 s",
        "cluster: 127.0.0.6 was not let in 9 more times in 3 s",
        "cluster: other addresses was not let in 19 more times in 3 s",
    ]


def test_silent_strangers_shut_no_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One address has its share, all have theirs; a member passes beside them, from the same address too."""
    monkeypatch.setattr(visitors, "MOST", 8)
    monkeypatch.setattr(visitors, "OF_ADDRESS", 4)

    async def use(address: tuple[str, int], said: list[str]) -> None:
        silent = [await asyncio.open_connection(*address, local_addr=(f"127.0.0.{2 + n % 5}", 0)) for n in range(30)]
        assert await visit(address, GOOD, proof(VoteRequest("10.0.0.2:8010", 3)), None, None)
        ended = 0
        for reader, writer in silent:
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                async with asyncio.timeout(0.05):
                    while await reader.read(4096):
                        pass
                    raise ConnectionResetError
            ended += reader.at_eof() or reader.exception() is not None
            writer.close()
        assert ended >= 30 - 8

    assert "too many have not said who they are" in " ".join(member(use))
