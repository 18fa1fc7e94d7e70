"""Who may use the control port. Every request passes here, in this order:

- Without an admin token (the port is then on loopback) the Host must be a loopback name: a page whose own name was made
  to point to this machine (DNS rebinding) is answered 421.
- What a page of another origin asks, as its browser says in Origin and Sec-Fetch-Site, is answered 403. Browsers send
  Origin with every POST and DELETE, so no page can drain a gateway from an operator's browser.
- A key of the data port, in `Authorization` or `x-api-key`, is answered 403: users have no business here.
- With an admin token every path demands it, as `Authorization: Bearer TOKEN`. Only the dashboard's page itself, which
  holds nothing but markup, is given without: a browser cannot send a header with the address a person types. And
  sidecars show a token of their own where they report, see reports.py.

Answers are never cached and cannot be embedded in another origin's page.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.core.request.outcome import error_body
from gateway.shared.control.listener import is_loopback_name
from gateway.shared.protocol import REPORT_PATH

JSON = "application/json"
PAGE = "/"
HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
]


def error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error in the words of every other error of ours."""
    kind = {401: "authentication_error", 403: "permission_error"}.get(status, "invalid_request_error")
    return Response(error_body(message, kind, code), status, headers, JSON)


class Guard:
    """Compares digests of tokens, so that time tells neither their content nor their length."""

    def __init__(self, app: ASGIApp, token: str | None, is_user_key: Callable[[str], bool]) -> None:
        self._app = app
        self._wanted = None if token is None else hashlib.sha256(token.encode()).digest()
        self._is_user_key = is_user_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, hardened)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refusal(scope, receive, hardened)

    def _refusal(self, scope: Scope) -> Response | None:
        given: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            given.setdefault(name, []).append(value)
        page = scope["path"] == PAGE and scope.get("method") in {"GET", "HEAD"}
        if self._wanted is None and not all(map(_is_local, given.get(b"host", ()))):
            return error(
                421,
                "misdirected_request",
                "Without an admin token the control port answers only to loopback names: localhost, 127.0.0.1, [::1].",
            )
        if not _same_origin(given, page):
            return error(403, "cross_origin", "The control port answers no pages of other origins.")
        if any(map(self._is_user_key, _keys(given))):
            return error(403, "not_allowed", "Users' keys are for the data port. The control port is for operators.")
        reports = scope["path"] == REPORT_PATH
        if self._wanted is not None and not (page or reports) and not self._has_token(given):
            message = "The control port wants the admin token: Authorization: Bearer TOKEN."
            return error(401, "invalid_api_key", message, {"www-authenticate": "Bearer"})
        return None

    def _has_token(self, given: dict[bytes, list[bytes]]) -> bool:
        lines = given.get(b"authorization", [])
        scheme, _, token = lines[0].partition(b" ") if len(lines) == 1 else (b"", b"", b"")
        matches = hmac.compare_digest(hashlib.sha256(token).digest(), self._wanted or b"")
        return matches and scheme.lower() == b"bearer"


def _is_local(host: bytes) -> bool:
    name = host.decode("latin-1")
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return is_loopback_name(name)


def _same_origin(given: dict[bytes, list[bytes]], page: bool) -> bool:
    """Whether the request is from no page at all or from a page of ours. A link elsewhere may lead to our page."""
    host = given.get(b"host", [b""])[0].lower()
    if any(origin.partition(b"://")[2].lower() != host for origin in given.get(b"origin", ())):
        return False
    return page or all(site in {b"same-origin", b"none"} for site in given.get(b"sec-fetch-site", ()))


def _keys(given: dict[bytes, list[bytes]]) -> list[str]:
    """Whatever of a request the data port would take for a key."""
    bearers = [value.partition(b" ") for value in given.get(b"authorization", ())]
    keys = [token or scheme for scheme, _, token in bearers]
    return [key.strip().decode("latin-1") for key in (*keys, *given.get(b"x-api-key", ()))]
