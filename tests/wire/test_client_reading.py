"""Reading of engines' answers: every split gives the same, and anything but strict HTTP is refused."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.upstream.client import EngineError
from tests.examples import examples
from tests.wire.client_harness import CHUNKED, OK, PLAIN, Peer, Rig, Taken, chunk, failure, run

TRICKY = b"5\r\nhello\r\n0\r\n\r\n"  # a payload that looks like chunks
ANSWERS = {
    # name: the bytes, status, body, whether the connection can be used again
    "counted": (OK + b"content-length: 11\r\nx: y\r\n\r\nhello\r\n\r\nyo", 200, b"hello\r\n\r\nyo", True),
    "empty": (OK + b"content-length: 0\r\n\r\n", 200, b"", True),
    "chunked": (CHUNKED + chunk(b"data: 1\n\n") + chunk(TRICKY) + chunk(b"\r\n") + b"0\r\n\r\n", 200,
                b"data: 1\n\n" + TRICKY + b"\r\n", True),
    "extensions": (CHUNKED + b'5;a=b;c="d\\"e"\r\nhello\r\n00A\r\n0123456789\r\n00;x\r\ncontent-type: no\r\n\r\n', 200,
                   b"hello0123456789", True),
    "empty chunked": (CHUNKED + b"0\r\n\r\n", 200, b"", True),
    "until close": (OK + b"x: y\r\n\r\n5\r\nhello\r\n", 200, b"5\r\nhello\r\n", False),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + PLAIN, 200, b"ok", True),
    "no content": (b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n", 204, b"", True),
    "not modified": (b"HTTP/1.1 304 \r\ncontent-length: 7\r\n\r\n", 304, b"", True),
    "closing": (b"HTTP/1.1 500 X\r\nConnection: Close\r\nContent-Length: 2\r\n\r\nno", 500, b"no", False),
    "closing chunks": (CHUNKED[:-2] + b"connection: close\r\n\r\n" + chunk(b"x") + b"0\r\n\r\n", 200, b"x", False),
    "old": (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok", False),
    "old keep-alive": (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok", 200, b"ok", True),
}  # fmt: skip


async def exchange(rig: Rig, peer: Peer | None, pieces: list[bytes], name: str) -> Peer | None:
    """One answer in these pieces; the connection, if it can be used again."""
    raw, status, body, keeps = ANSWERS[name]
    assert b"".join(pieces) == raw
    sending = rig.sending()
    peer = peer or await rig.peer()
    await peer.request()
    await peer.send(*pieces)
    if not keeps:
        peer.close()
    reply = await sending
    taken = Taken().of(reply)
    assert await taken.end() is None
    assert (reply.status, taken.body, reply.complete) == (status, body, True)
    assert reply.headers.get(b"content-type") is None  # of a trailer
    assert b"link" not in reply.headers
    assert rig.client.active == 1
    reply.close()
    assert (rig.client.active, rig.client.idle) == (0, keeps)
    return peer if keeps else None


@pytest.mark.parametrize("name", ANSWERS)
def test_every_split_reads_the_same(name: str) -> None:
    raw = ANSWERS[name][0]

    async def scenario(rig: Rig) -> None:
        peer = None
        for at in range(1, len(raw)):
            peer = await exchange(rig, peer, [raw[:at], raw[at:]], name)
        peer = await exchange(rig, peer, [raw], name)
        await exchange(rig, peer, [raw[at : at + 1] for at in range(len(raw))], name)

    run(scenario)


def cut(raw: bytes, at: set[int]) -> list[bytes]:
    places = [0, *sorted(place for place in at if 0 < place < len(raw)), len(raw)]
    return [raw[a:b] for a, b in pairwise(places)]


payloads = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from([TRICKY, b"\n", b"\r\n", b"0\r\n\r\n", b"1\r\na\r\n", b"a\n\n", b"3\r\n", b"x" * 300]),
)
sizes = st.sampled_from([b"%x", b"%X", b"0%x", b"%x;a=b", b'%X;q="\\"z"'])


@settings(max_examples=examples(150))
@given(
    chunks=st.lists(st.tuples(payloads, sizes), max_size=8),
    end=st.sampled_from([b"0\r\n\r\n", b"00\r\n\r\n", b"0;x=y\r\n\r\n", b"0\r\na: b\r\ncontent-type: c\r\n\r\n"]),
    by_chunk=st.booleans(),
    splits=st.sets(st.integers(1, 500), max_size=12),
    taker=st.booleans(),
)
@example(chunks=[(b"a", b"%x"), (b"0\r\n\r\n", b"%x")], end=b"0\r\n\r\n", by_chunk=True, splits=set(), taker=True)
@example(chunks=[(b"a", b"%x"), (b"b", b"%x")], end=b"0\r\n\r\n", by_chunk=True, splits={49}, taker=True)
def test_chunks_however_they_come(
    chunks: list[tuple[bytes, bytes]], end: bytes, by_chunk: bool, splits: set[int], taker: bool
) -> None:
    """`by_chunk`: every chunk in a read of its own, and the splits beside. `taker`: someone takes whole chunks."""
    framed = [form % len(data) + b"\r\n" + data + b"\r\n" for data, form in chunks]
    raw, bounds = CHUNKED, set(splits)
    for part in (*framed, end):
        if by_chunk:
            bounds.add(len(raw))
        raw += part

    async def scenario(rig: Rig) -> None:
        sending = rig.sending()
        peer = await rig.peer()
        await peer.request()
        await peer.send(*cut(raw, bounds))
        taken = Taken().of(reply := await sending, whole=taker)
        assert await taken.end() is None
        assert taken.body == b"".join(data for data, _ in chunks)
        assert taker or not taken.wholes
        reply.close()
        assert rig.client.idle == 1
        # Nothing of that answer is left in the connection.
        reply = await rig.again(peer, PLAIN)
        assert await reply.read(10) == b"ok"
        reply.close()

    run(scenario)


LOOKS = chunk(b"abc")  # 8 bytes


@pytest.mark.parametrize(
    ("reads", "body"),
    [
        ([chunk(b"a") + b"1", b"3\r\nabc\r\n", b"x" * 14 + b"\r\n"], b"aabc\r\n" + b"x" * 14),  # behind a begun size
        ([chunk(b"a") + b"8\r\n", LOOKS, b"\r\n"], b"a" + LOOKS),  # behind a size
        ([b"b\r\nx\r\n", LOOKS, b"\r\n"], b"x\r\n" + LOOKS),  # behind data that ends in a line end
        ([b"9\r\n\n", LOOKS, b"\r\n"], b"\n" + LOOKS),
        ([chunk(b"a") + b"8;x\r\n", LOOKS, b"\r\n"], b"a" + LOOKS),
        ([chunk(b"a") + b"8\r\n" + LOOKS + b"\r", b"\n", LOOKS], b"a" + LOOKS + b"abc"),
    ],
)
def test_a_read_that_only_looks_like_a_chunk(reads: list[bytes], body: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED, chunk(b"-"))
        taken = Taken().of(reply)
        await peer.send(*reads, b"0\r\n\r\n")
        assert (await taken.end(), taken.body) == (None, b"-" + body)
        reply.close()
        assert rig.client.idle == 1

    run(scenario)


def test_the_usual_read_is_one_whole_chunk_and_goes_on_as_it_came() -> None:
    async def scenario(rig: Rig) -> None:
        events = [b"data: %d\n\n" % i for i in range(20)]
        peer, reply = await rig.reply(CHUNKED, chunk(b"first"))
        taken = Taken().of(reply)
        await peer.send(*map(chunk, events), chunk(b"two") + chunk(b"chunks"), chunk(b"last"), b"0\r\n\r\n")
        assert await taken.end() is None
        assert taken.body == b"first" + b"".join(events) + b"twochunkslast"
        assert taken.wholes == 21
        reply.close()
        assert rig.client.idle == 1

    run(scenario)


def test_a_stream_in_the_wrong_coding_is_not_taken_for_chunks() -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending()
        peer = await rig.peer()
        await peer.request()
        await peer.send(OK + b"transfer-encoding: gzip\r\n\r\n", chunk(b"x"), chunk(b"y"))
        assert (await failure(sending)).kind == "garbage"
        await peer.ended()

    run(scenario)


HEADS = {
    "length and chunks": OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": OK + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok",
    "one length twice": OK + b"content-length: 2\r\ncontent-length: 2\r\n\r\nok",
    "a list of lengths": OK + b"content-length: 2, 2\r\n\r\nok",
    "negative length": OK + b"content-length: -1\r\n\r\nok",
    "signed length": OK + b"content-length: +2\r\n\r\nok",
    "hexadecimal length": OK + b"content-length: 0x2\r\n\r\nok",
    "empty length": OK + b"content-length:\r\n\r\nok",
    "huge length": OK + b"content-length: 99999999999999999999\r\n\r\nok",
    "coding": OK + b"transfer-encoding: gzip\r\n\r\nok",
    "codings": OK + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding hidden": OK + b"transfer-encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "identity": OK + b"transfer-encoding: identity\r\n\r\nok",
    "chunks of 1.0": b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare line feeds": b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok",
    "folded": OK + b"x: a\r\n b\r\ncontent-length: 2\r\n\r\nok",
    "space before colon": OK + b"content-length : 2\r\n\r\nok",
    "NUL": OK + b"x: a\0b\r\ncontent-length: 2\r\n\r\nok",
    "HTTP/2": b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    "HTTP/0.9": b"hello, this is text\n",
    "status of 2 digits": b"HTTP/1.1 20 OK\r\ncontent-length: 2\r\n\r\nok",
    "status 099": b"HTTP/1.1 099 OK\r\ncontent-length: 2\r\n\r\nok",
    "status 600": b"HTTP/1.1 600 X\r\ncontent-length: 2\r\n\r\nok",
    "status of 4 digits": b"HTTP/1.1 2000 OK\r\ncontent-length: 2\r\n\r\nok",
    "switching": b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n\0\0",
    "switching, silently": b"HTTP/1.1 101 X\r\n\r\n" + PLAIN,
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "no chunk size": CHUNKED + b"\r\nhello\r\n",
    "bad chunk size": CHUNKED + b"xyz\r\nhello\r\n",
    "negative chunk": CHUNKED + b"-5\r\nhello\r\n",
    "signed chunk": CHUNKED + b"+5\r\nhello\r\n",
    "chunk of 0x": CHUNKED + b"0x5\r\nhello\r\n",
    "space after size": CHUNKED + b"5 \r\nhello\r\n",
    "huge chunk": CHUNKED + b"fffffffffffffffff\r\nhello\r\n",
    "bare line feed after size": CHUNKED + b"5\nhello\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_what_is_not_strictly_http_is_garbage(name: str) -> None:
    async def scenario(rig: Rig) -> None:
        for pieces in ([HEADS[name]], [bytes([byte]) for byte in HEADS[name]]):
            sending = rig.sending()
            peer = await rig.peer()
            await peer.request()
            await peer.send(*pieces)
            error = await failure(sending)
            assert (error.kind, error.before_bytes) == ("garbage", False)
            await peer.ended()
            assert (rig.client.active, rig.client.idle) == (0, 0)

    run(scenario)


CHUNKS = {
    "too long": chunk(b"hello")[:-2] + b"XX",
    "line feed only": chunk(b"hello")[:-2] + b"\n",
    "size run on": b"5\r\nhello6\r\n",
    "bad size": b"zz\r\nhello\r\n",
    "like a chunk, but longer": b"4\r\nhello\r\n",
    "bad trailer": b"0\r\na b\r\n\r\n",
    "length in a trailer": b"0\r\ncontent-length: 3\r\n\r\n",
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", CHUNKS)
def test_garbage_in_the_middle_ends_the_answer_with_an_error(name: str, early: bool) -> None:
    """`early`: before anybody took the answer."""

    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED + chunk(b"first"), *([CHUNKS[name]] if early else []))
        taken = Taken().of(reply)
        assert taken.pieces[0] == b"first"
        if not early:
            await peer.send(CHUNKS[name])
        error = await taken.end()
        assert error is not None
        assert (error.kind, error.before_bytes, reply.complete) == ("garbage", False, False)
        reply.close()
        await peer.ended()
        assert rig.client.idle == 0

    run(scenario)


@pytest.mark.parametrize(
    "extra", [b"x", b"\0", PLAIN, PLAIN[:5], b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", b"\r\nx"]
)
@pytest.mark.parametrize("ending", ["counted", "chunked", "no content", "interim"])
@pytest.mark.parametrize("when", ["with it", "after it", "at rest"])
def test_bytes_after_the_end_of_an_answer_close_the_connection(extra: bytes, ending: str, when: str) -> None:
    raw, _, body, _ = ANSWERS[ending]

    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(*([raw + extra] if when == "with it" else [raw]))
        if when == "after it":
            await peer.send(extra)
        headers, status = dict(reply.headers), reply.status
        taken = Taken().of(reply)
        assert (await taken.end(), taken.body) == (None, body)
        reply.close()
        if when == "at rest":
            assert rig.client.idle == 1
            await peer.send(extra)
        assert rig.client.idle == 0
        assert (reply.headers, reply.status) == (headers, status)
        await peer.ended()
        _, reply = await rig.reply(PLAIN)
        assert await reply.read(10) == b"ok"
        reply.close()

    run(scenario)


def test_a_closed_reply_in_the_callback_that_ends_it_with_more_to_come() -> None:
    """Who takes it may close it at once, inside `done`; what follows in the same read must not reach the pool."""

    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED + chunk(b"a"))
        got: list[bytes] = []
        ends = []

        def done(error: EngineError | None) -> None:
            ends.append(error)
            reply.close()

        reply.relay(got.append, done, got.append)
        await peer.send(b"0\r\n\r\n" + PLAIN)
        assert (got, ends) == ([b"a"], [None])
        await peer.ended()
        assert rig.client.idle == 0

    run(scenario)


@pytest.mark.parametrize("place", ["status line", "one header", "many headers", "interim answers"])
@pytest.mark.parametrize("body", [b"", b"x" * 3000])
def test_a_head_at_its_limit_and_one_byte_over(place: str, body: bytes) -> None:
    limit = 1000

    def head(size: int) -> bytes:
        start, end = b"HTTP/1.1 200 ", b"content-length: %d\r\n\r\n" % len(body)
        if place == "status line":
            return start + b"x" * (size - len(start) - len(end) - 2) + b"\r\n" + end
        start += b"\r\n"
        if place == "one header":
            return start + b"a: " + b"x" * (size - len(start) - len(end) - 5) + b"\r\n" + end
        if place == "many headers":
            start += b"a: b\r\n" * 50
        else:
            start = b"HTTP/1.1 100 \r\na: b\r\n\r\n" * 10 + start
        return start + b"a: " + b"x" * (size - len(start) - len(end) - 5) + b"\r\n" + end

    async def scenario(rig: Rig) -> None:
        for over in (0, 1):
            raw = head(limit + over) + body
            assert len(raw) == limit + over + len(body)
            for pieces in (
                [raw],
                cut(raw, {500, 990}),
                cut(raw, {limit}),
                cut(raw, {limit - 1}),
                cut(raw, {limit + 1}),
            ):
                sending = rig.sending()
                peer = await rig.peer()
                await peer.request()
                await peer.send(*pieces)
                if over:
                    error = await failure(sending)
                    assert (error.kind, "over 1000 bytes" in str(error)) == ("garbage", True)
                    await peer.ended()
                else:
                    reply = await sending
                    assert await reply.read(5000) == body
                    peer.close()
                    await peer.reader.read()
                    reply.close()
                    await rig.until(lambda: rig.client.idle == 0)

    run(scenario, max_head=limit)


@pytest.mark.parametrize(
    "start", [b"", b"HTTP/1.1 200 OK\r\nx: ", CHUNKED + b"5;", CHUNKED + chunk(b"a") + b"0\r\nx: "]
)
def test_a_mebibyte_without_a_newline_is_garbage_long_before_its_end(start: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        sending = rig.sending()
        peer = await rig.peer()
        await peer.request()
        await peer.send(start or b"H")
        sent = 0
        error: EngineError | None = None
        while error is None:
            assert sent < 64 * 1024
            await peer.send(b"x" * 1024)
            sent += 1024
            if sending.done() and start.startswith(CHUNKED) and b"0\r\n" in start:
                taken = Taken().of(sending.result())
                while not taken.ends:
                    assert sent < 64 * 1024
                    await peer.send(b"x" * 1024)
                    sent += 1024
                error = await taken.end()
                sending.result().close()
            elif sending.done():
                error = await failure(sending)
        assert error.kind == "garbage"
        await peer.ended()

    run(scenario)


def test_long_extensions_and_trailers_within_reason_are_dropped() -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(CHUNKED, b"1;" + b"e" * 500, b"e" * 500 + b"\r\na\r\n")
        taken = Taken().of(reply)
        for _ in range(100):  # far more than the limit, but never much in a row
            await peer.send(b"1;" + b"e" * 500 + b"\r\n", b"a\r\n")
        await peer.send(b"0\r\n" + b"t: u\r\n" * 100, b"\r\n")
        assert (await taken.end(), taken.body) == (None, b"a" * 101)
        assert list(reply.headers) == [b"transfer-encoding"]
        reply.close()

    run(scenario, max_head=2000)


def test_a_head_as_large_as_it_may_be_leaves_room_for_chunks() -> None:
    async def scenario(rig: Rig) -> None:
        head = CHUNKED[:-2] + b"a: " + b"x" * (1000 - len(CHUNKED) - 5) + b"\r\n\r\n"
        assert len(head) == 1000
        _, reply = await rig.reply(head + b"1;", b"ab=c\r\n", b"x\r\n0\r\n\r\n")
        assert await reply.read(10) == b"x"
        reply.close()

    run(scenario, max_head=1000)


def test_header_names_are_lower_case_and_the_framing_is_told() -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(OK + b"Content-Length: 2\r\nX-Request-ID:  Ab \r\n\r\nok")
        assert (reply.length, reply.headers[b"x-request-id"].strip()) == (2, b"Ab")
        reply.close()
        reply = await rig.again(peer, OK + b"\r\n" + b"a")
        assert (reply.length, reply.complete) == (None, False)
        reply.close()

    run(scenario)


def test_read_gives_the_whole_body_up_to_its_limit() -> None:
    async def scenario(rig: Rig) -> None:
        peer, reply = await rig.reply(OK + b"content-length: 10\r\n\r\n", b"hello")
        reading = asyncio.create_task(reply.read(10))
        await peer.send(b"hello")
        assert await reading == b"hellohello"
        reply.close()

        reply = await rig.again(peer, OK + b"content-length: 10\r\n\r\n", b"hello")
        reading = asyncio.create_task(reply.read(9))
        await peer.send(b"hello")
        with pytest.raises(EngineError, match="over 9 bytes") as over:
            await reading
        assert over.value.kind == "garbage"
        reply.close()

    run(scenario)
