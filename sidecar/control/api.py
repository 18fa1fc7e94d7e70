"""Control API of the sidecar: state of this machine's models, and orders for them.

    GET  /healthz                                              for a supervisor of the process
    GET  /status /metrics                                      GPUs, models, gateways; for Prometheus
    GET  /models/{profile}/logs?lines=N  /models/{profile}/plan
    POST /models/{profile}/{ensure|sleep|stop|off|on}  answered at once, with the model's report
    POST /stop  {"engines": true|false}                        ends the sidecar, and its engines too or not

Callers name profiles and nothing else. An order with a query or with more in its body is refused whole, so that no
path, flag, variable or URL of a caller ever gets near an engine. Answers are never cached.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from gateway.shared.addresses import is_loopback
from gateway.shared.control.body import TooLarge, body_of
from gateway.shared.control.guard import Guard, Headers, names_loopback, shows
from gateway.shared.protocol import Ensured, encode
from gateway.shared.tokens import AcceptedTokens
from sidecar.control.metrics import Metrics
from sidecar.core.status import Status
from sidecar.residency.manager import Manager
from sidecar.residency.orders import Order, Refused
from sidecar.residency.report import explained

HEALTH = "/healthz"
HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
KINDS = {401: "authentication_error", 403: "permission_error"}
BODY = 64 * 1024  # bytes of a request
BODY_WITHIN = 10.0  # seconds for all of it
LINES, MOST_LINES = 200, 2000
_LINES = re.compile(rb"(?:lines=([1-9][0-9]{0,3}))?")
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
NAMES_ONLY = (
    "Callers name profiles only: an order has no query and no body (or {}). What an engine is started with is in the "
    "sidecar's own file."
)


class ControlApiRules:
    """Access rules, which every request passes in this order. `tokens` empty: only this machine is answered.

    - A request of a browser's page, by its Origin or Sec-Fetch-Site, is answered 403. No page is ours, and an
      operator's browser must not stop a model because of a page it shows.
    - Without a token only this machine is answered. The peer's address must be loopback, else 403. Host must be a
      loopback name, else 421: a page whose own name was made to point to this machine (DNS rebinding) sends another.
    - With a token every path but /healthz demands it, as `Authorization: Bearer TOKEN`.
    """

    def __init__(self, tokens: AcceptedTokens) -> None:
        self._tokens, self._guarded = tokens, bool(tokens)

    def refusal(self, scope: Scope, given: Headers) -> Response | None:
        """The answer to a request that may not pass; None: it may."""
        if given.get(b"origin") or any(site != b"none" for site in given.get(b"sec-fetch-site", ())):
            return error(403, "cross_origin", "The sidecar answers no pages in browsers.")
        if not self._guarded:
            host, _ = scope.get("client") or ("", 0)
            if not is_loopback(host):
                return error(403, "not_allowed", "Without a token_file the sidecar answers only its own machine.")
            if not names_loopback(given):
                message = "Without a token_file the sidecar answers only to localhost, 127.0.0.1 and [::1]."
                return error(421, "misdirected_request", message)
        elif scope["path"] != HEALTH and not shows(given, self._tokens):
            message = "The sidecar wants the token in its token_file: Authorization: Bearer TOKEN."
            return error(401, "invalid_api_key", message, {"www-authenticate": "Bearer"})
        return None


class _Bad(Exception):
    """A request that is answered with `response`."""

    def __init__(self, response: Response) -> None:
        self.response = response


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Stop(msgspec.Struct, forbid_unknown_fields=True):
    engines: bool = False


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/stop`: the profiles whose engines run, and whether they end too (`engines`)."""

    engines: bool
    running: tuple[str, ...]


def control_app(api: Api, tokens: AcceptedTokens) -> Starlette:
    """Build the application, for whoever shows an order token."""
    app = Starlette(
        routes=[
            Route(HEALTH, api.healthz),
            Route("/metrics", api.metrics),
            Route("/status", api.status),
            Route("/stop", api.stop, methods=["POST"]),
            # :path, so that a model's name with a slash finds out that it is no profile.
            Route("/models/{profile:path}/logs", api.logs),
            Route("/models/{profile:path}/plan", api.plan),
            *(
                Route(f"/models/{{profile:path}}/{order}", partial(api.order, order), methods=["POST"], name=order)
                for order in get_args(Order)
            ),
        ],
        middleware=[Middleware(Guard, ControlApiRules(tokens).refusal, HEADERS)],
        exception_handlers={HTTPException: _not_here, _Bad: _refused},
    )
    app.router.redirect_slashes = False  # the address it would name is the client's own word
    return app


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of the control API, one method a route."""

    manager: Manager
    view: Callable[[], Status]
    end: Callable[[bool], None]  # begins the end of the sidecar; True: and of its engines
    leaving: Callable[[], bool]  # then no order is taken

    # -- pages to read ------------------------------------------------------------------------------------------

    async def healthz(self, _: Request) -> Response:
        """200 while the sidecar serves, 503 once it ends."""
        return _text("the sidecar is ending\n", 503) if self.leaving() else _text("ok\n")

    async def metrics(self, _: Request) -> Response:
        """Prometheus' text format."""
        exposition = Metrics(self.manager, self.view).exposition()
        return Response(exposition, media_type=None, headers={"content-type": EXPOSITION})

    async def status(self, _: Request) -> Response:
        """A `Status`."""
        return _json(self.view())

    async def logs(self, request: Request) -> Response:
        """The last lines of a model's engine, as text. 400 for another query, 404 for an unknown profile."""
        query = _LINES.fullmatch(request.scope["query_string"])
        if query is None or (most := int(query[1] or LINES)) > MOST_LINES:
            return error(400, "bad_query", f"The one query of logs is lines=N, from 1 to {MOST_LINES}.")
        lines = self.manager.lines(self._profile(request), most)
        return _text("".join(f"{line}\n" for line in lines))

    async def plan(self, request: Request) -> Response:
        """The plan for a model, in words. 409 for one that cannot be run, 404 for an unknown profile."""
        self._no_query(request)
        profile = self._profile(request)
        text = explained(self.manager.machine, profile)
        if self.manager.entries[profile].unusable:
            return error(409, "cannot_be_run", text)
        return _text(text + "\n")

    # -- orders -------------------------------------------------------------------------------------------------

    async def order(self, what: Order, request: Request) -> Response:
        """The model after the order. 409 for an order that cannot be obeyed, 503 with Retry-After for one too early.
        Where `ensure` cannot have the model, its report says why, and that is no error."""
        profile = await self._ordered(request)
        try:
            report = self.manager.orders.give(profile, what)
        except Refused as refused:
            if refused.retry_in is None:
                return error(409, "cannot_be_done", str(refused))
            return error(503, "not_now", str(refused), {"retry-after": str(max(1, math.ceil(refused.retry_in)))})
        if what in ("off", "on") and (why := await self.manager.machine.wait_saved()):
            return error(503, "not_kept", f"{profile} is {what}, and a restart would not know it: {why}")
        return Response(encode(Ensured(model=report)), media_type="application/json")

    async def stop(self, request: Request) -> Response:
        """Begin the end of the sidecar; a `Stopping`."""
        self._no_query(request)
        wanted = _read(await _body(request), _Stop)
        if wanted is None:
            return error(400, "bad_body", 'The body is {"engines": true} to end its engines too, else {}.')
        running = [report.profile for report in self.manager.models() if report.state in ("running", "sleeping")]
        self.end(wanted.engines)
        return _json(Stopping(engines=wanted.engines, running=tuple(running)))

    async def _ordered(self, request: Request) -> str:
        """The profile of an order that says nothing else, to a sidecar that takes orders."""
        self._no_query(request)
        if _read(await _body(request), _Nothing) is None:
            raise _Bad(error(400, "profiles_only", NAMES_ONLY))
        if self.leaving():
            raise _Bad(error(503, "ending", "The sidecar is ending and takes no orders.", {"retry-after": "5"}))
        return self._profile(request)

    def _no_query(self, request: Request) -> None:
        if request.scope["query_string"]:
            raise _Bad(error(400, "profiles_only", NAMES_ONLY))

    def _profile(self, request: Request) -> str:
        asked: str = request.path_params["profile"]
        models = self.manager.entries  # a report of them all would plan for each
        if asked in models:
            return asked
        profiles = {name: model.profile for name, model in models.items()}
        named = [name for name, each in profiles.items() if asked in (each.served_name, *each.aliases, *each.adapters)]
        close = named or difflib.get_close_matches(asked[:80], models, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"Its profiles are {', '.join([*models][:20])}."
        raise _Bad(error(404, "profile_not_found", f"There is no profile {asked[:80]!r}. {hint}"))


def error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error as OpenAI's API words them, and the gateway."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "code": code}})
    return Response(body, status, headers, "application/json")


async def _body(request: Request) -> bytes:
    """Raises _Bad for one that is too large or too slow."""
    try:
        return await body_of(request, BODY, BODY_WITHIN)
    except TooLarge:
        close = {"connection": "close"}
        raise _Bad(error(413, "too_large", f"A body is at most {BODY} bytes.", close)) from None
    except TimeoutError:
        raise _Bad(error(408, "too_slow", f"The body was not there after {BODY_WITHIN:g} s.")) from None
    except ClientDisconnect:
        raise _Bad(error(400, "cut_off", "The body ended early.")) from None


def _read(body: bytes, kind: Any) -> Any:
    """The body as `kind`, None where it is something else; an empty one is {}."""
    try:
        return msgspec.json.decode(body.strip() or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _text(text: str, status: int = 200) -> Response:
    return Response(text.encode(errors="replace"), status, media_type="text/plain")


async def _refused(_: Request, exception: Exception) -> Response:
    assert isinstance(exception, _Bad)  # noqa: S101 - registered for no other
    return exception.response


async def _not_here(_: Request, exception: Exception) -> Response:
    """404 and 405 in the words of every other error of ours."""
    if isinstance(exception, HTTPException) and exception.status_code == 405 and exception.headers:
        methods = ", ".join(sorted(exception.headers["Allow"].split(", ")))
        return error(405, "method_not_allowed", f"This path takes {methods}.", {"allow": methods})
    message = (
        "The sidecar answers GET /healthz, /metrics, /status, /models/PROFILE/logs and /models/PROFILE/plan, "
        "POST /models/PROFILE/{ensure|sleep|stop|off|on} and /stop."
    )
    return error(404, "not_found", message)
