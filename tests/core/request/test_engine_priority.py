"""Priority in a request to an engine: where each kind of route has it."""

from __future__ import annotations

import json

import pytest

from gateway.core.request.engine_priority import with_priority
from gateway.core.request.routes import ROUTES

LINES = b"x-request-id: 1\r\n"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/rerank"])
def test_a_body_says_it(path: str) -> None:
    headers, body = with_priority(LINES, b'{"model": "m", "priority": null} \n', ROUTES[path.encode()], 3)
    assert (headers, json.loads(body)) == (LINES, {"model": "m", "priority": 3})


def test_a_message_has_it_in_a_header() -> None:
    body = b'{"model":"m"}'
    assert with_priority(LINES, body, ROUTES[b"/v1/messages"], 2) == (LINES + b"x-vllm-priority: 2\r\n", body)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/tokenize"])
def test_what_no_scheduler_sees_has_none(path: str) -> None:
    assert with_priority(LINES, b"...}", ROUTES[path.encode()], 2) == (LINES, b"...}")
