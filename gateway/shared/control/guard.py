"""Guard of a control port: every request passes its rules first, and every answer gets its headers.

The rules are the port's own (`gateway.control.guard`, `sidecar.control.api`). Shared are the parts that must be right
in both: which token a request shows, and that a Host is judged without its port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.shared.addresses import is_loopback
from gateway.shared.tokens import AcceptedTokens

Headers = Mapping[bytes, Sequence[bytes]]


class Guard(msgspec.Struct, frozen=True):
    """Middleware. No control port has websockets: their handshakes are refused."""

    app: ASGIApp
    refusal: Callable[[Scope, Headers], Response | None]  # of a request that may not pass; None: the request may
    headers: Sequence[tuple[bytes, bytes]]  # added to every answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self.headers]
            await send(message)

        refusal = self.refusal(scope, _grouped(scope))
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif refusal is None:
            await self.app(scope, receive, hardened)
        else:
            await refusal(scope, receive, hardened)


def shows(given: Headers, tokens: AcceptedTokens) -> bool:
    """Whether the request has exactly one header `Authorization: Bearer TOKEN`, with one of these tokens."""
    lines = given.get(b"authorization", ())
    scheme, _, token = lines[0].partition(b" ") if len(lines) == 1 else (b"", b"", b"")
    return tokens.accepts(token) and scheme.lower() == b"bearer"


def names_loopback(given: Headers) -> bool:
    """Whether every Host is a loopback name: a page whose own name was made to point to this machine (DNS rebinding)
    sends another."""
    return all(map(_is_local, given.get(b"host", ())))


def _is_local(host: bytes) -> bool:
    name = host.decode("latin-1")
    return is_loopback(name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0])


def _grouped(scope: Scope) -> Headers:
    given: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        given.setdefault(name, []).append(value)
    return given
