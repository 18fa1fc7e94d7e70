"""Head of an engine's answer: whether its body can be the one asked for, and when to come again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from gateway.core.request.call import Call

EVENTS = b"text/event-stream"
SHOWN = 60  # characters of a content type
AGAIN_AT_MOST = 24 * 3600  # seconds


def wrong_body(call: Call, headers: Mapping[bytes, bytes], length: int | None) -> str:
    """What is wrong with the body of a good answer, judged by its head; empty: nothing.

    A stream is `text/event-stream`. Any other answer is JSON, or bytes that the caller asked for: a page or plain text
    is of something else that answers in the engine's place. Transcripts may be plain text. An answer that does not tell
    its type is passed on.
    """
    if length == 0:
        return "it answered 200 without a body"
    found = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if not found or (found == EVENTS if call.stream else call.route.form or not found.startswith(b"text/")):
        return ""
    due = "an event stream" if call.stream else "JSON"
    return f"it answered 200 with {found[:SHOWN].decode('latin-1')!a} instead of {due}"


def retry_after(headers: Mapping[bytes, bytes]) -> int | None:
    """Seconds until the engine can do more, at most AGAIN_AT_MOST; None: it does not say, or not in a known form.

    A date is compared with the answer's own Date, so the clocks of the two machines need not agree.
    Source: RFC 9110, 10.2.3 and 5.6.7 (IMF-fixdate alone).
    """
    told = headers.get(b"retry-after", b"")
    if told.isdigit() and len(told) <= SHOWN:
        return min(int(told), AGAIN_AT_MOST)
    then, now = _date(told), _date(headers.get(b"date", b""))
    if then is None or now is None:
        return None
    return min(max(0, int((then - now).total_seconds())), AGAIN_AT_MOST)


def retry_after_line(seconds: int | None) -> bytes:
    """The answer's line; empty for None."""
    return b"" if seconds is None else b"retry-after: %d\r\n" % seconds


def _date(value: bytes) -> datetime | None:
    try:
        return datetime.strptime(value.decode("latin-1"), "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    except ValueError:
        return None
