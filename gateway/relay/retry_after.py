"""Retry-After of an engine, passed on in seconds: an engine knows best when it can do more."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

LONGEST = 60  # characters of a number
AGAIN_AT_MOST = 24 * 3600  # seconds


def retry_after(headers: Mapping[bytes, bytes]) -> int | None:
    """Seconds until the engine can do more, at most AGAIN_AT_MOST; None: it does not say, or not in a known form.

    A date is compared with the answer's own Date, so the clocks of the two machines need not agree; with our own clock
    where the answer has none.
    Source: RFC 9110, 10.2.3 and 5.6.7 (IMF-fixdate alone).
    """
    told = headers.get(b"retry-after", b"")
    if told.isdigit() and len(told) <= LONGEST:
        return min(int(told), AGAIN_AT_MOST)
    then = _date(told)
    if then is None:
        return None
    now = _date(headers.get(b"date", b"")) or datetime.now(UTC)
    return min(max(0, int((then - now).total_seconds())), AGAIN_AT_MOST)


def retry_lines(status: int, seconds: int | None) -> bytes:
    """Lines of an engine's error that say when to come again. SDKs would repeat a call for any status from 500 on."""
    if status == 501:
        return b"x-should-retry: false\r\n"
    return b"" if seconds is None else b"retry-after: %d\r\n" % seconds


def _date(value: bytes) -> datetime | None:
    try:
        return datetime.strptime(value.decode("latin-1"), "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    except ValueError:
        return None
