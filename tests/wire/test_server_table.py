"""Table of the data port's inputs: bytes in, status and connection state out, however they are split."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.wire.server_harness import Rig, serve

POST = b"POST /p HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def get(line: bytes = b"GET /g HTTP/1.1", *headers: bytes) -> bytes:
    return b"".join(part + b"\r\n" for part in (line, b"Host: a", *headers)) + b"\r\n"


def post(*headers: bytes, body: bytes = b"") -> bytes:
    return POST + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


# name -> (bytes in, the status that ends the connection)
REFUSED: dict[str, tuple[bytes, int]] = {
    # Content-Length and Transfer-Encoding
    "length and coding": (post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    "coding and length": (post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n"), 400),
    "lengths conflict": (post(b"Content-Length: 2", b"Content-Length: 3", body=b"ab"), 400),
    "length repeated": (post(b"Content-Length: 2", b"content-length: 2", body=b"ab"), 400),
    "length list": (post(b"Content-Length: 2, 2", body=b"ab"), 400),
    "length +": (post(b"Content-Length: +2", body=b"ab"), 400),
    "length -": (post(b"Content-Length: -2", body=b"ab"), 400),
    "length hex": (post(b"Content-Length: 0x2", body=b"ab"), 400),
    "length with letters": (post(b"Content-Length: 2a", body=b"ab"), 400),
    "length with a space": (post(b"Content-Length: 2 2", body=b"ab"), 400),
    "length with a dot": (post(b"Content-Length: 2.0", body=b"ab"), 400),
    "length empty": (post(b"Content-Length:", body=b""), 400),
    "length over 64 bits": (post(b"Content-Length: 18446744073709551618", body=b"ab"), 400),
    "length of 400 digits": (post(b"Content-Length: " + b"9" * 400), 400),
    "length of leading zeros": (post(b"Content-Length: " + b"0" * 400 + b"2", body=b"ab"), 400),
    "length in arabic digits": (post("Content-Length: ٢".encode(), body=b"ab"), 400),
    "coding gzip": (post(b"Transfer-Encoding: gzip"), 400),
    "coding gzip, chunked": (post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"), 400),
    "coding chunked, chunked": (post(b"Transfer-Encoding: chunked, chunked", body=b"0\r\n\r\n"), 400),
    "coding chunked, identity": (post(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"), 400),
    "coding identity": (post(b"Transfer-Encoding: identity"), 400),
    "coding xchunked": (post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"), 400),
    "coding chunkedx": (post(b"Transfer-Encoding: chunkedx", body=b"0\r\n\r\n"), 400),
    "coding with a parameter": (post(b"Transfer-Encoding: chunked;q=1", body=b"0\r\n\r\n"), 400),
    "coding quoted": (post(b'Transfer-Encoding: "chunked"', body=b"0\r\n\r\n"), 400),
    "coding with a comma": (post(b"Transfer-Encoding: ,chunked", body=b"0\r\n\r\n"), 400),
    "coding with a tab before": (post(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"), 400),
    "coding empty": (post(b"Transfer-Encoding:", body=b"0\r\n\r\n"), 400),
    "coding repeated": (post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    "coding repeated, split": (post(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    "coding in 1.0": (b"POST /p HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "coding folded": (post(b"Transfer-Encoding:\r\n chunked", body=b"0\r\n\r\n"), 400),
    "coding with space before colon": (post(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n"), 400),
    # lines and fields
    "fold with space": (get(b"GET /g HTTP/1.1", b"X: a\r\n b"), 400),
    "fold with tab": (get(b"GET /g HTTP/1.1", b"X: a\r\n\tb"), 400),
    "fold of the first field": (b"GET /g HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    "bare LF everywhere": (b"GET /g HTTP/1.1\nHost: a\n\n", 400),
    "bare LF after the request line": (b"GET /g HTTP/1.1\nHost: a\r\n\r\n", 400),
    "bare LF after a field": (b"GET /g HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400),
    "bare LF at the end": (b"GET /g HTTP/1.1\r\nHost: a\r\n\n", 400),
    "bare LF before the request": (b"\n" + get(), 400),
    "bare CR in a value": (get(b"GET /g HTTP/1.1", b"X: a\rb"), 400),
    "bare CR ends a field": (b"GET /g HTTP/1.1\r\nHost: a\rX: b\r\n\r\n", 400),
    "CR CR LF": (b"GET /g HTTP/1.1\r\r\nHost: a\r\n\r\n", 400),
    "two empty lines before the request": (b"\r\n\r\n" + get(), 400),
    "space before colon": (b"GET /g HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "space in a name": (get(b"GET /g HTTP/1.1", b"X Y: a"), 400),
    "empty name": (get(b"GET /g HTTP/1.1", b": a"), 400),
    "no colon": (get(b"GET /g HTTP/1.1", b"foo"), 400),
    "separator in a name": (get(b"GET /g HTTP/1.1", b"X(y): a"), 400),
    "byte over 127 in a name": (get(b"GET /g HTTP/1.1", b"X\xe9: a"), 400),
    "NUL in a value": (get(b"GET /g HTTP/1.1", b"X: a\0b"), 400),
    "NUL in a name": (get(b"GET /g HTTP/1.1", b"X\0: a"), 400),
    "NUL in the target": (get(b"GET /g\0 HTTP/1.1"), 400),
    "control byte in a value": (get(b"GET /g HTTP/1.1", b"X: a\x01b"), 400),
    "DEL in a value": (get(b"GET /g HTTP/1.1", b"X: a\x7fb"), 400),
    # request line
    "lower-case method": (get(b"get /g HTTP/1.1"), 400),
    "method not a token": (get(b"G@T /g HTTP/1.1"), 400),
    "method unknown": (get(b"BREW /g HTTP/1.1"), 400),
    "method empty": (get(b" /g HTTP/1.1"), 400),
    "space before the method": (b" " + get(), 400),
    "tab in the request line": (get(b"GET\t/g HTTP/1.1"), 400),
    "two spaces after the method": (get(b"GET  /g HTTP/1.1"), 400),
    "two spaces after the target": (get(b"GET /g  HTTP/1.1"), 400),
    "space after the version": (get(b"GET /g HTTP/1.1 "), 400),
    "HTTP/0.9": (b"GET /g\r\n\r\n", 400),
    "space in the target": (get(b"GET /g h HTTP/1.1"), 400),
    "target without slash": (get(b"GET g HTTP/1.1"), 400),
    "target empty": (get(b"GET  HTTP/1.1"), 400),
    "target with a fragment": (get(b"GET /g#f HTTP/1.1"), 400),
    "target with byte over 127": (get(b"GET /\xff HTTP/1.1"), 400),
    "asterisk of GET": (get(b"GET * HTTP/1.1"), 400),
    "authority of GET": (get(b"GET a:80 HTTP/1.1"), 400),
    "absolute of another scheme": (get(b"GET ftp://a/g HTTP/1.1"), 400),
    "absolute with user": (get(b"GET http://u@a/g HTTP/1.1"), 400),
    "absolute without host": (get(b"GET http:///g HTTP/1.1"), 400),
    "absolute with a fragment": (get(b"GET http://a/g#f HTTP/1.1"), 400),
    "CONNECT": (get(b"CONNECT a:80 HTTP/1.1"), 501),
    "CONNECT with a path": (get(b"CONNECT /g HTTP/1.1"), 501),
    "TLS to the plain port": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    # version
    "HTTP/2.0": (get(b"GET /g HTTP/2.0"), 505),
    "HTTP/1.2": (get(b"GET /g HTTP/1.2"), 505),
    "HTTP/0.9 stated": (get(b"GET /g HTTP/0.9"), 505),
    "HTTP/11": (get(b"GET /g HTTP/11"), 400),
    "HTTP/1.1.1": (get(b"GET /g HTTP/1.1.1"), 400),
    "HTTP/1.10": (get(b"GET /g HTTP/1.10"), 400),
    "http/1.1": (get(b"GET /g http/1.1"), 400),
    "RTSP": (get(b"DESCRIBE /g RTSP/1.0"), 400),
    "ICE": (get(b"SOURCE /g ICE/1.0"), 400),
    # Host
    "host missing": (b"GET /g HTTP/1.1\r\n\r\n", 400),
    "host repeated": (get(b"GET /g HTTP/1.1", b"host: a"), 400),
    "host repeated in 1.0": (get(b"GET /g HTTP/1.0", b"Host: b"), 400),
    "host empty": (b"GET /g HTTP/1.1\r\nHost:\r\n\r\n", 400),
    "host with a path": (b"GET /g HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    "host with user": (b"GET /g HTTP/1.1\r\nHost: u@a\r\n\r\n", 400),
    "host with a space": (b"GET /g HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    "host list": (b"GET /g HTTP/1.1\r\nHost: a, b c\r\n\r\n", 400),
    "host with a bad port": (b"GET /g HTTP/1.1\r\nHost: a:8o\r\n\r\n", 400),
    "host with two ports": (b"GET /g HTTP/1.1\r\nHost: a:1:2\r\n\r\n", 400),
    "host with open bracket": (b"GET /g HTTP/1.1\r\nHost: [::1\r\n\r\n", 400),
    "host malformed beside absolute": (b"GET http://a/g HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    "host missing beside absolute": (b"GET http://a/g HTTP/1.1\r\n\r\n", 400),
    # chunks
    "chunk of 17 digits": (CHUNKED + b"00000000000000002\r\nab\r\n0\r\n\r\n", 400),
    "chunk of a million digits": (CHUNKED + b"0" * 500, 400),
    "chunk not hex": (CHUNKED + b"2g\r\nab\r\n0\r\n\r\n", 400),
    "chunk 0x": (CHUNKED + b"0x2\r\nab\r\n0\r\n\r\n", 400),
    "chunk -": (CHUNKED + b"-2\r\nab\r\n0\r\n\r\n", 400),
    "chunk +": (CHUNKED + b"+2\r\nab\r\n0\r\n\r\n", 400),
    "chunk underscore": (CHUNKED + b"1_0\r\nab\r\n0\r\n\r\n", 400),
    "chunk size empty": (CHUNKED + b"\r\nab\r\n0\r\n\r\n", 400),
    "chunk space before": (CHUNKED + b" 2\r\nab\r\n0\r\n\r\n", 400),
    "chunk space after": (CHUNKED + b"2 \r\nab\r\n0\r\n\r\n", 400),
    "chunk bare LF": (CHUNKED + b"2\nab\r\n0\r\n\r\n", 400),
    "chunk bare CR": (CHUNKED + b"2\rab\r\n0\r\n\r\n", 400),
    "chunk longer than its size": (CHUNKED + b"2\r\nabc\r\n0\r\n\r\n", 400),
    "chunk ends with other bytes": (CHUNKED + b"2\r\nabXX0\r\n\r\n", 400),
    "chunk ends with LF": (CHUNKED + b"2\r\nab\n0\r\n\r\n", 400),
    "chunk shorter than its size": (CHUNKED + b"3\r\nab\r\n0\r\n\r\n", 400),
    "extension with NUL": (CHUNKED + b"2;a=\0\r\nab\r\n0\r\n\r\n", 400),
    "extension with bare LF": (CHUNKED + b"2;a\nab\r\n0\r\n\r\n", 400),
    "extension over 256": (CHUNKED + b"2;" + b"a" * 300 + b"\r\nab\r\n0\r\n\r\n", 400),
    "trailer malformed": (CHUNKED + b"0\r\nfoo\r\n\r\n", 400),
    "trailer bare LF": (CHUNKED + b"0\r\nX: y\n\r\n", 400),
    "trailer folded": (CHUNKED + b"0\r\nX: y\r\n z\r\n\r\n", 400),
    "trailer with NUL": (CHUNKED + b"0\r\nX: \0\r\n\r\n", 400),
    "trailers end with LF": (CHUNKED + b"0\r\n\n", 400),
    "trailer with space before colon": (CHUNKED + b"0\r\nX : y\r\n\r\n", 400),
    # sizes, under the small limits of `LIMITS`
    "body announced over the limit": (post(b"Content-Length: 2001"), 413),
    "body announced, to be continued": (post(b"Content-Length: 2001", b"Expect: 100-continue"), 413),
    "body counted over the limit": (CHUNKED + b"3e8\r\n" + b"a" * 1000 + b"\r\n3e9\r\n", 413),
    "chunk of 16 digits": (CHUNKED + b"ffffffffffffffff\r\nab", 413),
    "too many fields": (get(b"GET /g HTTP/1.1", *(b"X: y" for _ in range(10))), 431),
    "too many trailers": (CHUNKED + b"0\r\n" + b"X: y\r\n" * 11 + b"\r\n", 400),
}  # fmt: skip

# name -> (bytes in, status); these are longer than every split point is worth
REFUSED_LONG: dict[str, tuple[bytes, int]] = {
    "request line too long": (get(b"GET /" + b"a" * 1000 + b" HTTP/1.1"), 414),
    "request line without end": (b"GET /" + b"a" * 1100, 414),
    "request line by one": (get(b"GET /" + b"a" * (1001 - 14) + b" HTTP/1.1"), 414),
    "headers too long": (get(b"GET /g HTTP/1.1", b"X: " + b"y" * 2000), 431),
    "headers without end": (b"GET /g HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2100, 431),
    "headers by one": (get(b"GET /g HTTP/1.1", b"X: " + b"y" * (2001 - 16)), 431),
    "trailers too long": (CHUNKED + b"0\r\nX: " + b"y" * 2100 + b"\r\n\r\n", 400),
    "trailer without end": (CHUNKED + b"0\r\nX: " + b"y" * 2100, 400),
    "chunk size without end": (CHUNKED + b"1;" + b"y" * 300, 400),
    "extensions in many chunks": (CHUNKED + (b"1;" + b"e" * 250 + b"\r\na\r\n") * 80 + b"0\r\n\r\n", 400),
}  # fmt: skip

# name -> (bytes in, the bodies of the answers); the connection stays
SERVED: dict[str, tuple[bytes, list[bytes]]] = {
    "get": (get(), [b"GET /g? "]),
    "get with query": (get(b"GET /g?a=b?c HTTP/1.1"), [b"GET /g?a=b?c "]),
    "get with a body": (get(b"GET /g HTTP/1.1", b"Content-Length: 2") + b"ab", [b"GET /g? ab"]),
    "post": (post(b"Content-Length: 2", body=b"ab"), [b"POST /p? ab"]),
    "post of nothing": (post(b"Content-Length: 0"), [b"POST /p? "]),
    "post without length": (post(), [b"POST /p? "]),
    "length with zeros": (post(b"Content-Length: 002", body=b"ab"), [b"POST /p? ab"]),
    "length in white space": (post(b"Content-Length:\t 2 \t", body=b"ab"), [b"POST /p? ab"]),
    "body at the limit": (post(b"Content-Length: 2000", body=b"a" * 2000), [b"POST /p? " + b"a" * 2000]),
    "request line at the limit": (get(b"GET /" + b"a" * (1000 - 14) + b" HTTP/1.1"), [b"GET /" + b"a" * 986 + b"? "]),
    "headers at the limit": (get(b"GET /g HTTP/1.1", b"X: " + b"y" * (2000 - 16)), [b"GET /g? "]),
    "fields at the limit": (get(b"GET /g HTTP/1.1", *(b"X: y" for _ in range(9))), [b"GET /g? "]),
    "value with bytes over 127": (get(b"GET /g HTTP/1.1", b"X: \xff\xe9"), [b"GET /g? "]),
    "empty line before the request": (b"\r\n" + get(), [b"GET /g? "]),
    "empty line after the request": (get() + b"\r\n", [b"GET /g? "]),
    "absolute form": (get(b"GET http://b:80/g?q HTTP/1.1"), [b"GET /g?q "]),
    "absolute form without path": (get(b"GET HTTPS://b HTTP/1.1"), [b"GET /? "]),
    "absolute form of ipv6": (get(b"GET http://[::1]:80/g HTTP/1.1"), [b"GET /g? "]),
    "asterisk form": (get(b"OPTIONS * HTTP/1.1"), [b"OPTIONS *? "]),
    "host with port": (b"GET /g HTTP/1.1\r\nHost: a.b-c:8000\r\n\r\n", [b"GET /g? "]),
    "host of ipv6": (b"GET /g HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n", [b"GET /g? "]),
    "h2c offer ignored": (
        post(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"Content-Length: 2", body=b"ab"),
        [b"POST /p? ab"],
    ),
    "h2c offer, chunked": (
        post(b"Connection: upgrade", b"Upgrade: h2c", b"Transfer-Encoding: chunked", body=b"2\r\nab\r\n0\r\n\r\n"),
        [b"POST /p? ab"],
    ),
    "websocket ignored": (get(b"GET /g HTTP/1.1", b"Connection: Upgrade", b"Upgrade: websocket"), [b"GET /g? "]),
    "chunked": (CHUNKED + b"2\r\nab\r\nA\r\n0123456789\r\n0\r\n\r\n", [b"POST /p? ab0123456789"]),
    "chunked of nothing": (CHUNKED + b"0\r\n\r\n", [b"POST /p? "]),
    "chunked in capitals": (post(b"TRANSFER-ENCODING: Chunked", body=b"2\r\nab\r\n0\r\n\r\n"), [b"POST /p? ab"]),
    "chunk of 16 digits": (CHUNKED + b"0000000000000002\r\nab\r\n0000\r\n\r\n", [b"POST /p? ab"]),
    "chunk extension": (CHUNKED + b'2;a=b;c="d;e"\r\nab\r\n0;z\r\n\r\n', [b"POST /p? ab"]),
    "chunks with CRLF": (CHUNKED + b"4\r\n\r\n\r\n\r\n0\r\n\r\n", [b"POST /p? \r\n\r\n"]),
    "trailers": (CHUNKED + b"2\r\nab\r\n0\r\nX-Sum: 1\r\nContent-Length: 7\r\n\r\n", [b"POST /p? ab"]),
    "pipelined": (
        post(b"Content-Length: 2", body=b"ab") + CHUNKED + b"1\r\nc\r\n0\r\n\r\n" + get()
        + post(b"Content-Length: 1", body=b"d"),
        [b"POST /p? ab", b"POST /p? c", b"GET /g? ", b"POST /p? d"],
    ),
    "1.0 kept alive": (b"POST /p HTTP/1.0\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\na", [b"POST /p? a"]),
    "connection options": (get(b"GET /g HTTP/1.1", b"Connection: foo , bar"), [b"GET /g? "]),
    "unknown expectation": (post(b"Expect: cake", b"Content-Length: 1", body=b"a"), [b"POST /p? a"]),
}  # fmt: skip

LIMITS = {"max_request_line": 1000, "max_headers": 2000, "max_header_fields": 10, "max_body": 2000}


async def check_refused(rig: Rig, status: int, *pieces: bytes) -> None:
    client = await rig.client()
    await client.send(*pieces)
    answer = await client.answer()
    assert answer.status == status
    assert answer.headers[b"connection"] == b"close"
    assert answer.headers[b"content-type"] == b"application/json"
    assert answer.headers[b"x-should-retry"] == b"false"
    assert answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert await client.end() == (b"", "closed")
    await client.close()


async def check_served(rig: Rig, bodies: list[bytes], *pieces: bytes) -> None:
    client = await rig.client()
    await client.send(*pieces)
    for body in bodies:
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, body)
        assert b"connection" not in answer.headers or answer.headers[b"connection"] == b"keep-alive"
    assert await client.is_alive()
    await client.close()


def splits(data: bytes) -> list[tuple[bytes, ...]]:
    """The whole; every single split; byte by byte. Long inputs in fewer ways."""
    step = max(1, len(data) // 150)
    ways: list[tuple[bytes, ...]] = [(data,)]
    ways += [(data[:at], data[at:]) for at in range(1, len(data), step)]
    size = max(1, len(data) // 400)
    ways.append(tuple(data[at : at + size] for at in range(0, len(data), size)))
    return ways


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_LONG])
def test_refused(name: str) -> None:
    data, status = (REFUSED | REFUSED_LONG)[name]

    async def scenario(rig: Rig) -> None:
        await check_refused(rig, status, data)
        await check_refused(rig, status, *splits(data)[-1])
        assert not rig.handler.requests
        assert rig.server.refusals == {status: 2}

    serve(scenario, **LIMITS)


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("name", SERVED)
def test_served(name: str, later: bool) -> None:
    data, bodies = SERVED[name]

    async def scenario(rig: Rig) -> None:
        await check_served(rig, bodies, data)
        await check_served(rig, bodies, *splits(data)[-1])
        assert rig.server.refusals == {}

    serve(scenario, later=later, **LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [REFUSED, REFUSED_LONG], ids=["short", "long"])
def test_refused_at_every_split(rows: dict[str, tuple[bytes, int]]) -> None:
    async def scenario(rig: Rig) -> None:
        for data, status in rows.values():
            ways = splits(data)
            for at in range(0, len(ways), 32):
                await asyncio.gather(*(check_refused(rig, status, *way) for way in ways[at : at + 32]))
        assert not rig.handler.requests

    serve(scenario, **LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_served_at_every_split(later: bool) -> None:
    async def scenario(rig: Rig) -> None:
        for data, bodies in SERVED.values():
            ways = splits(data)
            for at in range(0, len(ways), 32):
                await asyncio.gather(*(check_served(rig, bodies, *way) for way in ways[at : at + 32]))

    serve(scenario, later=later, **LIMITS)


def random_request(rng: random.Random) -> tuple[bytes, bytes]:
    """A request and the body of its answer."""
    body = rng.randbytes(rng.choice([0, 1, 7, 100, 1500]))
    answer = b"POST /p? " + body
    if rng.random() < 0.5:
        return post(b"Content-Length: %d" % len(body), body=body), answer
    chunks = b""
    while body:
        size = rng.randint(1, len(body))
        chunks += b"%x%b\r\n%b\r\n" % (size, rng.choice([b"", b";x=y"]), body[:size])
        body = body[size:]
    return post(
        b"Transfer-Encoding: chunked", body=chunks + b"0\r\n" + rng.choice([b"", b"X: y\r\n"]) + b"\r\n"
    ), answer


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_any_split_of_any_pipeline(later: bool) -> None:
    """Bodies of random bytes: framing that is off by one anywhere shows."""
    rng = random.Random(11)

    async def scenario(rig: Rig) -> None:
        for _ in range(60):
            requests = [random_request(rng) for _ in range(rng.randint(1, 6))]
            data = b"".join(sent for sent, _ in requests)
            cuts = sorted(rng.sample(range(1, len(data)), rng.randint(0, 8)))
            pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
            await check_served(rig, [body for _, body in requests], *pieces)

    serve(scenario, later=later, **LIMITS)
