"""The control port: /livez, /readyz, /metrics, /fleet. Read-only, and nothing a client of the data port needs.

Where there is an admin token every path demands it, as `Authorization: Bearer TOKEN`; load balancers that cannot hold
a secret ask the data port's /health instead. Dependencies are arguments; nothing hangs on the app object.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.control.view import fleet_view
from gateway.core.fleet import Fleet
from gateway.core.outcome import error_body
from gateway.dispatch import Dispatch

JSON = "application/json"
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def control_app(
    fleet: Fleet,
    dispatch: Dispatch,
    exposition: Callable[[], bytes],
    admin_token: str | None,
    clock: Callable[[], float],
) -> Starlette:
    """The application. `exposition` gives the Prometheus text, `clock` monotonic seconds; no token, no door."""

    async def livez(_: Request) -> Response:
        return Response(b"ok\n", media_type="text/plain")

    async def readyz(_: Request) -> Response:
        if dispatch.leaving:
            return Response(b"shutting down\n", 503, media_type="text/plain")
        up = sum(engine.up for engine in fleet)
        if not up:
            return Response(b"no engine is up\n", 503, media_type="text/plain")
        return Response(f"ok, {up} of {len(fleet.engines)} engines are up\n", media_type="text/plain")

    async def metrics(_: Request) -> Response:
        return Response(exposition(), media_type=None, headers={"content-type": EXPOSITION})

    async def fleet_json(_: Request) -> Response:
        return Response(msgspec.json.encode(fleet_view(fleet, dispatch, clock())), media_type=JSON)

    routes = [Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", metrics), Route("/fleet", fleet_json)]
    middleware = [] if admin_token is None else [Middleware(Guard, admin_token)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _not_here})


async def _not_here(_: Request, error: Exception) -> Response:
    """404 and 405 in the words of every other error of ours."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = "The control port answers GET /livez, /readyz, /metrics and /fleet."
    headers = {"allow": "GET, HEAD"} if status == 405 else None
    return Response(error_body(message, "invalid_request_error", "not_found"), status, headers, JSON)


class Guard:
    """Lets through what carries the token; compares digests, so time tells neither its content nor its length."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._wanted = hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            message = "The control port wants the admin token: Authorization: Bearer TOKEN."
            body = error_body(message, "authentication_error", "invalid_api_key")
            await Response(body, 401, {"www-authenticate": "Bearer"}, JSON)(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        matches = hmac.compare_digest(hashlib.sha256(token).digest(), self._wanted)
        return matches and scheme.lower() == b"bearer"
