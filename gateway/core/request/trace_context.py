"""Trace context of a request (W3C Trace Context, level 1 and 2): the trace's id, strictly read."""

from __future__ import annotations

import re
from collections.abc import Iterable

# version "-" trace-id "-" parent-id "-" flags; a version above 00 may have more behind a dash.
_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~ ]*)?")


def trace_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id in a request's one `traceparent`, 32 hexadecimal digits; empty where there is none, more than one, or one
    that is malformed. Such a header starts no trace, and is not for anybody to see."""
    given = [value for name, value in headers if name == b"traceparent"]
    found = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    if found is None or (found[1] == b"00" and found[3] is not None):
        return ""
    return found[2].decode()
