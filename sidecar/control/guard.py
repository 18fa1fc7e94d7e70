"""Access rules of the control API. Every request passes them, in this order:

- A request of a browser's page, by its Origin or Sec-Fetch-Site, is answered 403. No page is ours, and an operator's
  browser must not stop a model because of a page it shows.
- Without a token only this machine is answered. The peer's address must be loopback, else 403. Host must be a loopback
  name, else 421: a page whose own name was made to point to this machine (DNS rebinding) sends another.
- With a token every path but /healthz demands it, as `Authorization: Bearer TOKEN`.

Answers are never cached.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from gateway.shared.addresses import is_loopback
from gateway.shared.control.guard import BearerToken, Headers, names_loopback

HEALTH = "/healthz"
HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
KINDS = {401: "authentication_error", 403: "permission_error"}


def error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error as OpenAI's API words them, and the gateway."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "code": code}})
    return Response(body, status, headers, "application/json")


class ControlApiRules:
    """`token` None: only this machine is answered."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else BearerToken(token)

    def refusal(self, scope: Scope, given: Headers) -> Response | None:
        """The answer to a request that may not pass; None: it may."""
        if given.get(b"origin") or any(site != b"none" for site in given.get(b"sec-fetch-site", ())):
            return error(403, "cross_origin", "The sidecar answers no pages in browsers.")
        if self._token is None:
            host, _ = scope.get("client") or ("", 0)
            if not is_loopback(host):
                return error(403, "not_allowed", "Without a token_file the sidecar answers only its own machine.")
            if not names_loopback(given):
                message = "Without a token_file the sidecar answers only to localhost, 127.0.0.1 and [::1]."
                return error(421, "misdirected_request", message)
        elif scope["path"] != HEALTH and not self._token.shown(given):
            message = "The sidecar wants the token in its token_file: Authorization: Bearer TOKEN."
            return error(401, "invalid_api_key", message, {"www-authenticate": "Bearer"})
        return None
