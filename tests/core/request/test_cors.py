"""CORS header lines, as a table."""

from __future__ import annotations

import pytest

from gateway.core.request.cors import EXPOSED, MAX_AGE, preflight, shared_lines

PAGE = "https://chat.example.com"
ASKS = {
    b"origin": PAGE.encode(),
    b"access-control-request-method": b"POST",
    b"access-control-request-headers": b"authorization, content-type,x-stainless-lang",
}
ALLOWED = b"access-control-allow-origin: https://chat.example.com\r\nvary: origin\r\n"
HOW = b"access-control-allow-methods: POST\r\naccess-control-max-age: %d\r\n" % MAX_AGE
NAMES = b"access-control-allow-headers: authorization, content-type,x-stainless-lang\r\n"
EXPOSE = b"access-control-expose-headers: %b\r\n" % EXPOSED
ANYONE = b"access-control-allow-origin: *\r\n"


def without(name: bytes) -> dict[bytes, bytes]:
    return {key: value for key, value in ASKS.items() if key != name}


@pytest.mark.parametrize(
    ("fields", "origins", "expected"),
    [
        (ASKS, [PAGE], ALLOWED + HOW + NAMES),
        (ASKS, ["http://a", PAGE], ALLOWED + HOW + NAMES),
        (ASKS, ["*"], ANYONE + HOW + NAMES),
        (ASKS, [], None),
        (ASKS, ["https://example.com", "https://chat.example.com:8443", "http://chat.example.com"], None),
        (ASKS | {b"origin": b"null"}, [PAGE], None),
        (ASKS | {b"origin": b"https://chat.example.com.evil.example"}, [PAGE], None),
        (ASKS | {b"origin": b"\xe9\xff"}, [PAGE], None),
        (without(b"origin"), ["*"], None),
        (without(b"access-control-request-method"), [PAGE], None),
        (without(b"access-control-request-headers"), [PAGE], ALLOWED + HOW),
        (ASKS | {b"access-control-request-headers": b"x: y"}, [PAGE], ALLOWED + HOW),
        (ASKS | {b"access-control-request-headers": b"x," * 4000}, [PAGE], ALLOWED + HOW),
    ],
)
def test_preflights(fields: dict[bytes, bytes], origins: list[str], expected: bytes | None) -> None:
    assert preflight(fields, origins, ("POST",)) == expected


@pytest.mark.parametrize(
    ("fields", "origins", "expected"),
    [
        (ASKS, [PAGE], ALLOWED + EXPOSE),
        (ASKS, ["*"], ANYONE + EXPOSE),
        (ASKS, [], b""),
        (ASKS, ["https://other.example"], b"vary: origin\r\n"),
        ({}, [PAGE], b"vary: origin\r\n"),
        ({}, ["*"], b""),
    ],
)
def test_every_answer(fields: dict[bytes, bytes], origins: list[str], expected: bytes) -> None:
    assert shared_lines(fields, origins) == expected
