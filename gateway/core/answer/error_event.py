"""Error event of a stream whose head is out: the last that a client reads of it."""

from __future__ import annotations

from gateway.core.request.routes import Route


def error_event(route: Route, body: bytes) -> bytes:
    """The event of `body`, which has the shape of the route's errors. Anthropic's clients read only events that have a
    name, so theirs is named."""
    return b"%bdata: %b\n\n" % (b"event: error\n" if route.kind == "message" else b"", body)
