"""Error event of a stream whose head is out: the last that a client reads of it."""

from __future__ import annotations

import msgspec

from gateway.core.request.routes import Route


class _Object(msgspec.Struct, frozen=True):
    type: str = "api_error"
    message: str = ""


class _Body(msgspec.Struct, frozen=True):
    error: _Object


class _Message(msgspec.Struct, frozen=True):
    error: _Object
    type: str = "error"


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


def error_event(route: Route, body: bytes) -> bytes:
    """The event of `body`, which is OpenAI's error object. Anthropic's clients read only events that have a name, so
    theirs is named, and has Anthropic's form."""
    if route.kind != "message":
        return b"data: %b\n\n" % body
    return b"event: error\ndata: %b\n\n" % _encode(_Message(_decode(body).error))
