"""Shape of an error: OpenAI's object, or Anthropic's for the clients of its routes, whole or as an event of a stream.

Everything below builds OpenAI's object. Here it becomes Anthropic's, by the status alone, on its way to the caller.

Source: Anthropic's "Errors" page of the Messages API.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gateway.core.request.outcome import Refused
from gateway.core.request.routes import Route

NO_END: Final = "The stream ended before its last event."
ANTHROPIC_PATH: Final = "/v1/messages"
# And all below it; also where a client's base URL has /v1 twice or not at all.
_is_anthropic: Final = re.compile("(?:/v1)*/messages(?:/.*)?").fullmatch

TYPES: Final = MappingProxyType({
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
})  # fmt: skip


class _Object(msgspec.Struct, frozen=True):
    message: str


class _Body(msgspec.Struct, frozen=True):
    error: _Object


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


def shaped(path: str, status: int, body: bytes) -> bytes:
    """`body`, which is OpenAI's error object, as the clients of the route at `path` read it."""
    if not _is_anthropic(path):
        return body
    type = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _encode({"error": {"type": type, "message": _decode(body).error.message}, "type": "error"})


def refusal_body(path: str, refused: Refused) -> bytes:
    """The body of a refusal on the route at `path`. A tenant's own refusal has the form that its policy gives it."""
    return refused.body() if refused.own is not None else shaped(path, refused.status, refused.body())


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
        message = NO_END
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
