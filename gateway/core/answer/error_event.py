"""Error event of a stream whose head is out: the last that a client reads of it."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.core.request.routes import Route


class _Error(msgspec.Struct, frozen=True):
    message: str = "The stream ended before its last event."


class _Body(msgspec.Struct, frozen=True):
    error: _Error = _Error()


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


def error_event(route: Route, body: bytes) -> bytes:
    """The event of `body`, which has the shape of the route's errors. Anthropic's clients read only events that have a
    name, so theirs is named. In a stream of the Responses API `response.failed` goes before, which Codex shows; clients
    that raise errors raise the second."""
    event = b"%bdata: %b\n\n" % (b"event: error\n" if route.kind == "message" else b"", body)
    return event if route.kind != "response" else b"event: response.failed\ndata: %b\n\n%b" % (_failed(body), event)


def _failed(body: bytes) -> bytes:
    """The data of `response.failed`. Of the response nothing was kept but the error; a tenant's own refusal, which may
    have any form, is told by what follows alone."""
    try:
        message = _decode(body).error.message
    except msgspec.DecodeError:
        message = _Error().message
    response: dict[str, Any] = {
        "id": "",
        "object": "response",
        "created_at": 0,
        "status": "failed",
        "error": {"code": "server_error", "message": message},
        "incomplete_details": None,
        "model": "",
        "output": [],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
    return _encode({"type": "response.failed", "sequence_number": 0, "response": response})
