"""Cross-origin requests, as browsers make them (the Fetch standard): the header lines that let a page read an answer.

Only pages of the policy's origins are let in, and never with cookies: calls carry their key in a header. Nothing here
protects the data port from anything but a browser; a program sends what it likes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ALL = "*"
MAX_AGE = 600  # seconds a browser may go on without asking again
# What a page may read of an answer's headers, beside the few that every page may.
EXPOSED = (
    b"x-request-id, x-trace-id, x-weir-engine, x-weir-class, x-weir-queue-ms, x-weir-reason, link, "
    b"retry-after, retry-after-ms, x-should-retry"
)
_NAMES = re.compile(rb"[A-Za-z0-9-]{1,64}(?: ?, ?[A-Za-z0-9-]{1,64}){0,63}")


def preflight(fields: Mapping[bytes, bytes], origins: Sequence[str], methods: Sequence[str]) -> bytes | None:
    """The lines that answer an OPTIONS request whose headers are `fields`, or None: it asks nothing, or not for us."""
    allowed = _allowed(fields, origins)
    if not allowed or b"access-control-request-method" not in fields:
        return None
    lines = allowed + b"access-control-allow-methods: %b\r\naccess-control-max-age: %d\r\n" % (
        ", ".join(methods).encode(),
        MAX_AGE,
    )
    # Whatever names are asked for may be sent: clients bring their own (x-stainless-*), and `*` leaves out the key's.
    names = fields.get(b"access-control-request-headers", b"")
    if _NAMES.fullmatch(names):
        lines += b"access-control-allow-headers: %b\r\n" % names
    return lines


def shared_lines(fields: Mapping[bytes, bytes], origins: Sequence[str]) -> bytes:
    """The lines that every answer carries where the policy names origins, whoever asks; none where it does not."""
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
