"""HTTP client of the load test: bytes in, cut anywhere, one outcome out."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from loadtest.clients.answer import Answer
from loadtest.clients.targets import Address, Server
from tests.raw_calls import chat, exchange

ROLE = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":"data: [DONE]\\n\\n"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"the engine died","code":"upstream_error"}}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(*events: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(chunk(event) for event in events) + end


def whole(status: bytes, body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b" % (
        status,
        len(body),
        headers,
        body,
    )


def seen(answer_bytes: bytes, *, piece: int = 1 << 20, limit: float = 60.0, hang: bool = False) -> Answer:
    """What the client makes of `answer_bytes`, sent `piece` bytes at a time, before the connection is closed."""
    answer = Answer()

    async def main() -> None:
        served = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            with suppress(ConnectionError):
                for at in range(0, len(answer_bytes), piece):
                    writer.write(answer_bytes[at : at + piece])
                    await writer.drain()
                    await asyncio.sleep(0)
                if hang:
                    await reader.read()  # until the client leaves
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            served.set()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await exchange("127.0.0.1", port, chat("h", "m", "hi", max_tokens=2), answer, limit=limit)
            await served.wait()

    asyncio.run(main())
    return answer


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_a_stream_is_read_however_it_is_cut(piece: int) -> None:
    answer = seen(stream(ROLE, WORD + WORD, USAGE, DONE), piece=piece, hang=True)
    assert (answer.outcome, answer.status) == ("ok", 200)
    assert (answer.prompt_tokens, answer.completion_tokens) == (3, 2)
    assert 0 < answer.sent <= answer.first_byte <= answer.finished


@pytest.mark.parametrize(
    ("answer_bytes", "outcome"),
    [
        (whole(b"200 OK", b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}'), "ok"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "ok"),  # ends with the connection
        (whole(b"503 No", b'{"error":{}}', b"x-weir-reason: queue_full\r\n"), "queue_full"),
        (whole(b"400 No", b'{"error":{}}'), "engine_refused"),
        (whole(b"500 No", b'{"error":{}}'), "upstream"),
        (stream(ROLE, WORD, ERROR), "truncated"),
        (stream(ROLE, WORD, ERROR, end=b""), "truncated"),
        (stream(ROLE, WORD, ERROR, DONE), "upstream"),
        (stream(ROLE, WORD), "cut"),  # well framed, but nobody said that it is done
        (stream(ROLE, WORD, end=b""), "cut"),
        (stream(ROLE, WORD, DONE, end=b""), "cut"),  # done, but the framing says there is more
        (whole(b"200 OK", b"{}")[:-1], "cut"),
        (b"HTTP/1.1 2", "unanswered"),
        (b"", "unanswered"),
    ],
)
def test_how_it_ended(answer_bytes: bytes, outcome: str) -> None:
    assert seen(answer_bytes).outcome == outcome


def test_it_gives_up() -> None:
    assert seen(stream(ROLE, end=b""), hang=True, limit=0.1).outcome == "timed_out"


def test_nobody_listens() -> None:
    answer = Answer()
    asyncio.run(exchange("127.0.0.1", 9, b"", answer, limit=60.0))
    assert answer.outcome == "unanswered"
    assert "Connect call failed" in answer.error


@pytest.mark.parametrize("answered", [True, False])
def test_a_server_that_is_closed_closes_connections_that_were_not_given_back(answered: bool) -> None:
    """A run may end in the turn in which an answer does, or in which somebody who waits for one is cancelled."""

    async def main() -> None:
        asked, left = asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            if answered:
                writer.write(whole(b"200 OK", b"{}"))
            asked.set()
            with suppress(ConnectionError):
                await reader.read()
            left.set()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening, asyncio.timeout(60.0):
            server = Server(Address("127.0.0.1", listening.sockets[0].getsockname()[1]), None)
            exchange = server.send(server.address.request(b"GET", b"/"), Answer())
            await (exchange.over if answered else asked.wait())
            server.close()
            await left.wait()

    asyncio.run(main())
