"""Trace context of a request: `traceparent` and `tracestate` (W3C Trace Context, levels 1 and 2)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

# version "-" trace-id "-" parent-id "-" flags; versions above 00 may have more after another dash. A comma joins the
# values of a repeated header.
_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[ -+\--~]*)?"
)
_SAMPLED = 0x01


class TraceParent(msgspec.Struct, frozen=True):
    """The caller's span, by hexadecimal ids. `sampled`: the caller records its own part."""

    trace_id: str
    span_id: str
    sampled: bool


def trace_parent(fields: Mapping[bytes, bytes]) -> TraceParent | None:
    """Return the span that a request belongs to, by its headers. None where it has no `traceparent`, more than one, or
    a malformed one. Such a header starts no trace and is shown nowhere."""
    found = _TRACEPARENT.fullmatch(fields.get(b"traceparent", b""))
    if found is None or (found[1] == b"00" and found[5] is not None):
        return None
    return TraceParent(found[2].decode(), found[3].decode(), bool(int(found[4], 16) & _SAMPLED))


def parent_line(trace_id: str, span_id: str, *, sampled: bool) -> bytes:
    """The header line that makes a span the parent of what an engine records."""
    return b"traceparent: 00-%b-%b-0%d\r\n" % (trace_id.encode(), span_id.encode(), sampled)
