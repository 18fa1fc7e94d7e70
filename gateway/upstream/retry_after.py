"""Time that a server asks its callers to stay away for: the header Retry-After."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime

from gateway.core.engines.breaker import LONGEST_PAUSE


def pause_of(header: bytes, wall: float) -> float:
    """Return the seconds that a Retry-After asks for: a number, or a date (RFC 9110, 10.2.3); 0: none that is
    understood. `wall`: Unix time."""
    text = header.decode("latin-1").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return min(LONGEST_PAUSE, float(text))
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return min(LONGEST_PAUSE, max(0.0, at.timestamp() - wall))
