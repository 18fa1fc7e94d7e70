"""CORS (cross-origin resource sharing): header lines that let a web page read an answer.

Only pages of the policy's origins are let in. They are never let in with cookies, since calls carry their key in a
header. CORS protects the data port from browsers only: other programs send whatever they like.

Source: the Fetch standard, https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ALL = "*"
MAX_AGE = 600  # seconds for which a browser may cache the answer to a preflight
# Answer headers that a page may read, beside the few that every page may.
EXPOSED = (
    b"x-request-id, x-trace-id, x-weir-engine, x-weir-model, x-weir-class, x-weir-queue-ms, x-weir-reason, "
    b"x-weir-estimated, link, retry-after, retry-after-ms, x-should-retry"
)
_NAMES = re.compile(rb"[A-Za-z0-9-]{1,64}(?: ?, ?[A-Za-z0-9-]{1,64}){0,63}")


def preflight(fields: Mapping[bytes, bytes], origins: Sequence[str], methods: Sequence[str]) -> bytes | None:
    """Header lines that answer a preflight (OPTIONS) request with the headers `fields`.

    None where it is no preflight, or where its origin is not in `origins`.
    """
    allowed = _allowed(fields, origins)
    if not allowed or b"access-control-request-method" not in fields:
        return None
    lines = allowed + b"access-control-allow-methods: %b\r\naccess-control-max-age: %d\r\n" % (
        ", ".join(methods).encode(),
        MAX_AGE,
    )
    # Every name asked for is allowed: clients add their own (x-stainless-*), and `*` does not cover `authorization`.
    names = fields.get(b"access-control-request-headers", b"")
    if _NAMES.fullmatch(names):
        lines += b"access-control-allow-headers: %b\r\n" % names
    return lines


def shared_lines(fields: Mapping[bytes, bytes], origins: Sequence[str]) -> bytes:
    """Header lines of an ordinary answer; none where the policy names no origins."""
    if not origins:
        return b""
    allowed = _allowed(fields, origins)
    return allowed + b"access-control-expose-headers: %b\r\n" % EXPOSED if allowed else _vary(origins)


def _allowed(fields: Mapping[bytes, bytes], origins: Sequence[str]) -> bytes:
    origin = fields.get(b"origin")
    if origin is None:
        return b""
    if ALL in origins:
        return b"access-control-allow-origin: *\r\n"
    if origin.decode("latin-1") not in origins:
        return b""
    return b"access-control-allow-origin: %b\r\n%b" % (origin, _vary(origins))


def _vary(origins: Sequence[str]) -> bytes:
    return b"" if ALL in origins else b"vary: origin\r\n"
