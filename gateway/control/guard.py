"""Access rules of the control port. Every request passes them, in this order:

- Without an admin token (the port is then on loopback) the Host must be a loopback name: a page whose own name was made
  to point to this machine (DNS rebinding) is answered 421.
- What a page of another origin asks, as its browser says in Origin and Sec-Fetch-Site, is answered 403. Browsers send
  Origin with every POST and DELETE, so no page can drain a gateway from an operator's browser.
- A key of the data port, in `Authorization` or `x-api-key`, is answered 403: users have no business here.
- With an admin token every path demands it, as `Authorization: Bearer TOKEN`. Only the console's own files, which
  hold nothing but markup, style and script, are given without: a browser cannot send a header with the address a person
  types, nor with what a page loads. And sidecars show a token of their own where they report, see app.py.

Answers are never cached and cannot be embedded in another origin's page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.responses import Response
from starlette.types import Scope

from gateway.core.request.outcome import error_body
from gateway.shared.control.guard import Headers, names_loopback, shows
from gateway.shared.protocol import REPORT_PATH
from gateway.shared.tokens import AcceptedTokens

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


class ControlPortRules:
    """`tokens` empty: the port is on loopback. `is_user_key` knows the data port's keys. `files`: paths of the
    console's own files."""

    def __init__(
        self, tokens: AcceptedTokens, is_user_key: Callable[[str], bool], files: Collection[str] = (PAGE,)
    ) -> None:
        self._tokens, self._guarded = tokens, bool(tokens)
        self._is_user_key = is_user_key
        self._files = files

    def refusal(self, scope: Scope, given: Headers) -> Response | None:
        """Answer to a request that is refused; None: the request passes."""
        reads = scope.get("method") in {"GET", "HEAD"}
        page, file = reads and scope["path"] == PAGE, reads and scope["path"] in self._files
        if not self._guarded and not names_loopback(given):
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
        if self._guarded and not (file or reports) and not shows(given, self._tokens):
            message = "The control port wants the admin token: Authorization: Bearer TOKEN."
            return error(401, "invalid_api_key", message, {"www-authenticate": "Bearer"})
        return None


def _same_origin(given: Headers, page: bool) -> bool:
    """Whether the request is from no page at all or from a page of the console. A link elsewhere may lead to `page`."""
    host = given.get(b"host", [b""])[0].lower()
    if any(origin.partition(b"://")[2].lower() != host for origin in given.get(b"origin", ())):
        return False
    return page or all(site in {b"same-origin", b"none"} for site in given.get(b"sec-fetch-site", ()))


def _keys(given: Headers) -> list[str]:
    """List what the data port would take for API keys in a request."""
    bearers = [value.partition(b" ") for value in given.get(b"authorization", ())]
    keys = [token or scheme for scheme, _, token in bearers]
    return [key.strip().decode("latin-1") for key in (*keys, *given.get(b"x-api-key", ()))]
