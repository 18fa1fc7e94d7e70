"""Trace id of a request, from its `traceparent` header (W3C Trace Context, levels 1 and 2)."""

from __future__ import annotations

import re
from collections.abc import Iterable

# version "-" trace-id "-" parent-id "-" flags; versions above 00 may have more after another dash.
_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~ ]*)?")


def trace_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The trace id of a request, 32 hexadecimal digits. Empty where it has no `traceparent`, more than one, or a
    malformed one. Such a header starts no trace and is shown nowhere."""
    given = [value for name, value in headers if name == b"traceparent"]
    found = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    if found is None or (found[1] == b"00" and found[3] is not None):
        return ""
    return found[2].decode()
