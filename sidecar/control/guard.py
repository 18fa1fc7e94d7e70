"""Who may use the control API. Every request passes here, in this order:

- What a browser's page asks, as Origin and Sec-Fetch-Site tell, is answered 403: no page is ours, and an operator's
  browser must not stop a model because of what it shows.
- Without a token only this machine is answered: the peer's address must be loopback, and Host a loopback name, as a
  page whose own name was made to point to this machine (DNS rebinding) sends another. Else 403 and 421.
- With a token every path but /healthz demands it, as `Authorization: Bearer TOKEN`.

Answers are never cached.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.core.addresses import is_loopback

HEALTH = "/healthz"
HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
KINDS = {401: "authentication_error", 403: "permission_error"}


def error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error as OpenAI's API words them, and the gateway."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "code": code}})
    return Response(body, status, headers, "application/json")


class Guard:
    """Compares digests of tokens, so that time tells neither their content nor their length."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._wanted = None if token is None else hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif refusal is None:
            await self._app(scope, receive, hardened)
        else:
            await refusal(scope, receive, hardened)

    def _refusal(self, scope: Scope) -> Response | None:
        given: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            given.setdefault(name, []).append(value)
        if given.get(b"origin") or any(site != b"none" for site in given.get(b"sec-fetch-site", ())):
            return error(403, "cross_origin", "The sidecar answers no pages in browsers.")
        if self._wanted is None:
            host, _ = scope.get("client") or ("", 0)
            if not is_loopback(host):
                return error(403, "not_allowed", "Without a token_file the sidecar answers only its own machine.")
            if not all(map(_is_local, given.get(b"host", ()))):
                message = "Without a token_file the sidecar answers only to localhost, 127.0.0.1 and [::1]."
                return error(421, "misdirected_request", message)
        elif scope["path"] != HEALTH and not self._has_token(given):
            message = "The sidecar wants the token in its token_file: Authorization: Bearer TOKEN."
            return error(401, "invalid_api_key", message, {"www-authenticate": "Bearer"})
        return None

    def _has_token(self, given: dict[bytes, list[bytes]]) -> bool:
        lines = given.get(b"authorization", [])
        scheme, _, token = lines[0].partition(b" ") if len(lines) == 1 else (b"", b"", b"")
        matches = hmac.compare_digest(hashlib.sha256(token).digest(), self._wanted or b"")
        return matches and scheme.lower() == b"bearer"


def _is_local(host: bytes) -> bool:
    name = host.decode("latin-1")
    return is_loopback(name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0])
