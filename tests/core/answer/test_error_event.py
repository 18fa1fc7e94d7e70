"""Error event of a stream whose head is out, in the form that the route's clients read."""

from __future__ import annotations

import json

from gateway.core.answer.error_event import error_event
from gateway.core.request.outcome import error_body
from gateway.core.request.routes import ROUTES

BODY = error_body("no engine", "server_error", "server_is_overloaded")


def test_openais_clients_get_the_error_object_as_data() -> None:
    assert error_event(ROUTES[b"/v1/chat/completions"], BODY) == b"data: " + BODY + b"\n\n"


def test_anthropics_clients_get_an_event_with_a_name() -> None:
    event, data, *rest = error_event(ROUTES[b"/v1/messages"], BODY).decode().split("\n")
    assert (event, rest) == ("event: error", ["", ""])
    expected = {"type": "error", "error": {"type": "server_error", "message": "no engine"}}
    assert json.loads(data.removeprefix("data: ")) == expected
