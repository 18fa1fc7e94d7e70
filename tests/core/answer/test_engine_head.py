"""Content types of good answers: those of engines pass, others are of something in their place."""

from __future__ import annotations

import pytest

from gateway.core.answer.engine_head import wrong_body
from gateway.core.request.routes import ROUTES
from tests.calls import a_call


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
    found = wrong_body(call, 200, {} if type is None else {b"content-type": type}, length)
    assert bool(found) == bool(wrong)
    assert wrong in found
    assert found.isascii()
    assert len(found) < 300


@pytest.mark.parametrize(
    ("status", "coding", "wrong"),
    [
        (201, None, ""),
        (204, None, "it answered 204 without a body"),
        (205, None, "it answered 205 without a body"),
        (200, b"Identity", ""),
        (200, b"gzip", "it answered 200 compressed ('gzip'), which was not asked for"),
        (200, b"identity, br", "it answered 200 compressed ('identity, br'), which was not asked for"),
    ],
)
def test_an_answer_that_no_client_could_read_is_none(status: int, coding: bytes | None, wrong: str) -> None:
    headers = {b"content-type": b"application/json"} | ({} if coding is None else {b"content-encoding": coding})
    assert wrong_body(a_call(), status, headers, None) == wrong
