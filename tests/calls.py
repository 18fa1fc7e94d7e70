"""Calls as the parser makes them, for tests of the layers behind it."""

from __future__ import annotations

from typing import Any

from gateway.core.admission.queues import Queues, Ticket
from gateway.core.request.call import Call
from gateway.core.request.routes import ROUTES


def a_call(**fields: Any) -> Call:
    """A plain chat call of model `m`; `fields` replace what matters to the test."""
    return Call(**{
        "request_id": "r", "route": ROUTES[b"/v1/chat/completions"], "model": "m", "tenant": "t",
        "class_name": "default", "arrived": 0.0, "deadline": 1000.0, "stream": False, "wants_usage": False,
        "max_tokens": None, "n": 1, "ascii_bytes": 0, "cjk_bytes": 0, "other_bytes": 0, "media": 0, "messages": 1,
        "prefix": (), "body": b"",
    } | fields)  # fmt: skip


def ahead(queues: Queues, call: Call, ticket: Ticket | None = None) -> float:
    """The tokens that go before a call, of all classes."""
    own, _ = queues.own_ahead(call, ticket)
    return queues.ahead(call.class_name, own)
