"""Retry-After of an engine, in each form that it may have."""

from __future__ import annotations

import pytest

from gateway.relay.retry_after import AGAIN_AT_MOST, retry_after, retry_lines

NOW = b"Thu, 26 Nov 2026 09:00:00 GMT"


@pytest.mark.parametrize(
    ("told", "date", "seconds"),
    [
        (b"7", None, 7),
        (b"0", None, 0),
        (b"86401", None, AGAIN_AT_MOST),
        (b"9" * 60, None, AGAIN_AT_MOST),
        (b"9" * 61, None, None),
        (b"Thu, 26 Nov 2026 09:00:30 GMT", NOW, 30),
        (b"Thu, 26 Nov 2026 08:59:30 GMT", NOW, 0),
        (b"Fri, 31 Dec 9999 23:59:59 GMT", NOW, AGAIN_AT_MOST),
        (b"Fri, 31 Dec 9999 23:59:59 GMT", None, AGAIN_AT_MOST),  # without a date by which to read it, by our clock
        (b"Fri, 31 Dec 9999 23:59:59 GMT", b"yesterday", AGAIN_AT_MOST),
        (b"Fri, 31 Dec 1999 23:59:59 GMT", None, 0),
        (b"Thu, 26 Nov 2026 09:00:30 +0100", NOW, None),
        (b"Thu, 66 Nov 2026 09:00:30 GMT", NOW, None),
        (b"-1", NOW, None),
        (b"1.5", NOW, None),
        (b"\xb2", NOW, None),
        (b"", NOW, None),
        (None, NOW, None),
    ],
)
def test_when_to_come_again(told: bytes | None, date: bytes | None, seconds: int | None) -> None:
    headers = {b"retry-after": told, b"date": date}
    found = retry_after({name: value for name, value in headers.items() if value is not None})
    assert found == seconds
    assert retry_lines(503, found) == (b"" if seconds is None else b"retry-after: %d\r\n" % seconds)
