"""Heads whose like is known are read as a parser reads them: the same request or the same refusal."""

from __future__ import annotations

import random

from gateway.relay.wire.http1 import HeadReader, KnownHeads
from gateway.relay.wire.messages import ServerSettings, WireError
from tests.wire.test_server_table import REFUSED, SERVED

SETTINGS = ServerSettings(max_body=1000)
LENGTHS = (b"0", b"7", b"07", b"652", b"653", b"1000", b"1001", b"99999999999999999999", b"", b"+7", b"7 ", b"7,7")
LINES = (b"content-length: ", b"Content-Length: ", b"CONTENT-LENGTH: ", b"Content-Length:", b"X-Length: ")
ENDS = (b"", b"X-Length: 5\r\n", b"Connection: close\r\n", b"content-length: 7\r\n", b"Transfer-Encoding: chunked\r\n")


def heads() -> list[bytes]:
    """Heads that are alike but for lengths, spellings and what stands beside them."""
    return [
        b"POST /p?q=1 HTTP/1.1\r\nHost: a\r\n%b%b%b\r\n%b\r\n" % (before, line, digits, end)
        for line in LINES
        for end in ENDS
        for before in (b"", b"x-length: 5\r\n")
        for digits in LENGTHS
    ] + [data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" for data, _ in (*REFUSED.values(), *SERVED.values())]


def read(head: bytes, known: KnownHeads) -> object:
    try:
        request = HeadReader(SETTINGS, known).read(head)
    except WireError as error:
        return error.status, error.message
    return (
        (request.method, request.path, request.query, request.fields),
        (request.minor, request.length, request.keep_alive, request.expects),
    )


def test_a_known_head_is_read_as_an_unknown_one() -> None:
    known, rng = KnownHeads(), random.Random(1)
    all_ = heads() * 2
    rng.shuffle(all_)
    for head in all_:
        assert read(head, known) == read(head, KnownHeads()), head


def test_a_request_owns_its_fields() -> None:
    head = b"POST /p HTTP/1.1\r\nHost: a\r\nToken: t\r\nContent-Length: 5\r\n\r\n"
    reader = HeadReader(SETTINGS, KnownHeads())
    for _ in range(3):
        request = reader.read(head)
        reader.skip(b"hello")
        assert request.fields.pop(b"token") == b"t"


def test_what_is_kept_is_bounded() -> None:
    known = KnownHeads()
    for number in range(2000):
        read(b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n" % number, known)
        read(b"POST /%d HTTP/1.1\r\nHost: %b\r\nContent-Length: 5\r\n\r\n" % (number, b"a" * 1024), known)
    assert len(known) <= 256
