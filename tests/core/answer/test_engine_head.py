"""What the head of an engine's answer says of its body, and of when to come again."""

from __future__ import annotations

import pytest

from gateway.core.answer.engine_head import AGAIN_AT_MOST, retry_after, retry_after_line, wrong_body
from gateway.core.request.routes import ROUTES
from tests.calls import a_call

NOW = b"Thu, 26 Nov 2026 09:00:00 GMT"


@pytest.mark.parametrize(
    ("path", "stream", "type", "length", "wrong"),
    [
        ("/v1/chat/completions", False, b"application/json", 9, ""),
        ("/v1/chat/completions", False, b"Application/JSON; charset=utf-8", None, ""),
        ("/v1/chat/completions", False, b"text/html; charset=utf-8", 9, "'text/html' instead of JSON"),
        ("/v1/chat/completions", False, b" TEXT/Plain", None, "'text/plain' instead of JSON"),
        ("/v1/chat/completions", False, b"text/event-stream", None, "instead of JSON"),
        ("/v1/chat/completions", False, None, 9, ""),
        ("/v1/chat/completions", False, b"application/json", 0, "without a body"),
        ("/v1/chat/completions", True, b"text/event-stream; charset=utf-8", None, ""),
        ("/v1/chat/completions", True, b"application/json", 9, "'application/json' instead of an event stream"),
        ("/v1/chat/completions", True, b"text/html", None, "instead of an event stream"),
        ("/v1/chat/completions", True, None, None, ""),
        ("/v1/chat/completions", True, b"x\xff" * 99, None, "\\xff"),
        ("/v1/embeddings", False, b"application/octet-stream", 9, ""),
        ("/v1/audio/transcriptions", False, b"text/plain; charset=utf-8", 9, ""),
        ("/v1/audio/transcriptions", False, b"text/vtt", 9, ""),
        ("/v1/audio/transcriptions", True, b"text/event-stream", None, ""),
        ("/v1/audio/transcriptions", True, b"text/html", None, "instead of an event stream"),
        ("/tokenize", False, b"text/html", None, "instead of JSON"),
    ],
)
def test_which_answers_are_not_the_engines(
    path: str, stream: bool, type: bytes | None, length: int | None, wrong: str
) -> None:
    call = a_call(route=ROUTES[path.encode()], stream=stream)
    found = wrong_body(call, {} if type is None else {b"content-type": type}, length)
    assert bool(found) == bool(wrong)
    assert wrong in found
    assert found.isascii()
    assert len(found) < 300


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
        (b"Thu, 26 Nov 2026 09:00:30 GMT", None, None),
        (b"Thu, 26 Nov 2026 09:00:30 GMT", b"yesterday", None),
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
    assert retry_after_line(found) == (b"" if seconds is None else b"retry-after: %d\r\n" % seconds)
