"""End of an exchange with an engine: half-closed engines, blank lines, closed readers, full buffers."""

from __future__ import annotations

import asyncio

import pytest

from gateway.upstream.client import Client, ClientSettings, EngineError, parse_origin
from tests.wire.client_harness import CHUNKED, OK, PLAIN, Rig, Taken, chunk, failure, run

LARGE = b"x" * (16 << 20)


@pytest.mark.parametrize(("sent", "kind"), [(b"", "reset"), (OK, "reset"), (CHUNKED, "truncated")])
def test_an_engine_that_half_closes_while_it_leaves_the_request_unread(sent: bytes, kind: str) -> None:
    """The transport would wait for the rest of the request to be written before it closes; the caller does not."""

    async def scenario(rig: Rig) -> None:
        sending = rig.sending(LARGE)
        peer = await rig.peer()
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(sent)
        peer.writer.write_eof()
        assert (await failure(sending)).kind == kind

    run(scenario)


@pytest.mark.parametrize("blank", [b"\r\n", b"\n", b"\n\n\r\n\r\n"])
@pytest.mark.parametrize(
    "answer",
    [PLAIN, CHUNKED + chunk(b"ok") + b"0\r\n\r\n",
     b"HTTP/1.1 204 No\r\nx: y\r\n\r\n", OK + b"content-length: 2\r\n\r\n\n\n"],
    ids=["counted", "chunked", "204", "white space"],
)  # fmt: skip
def test_blank_lines_in_the_last_read_end_the_connection(answer: bytes, blank: bytes) -> None:
    """llhttp skips them without a word."""

    async def scenario(rig: Rig) -> None:
        _, reply = await rig.reply(answer + blank)
        assert reply.complete
        reply.close()
        assert rig.client.idle == 0

    run(scenario)


@pytest.mark.parametrize(
    "answer", [CHUNKED + chunk(b"ok") + b"0\r\n\r\n", CHUNKED + chunk(b"ok") + b"0\r\na: b\r\n\r\n"]
)
def test_an_end_in_pieces_is_an_end(answer: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(answer[:-5])
        assert not reply.complete
        taken = Taken().of(reply)
        await peer.send(*(answer[at : at + 1] for at in range(len(answer) - 5, len(answer))))
        assert await taken.end() is None
        reply.close()
        assert rig.client.idle == 1

    run(scenario)


def test_a_reply_closed_while_it_is_read() -> None:
    async def scenario(rig: Rig) -> None:
        _, reply = await rig.reply(CHUNKED + chunk(b"ok"))
        reading = asyncio.create_task(reply.read(100))
        await asyncio.sleep(0)
        reply.close()
        async with asyncio.timeout(60):
            with pytest.raises(EngineError) as caught:
                await reading
        assert caught.value.kind == "closed"

    run(scenario)


def test_what_nobody_takes_yet_is_bounded() -> None:
    piece, pieces = b"y" * 65536, 400

    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED + chunk(b"first"))
        written = 0

        async def engine() -> None:
            nonlocal written
            for _ in range(pieces):
                peer.writer.write(chunk(piece))
                await peer.writer.drain()
                written += 1
            peer.writer.write(b"0\r\n\r\n")

        writing = asyncio.create_task(engine())
        before = -1
        while before != written:  # until the engine can write no more
            before = written
            for _ in range(50):
                await asyncio.sleep(0)
        assert before < pieces / 2
        taken = Taken().of(reply)
        assert sum(len(piece) for piece in taken.pieces) <= 768 * 1024
        assert await taken.end() is None
        assert len(taken.body) == 5 + pieces * len(piece)
        await writing
        reply.close()
        assert rig.client.idle == 1

    run(scenario)


@pytest.mark.parametrize("key", ["a\r\nb", "a\nb", "\x00", "ключ"])
def test_a_key_that_cannot_stand_in_a_header(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        Client(parse_origin("http://engine:1"), ClientSettings(), api_key=key)
