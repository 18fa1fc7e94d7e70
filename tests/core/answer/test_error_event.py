"""Error event of a stream whose head is out, in the form that the route's clients read."""

from __future__ import annotations

import pytest
from openai.types.responses import ResponseFailedEvent

from gateway.core.answer.error_shape import error_event
from gateway.core.request.routes import ROUTES


def test_openais_clients_get_the_error_object_as_data() -> None:
    assert error_event(ROUTES[b"/v1/chat/completions"], b"{}") == b"data: {}\n\n"


def test_anthropics_clients_get_an_event_with_a_name() -> None:
    assert error_event(ROUTES[b"/v1/messages"], b"{}") == b"event: error\ndata: {}\n\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"why","code":"upstream_error"}}', "why"),
        (b'{"sorry":1}', "The stream ended before its last event."),
        (b"no JSON", "The stream ended before its last event."),
    ],
)
def test_a_response_fails_in_its_own_words_before_the_error(body: bytes, message: str) -> None:
    failed, error, rest = error_event(ROUTES[b"/v1/responses"], body).split(b"\n\n")
    assert (error, rest) == (b"data: " + body, b"")
    name, data = failed.split(b"\ndata: ")
    assert name == b"event: response.failed"
    event = ResponseFailedEvent.model_validate_json(data, strict=True)
    assert event.response.error is not None
    assert (event.response.status, event.response.error.code) == ("failed", "server_error")
    assert event.response.error.message == message
