"""Error event of a stream whose head is out, in the form that the route's clients read."""

from __future__ import annotations

from gateway.core.answer.error_event import error_event
from gateway.core.request.routes import ROUTES


def test_openais_clients_get_the_error_object_as_data() -> None:
    assert error_event(ROUTES[b"/v1/chat/completions"], b"{}") == b"data: {}\n\n"


def test_anthropics_clients_get_an_event_with_a_name() -> None:
    assert error_event(ROUTES[b"/v1/messages"], b"{}") == b"event: error\ndata: {}\n\n"
