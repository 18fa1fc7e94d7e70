"""Requests as a data port hands them over, without a socket: made, counted, and left by their clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.core.request.body_memory import BodyLease, BodyMemory
from gateway.relay.wire.messages import Request
from gateway.relay.wire.responder import Responder


def posted(path: bytes, fields: Mapping[bytes, bytes], body: bytes, now: float) -> Request:
    """A request with its whole body, which came at this loop time."""
    return Request(b"POST", path, b"", dict(fields), 1, len(body), True, body=body, peer="127.0.0.1", at=now)


def full(request: Request, bodies: BodyMemory) -> bool:
    """Count its body, as the data port does, but a small one too. Whether there is no room for it."""
    request.held = BodyLease(bodies, request.owner or request.peer)
    return bool(request.held.resize(len(request.body)))


def leaving(responder: Responder) -> Callable[[], None]:
    """The leaving of its client, which does nothing once it has its answer."""

    def leave() -> None:
        if not responder.closed:
            responder.left("client_gone")

    return leave
