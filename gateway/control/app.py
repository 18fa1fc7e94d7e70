"""Control port: routes for operators and an upper tier. It has nothing that a client of the data port needs.

    GET /livez /readyz /metrics        for whoever watches the process
    GET /status /fleet /calls          what is known, promised, waiting and running
    GET /calls/{serial}                the life of an ended call
    GET /history                       the last hour: calls, queues, engines, events
    GET /runbooks/{name}               what to do about an alert
    GET /sidecars/{id}/models/{profile}/logs      the last lines of an engine, from its sidecar
    GET /processes                     the processes of this gateway
    GET /cluster                       who decides for the gateways of all machines
    GET /policy, POST /policy/reload   the active policy, and reading its file again now
    GET /policy/diff                   what its last change was
    GET, POST /policy/try              an edited policy on the calls just recorded, simulated
    GET, POST, DELETE /drain           whether balancers are told to go elsewhere
    GET, POST, DELETE /engines/{id}/drain     whether an engine gets new calls
    POST /sidecars/{id}/models/{profile}/{ensure|sleep|stop|off|on}    an order for a sidecar
    POST /sidecars/report              what a sidecar has, answered with what is wanted of it
    GET /                              the console, with its files in /console/
    GET /events                        all that the console shows, as a stream of events

Who may ask is `guard.py`'s to say. Dependencies are arguments; nothing hangs on the app object.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from gateway.control.calls import calls_view
from gateway.control.console.files import console_files
from gateway.control.console.routes import ConsoleRoutes
from gateway.control.console.trial.simulation import TrialRoutes
from gateway.control.guard import HEADERS, JSON, ControlPortRules, error
from gateway.control.parts import ControlParts
from gateway.control.policy_view import policy_yaml
from gateway.control.usage import usage_csv, usage_view
from gateway.control.view import fleet_view
from gateway.core.engines.announcer import state_of
from gateway.core.sidecars.addresses import is_loopback
from gateway.core.sidecars.sidecars import NameConflict, RegistryFull, UntrustedSidecar
from gateway.decider.report_intake import ReportIntake
from gateway.native import STATE
from gateway.shared.control.body import TooLarge, body_of
from gateway.shared.control.guard import Guard
from gateway.shared.protocol import MAX_BYTES, REPORT_PATH, ProtocolError, encode
from gateway.shared.storage import StorageError
from gateway.shared.tasks import failing
from gateway.shared.threads import in_thread
from gateway.shared.tokens import AcceptedTokens

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
TOLD_DOWN = 20  # engines that /readyz names
RELAYS_WITHIN = 2.0  # seconds for relays to be there, which come again to another decider
SWITCH = ("GET", "POST", "DELETE")


def control_app(parts: ControlParts, admin_tokens: AcceptedTokens) -> Starlette:
    """The application. Without `admin_tokens` no request needs a token, see guard.py."""
    files = console_files()
    routes = [
        *ConsoleRoutes(files, parts).routes(),
        *TrialRoutes(parts, allowed=bool(admin_tokens)).routes(),
        *Control(parts).routes(),
        Route(REPORT_PATH, partial(take_report, sidecars=parts.sidecars), methods=["POST"]),
    ]
    paths = dict.fromkeys(route.path_format for route in routes)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, ControlPortRules(admin_tokens, parts.is_user_key, files).refusal, HEADERS)],
        exception_handlers={HTTPException: partial(_not_here, f"The control port answers {', '.join(paths)}.")},
    )
    app.router.redirect_slashes = False  # the address it would name is the client's own word
    return app


class Control:
    """The answers, one method a route."""

    def __init__(self, parts: ControlParts) -> None:
        self._parts = parts
        self._fleet = parts.dispatch.fleet
        self._dispatch = parts.dispatch
        self._by_hand = False  # the drain is an operator's and not the end of the process
        self._alone: float | None = None  # since when no relay is there, as far as was asked; None: it is not so

    def routes(self) -> list[Route]:
        return [
            Route("/livez", self.livez),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
            Route("/fleet", self.fleet),
            Route("/calls", self.calls),
            Route("/processes", self.processes),
            Route("/cluster", self.cluster),
            Route("/usage", self.usage),
            Route("/policy", self.policy),
            Route("/policy/reload", self.reload, methods=["POST"]),
            Route("/drain", self.drain, methods=SWITCH),
            Route("/engines/{id:path}/drain", self.drain_engine, methods=SWITCH),
        ]

    # -- for whoever watches the process ------------------------------------------------------------------------

    async def livez(self, _: Request) -> Response:
        return _text("ok")

    async def readyz(self, _: Request) -> Response:
        if self._dispatch.leaving:
            by_hand = self._by_hand and not self._dispatch.draining
            return _text("drained by an operator" if by_hand else "shutting down", 503)
        own = [engine for engine in self._fleet if not engine.provider]  # that answer everybody
        up = sum(engine.health.up for engine in own)
        expected = len(self._fleet.expected)
        down = [f"{engine.label} is {state_of(engine)}" for engine in self._fleet if not engine.health.up]
        of_cluster = [] if self._parts.cluster is None else [self._parts.cluster().line]
        roles = {each.role for each in self._parts.processes()}
        alone, now = "parent" in roles and "relay" not in roles, self._dispatch.clock()
        since = self._alone = (now if self._alone is None else self._alone) if alone else None
        more = [
            *["no relay is there to take calls"] * alone,
            *failing(),
            *of_cluster,
            *down[:TOLD_DOWN],
            *[f"and {len(down) - TOLD_DOWN} more"] * (len(down) > TOLD_DOWN),
        ]
        if self._fleet.unasked:
            return _text(
                "\n".join([f"starting: {len(self._fleet.unasked)} engines have not been asked yet", *more]), 503
            )
        if not (up or expected):
            return _text("\n".join(["no engine is up", *more]), 503)
        if since is not None and now >= since + RELAYS_WITHIN:
            return _text("\n".join(more), 503)
        line = f"ok, {up} of {len(own)} engines are up"
        line += f", {expected} models can be had from sidecars" if expected else ""
        return _text("\n".join([line, *more]))

    async def metrics(self, _: Request) -> Response:
        await self._parts.count()
        text = await in_thread(self._parts.exposition())
        return Response(text, media_type=None, headers={"content-type": EXPOSITION})

    # -- pages to read ------------------------------------------------------------------------------------------

    async def fleet(self, _: Request) -> Response:
        return _json(fleet_view(self._dispatch, self._dispatch.clock()))

    async def calls(self, request: Request) -> Response:
        if request.query_params:  # an answer about all calls would pass for one about some
            return error(400, "bad_query", "/calls has no queries: select from its answer.")
        return _json(calls_view(self._parts.calls()))

    async def processes(self, _: Request) -> Response:
        await self._parts.count()
        return _json({"processes": self._parts.processes(), "pump": STATE})  # STATE: whether streams are pumped

    async def cluster(self, _: Request) -> Response:
        if self._parts.cluster is None:
            return error(404, "no_cluster", "This gateway is alone: its policy has no cluster.")
        return _json(self._parts.cluster())

    async def usage(self, request: Request) -> Response:
        parts = self._parts
        match request.query_params.get("format", "json"):
            case "json":
                return _json(usage_view(parts.limits.quotas, parts.limits.money, self._dispatch.clock()))
            case "csv":
                try:
                    tokens, spent = await parts.used_tokens(), await parts.spent()
                except StorageError as failed:
                    return error(503, "storage", str(failed))
                return Response(usage_csv(tokens, spent), media_type="text/csv")
            case _:
                return error(400, "bad_format", "format is json or csv.")

    async def policy(self, request: Request) -> Response:
        if request.query_params:
            return error(400, "bad_query", "/policy has no queries: its answer is YAML.")
        text = policy_yaml(self._dispatch.policy, self._parts.policy_status())
        return Response(text, media_type="application/yaml")

    # -- orders -------------------------------------------------------------------------------------------------

    async def reload(self, _: Request) -> Response:
        if self._parts.reload is None:
            message = "This gateway was started without --policy: there is no file to read again."
            return error(409, "no_policy_file", message)
        status = await self._parts.reload()
        if status.error is not None:
            message = f"Nothing has changed: the policy file cannot be used.\n{status.error}"
            return error(422, "bad_policy", message)
        return _json(status)

    async def drain(self, request: Request) -> Response:
        if request.method in {"POST", "DELETE"}:
            wanted = request.method == "POST"
            self._parts.drain(wanted)
            if self._dispatch.leaving is not wanted:
                return error(409, "shutting_down", "This gateway is shutting down, and cannot be called back.")
            self._by_hand = wanted
        dispatch = self._dispatch
        return _json({
            "draining": dispatch.leaving,
            "running_calls": sum(dispatch.running.values()),
            "queued_calls": sum(map(len, dispatch.queues.values())),
            "draining_engines": [engine.label for engine in self._fleet if engine.draining],
        })  # fmt: skip

    async def drain_engine(self, request: Request) -> Response:
        engine = self._fleet.named(request.path_params["id"])
        if engine is None:
            return error(404, "engine_not_found", "There is no engine of that name. GET /fleet lists those there are.")
        if request.method in {"POST", "DELETE"}:
            wanted = request.method == "POST"
            self._parts.drain_engine(engine, wanted)
            if engine.draining is not wanted:
                message = "The policy, or its sidecar, has no such engine any more: it only ends its calls."
                return error(409, "engine_retired", message)
        return _json({"engine": engine.label, "draining": engine.draining, "in_flight": engine.ledger.in_flight})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _text(line: str, status: int = 200) -> Response:
    return Response(f"{line}\n", status, media_type="text/plain")


async def _not_here(known: str, _: Request, exception: Exception) -> Response:
    """Answer 404 or 405 in the words of every other error of ours. `known`: the sentence that lists the paths."""
    status = exception.status_code if isinstance(exception, HTTPException) else 500
    if status == 405 and isinstance(exception, HTTPException) and exception.headers:
        methods = ", ".join(sorted(exception.headers["Allow"].split(", ")))
        return error(405, "method_not_allowed", f"This path takes {methods}.", {"allow": methods})
    return error(status, "not_found", known)


# -- reports of sidecars ----------------------------------------------------------------------------------------------

# Of POST /sidecars/report. Who sends is judged by the head alone; only then is the body read, of at most MAX_BYTES. The
# sidecar's own token takes the place of the admin token there (see guard.py), and gives nothing else. With an admin
# token the Host may be any: a page whose name was made to point here (DNS rebinding) has no token of a sidecar.
BODY_WITHIN = 5.0  # seconds for all of it
CLOSE = {"connection": "close"}
REFUSALS: dict[type[Exception], tuple[int, str, str]] = {
    TooLarge: (413, "too_large", f"A report is at most {MAX_BYTES} bytes."),
    TimeoutError: (408, "too_slow", f"The report was not here after {BODY_WITHIN:g} s."),
    ClientDisconnect: (400, "cut_off", "The report ended early."),
    ProtocolError: (400, "bad_report", "The report cannot be read: {}"),
    NameConflict: (409, "id_taken", "The report is not taken: {}."),
    RegistryFull: (503, "too_many_sidecars", "The report is not taken: {}."),
}


async def take_report(request: Request, sidecars: ReportIntake) -> Response:
    """The answer to one report."""
    try:
        sidecars.admit(_token(request))
        answer = sidecars.report(await body_of(request, MAX_BYTES, BODY_WITHIN), local=is_local(request.scope))
    except UntrustedSidecar as refused:
        return error(401, "invalid_token", str(refused), {"www-authenticate": "Bearer"} | CLOSE)
    except tuple(REFUSALS) as refused:
        status, code, message = REFUSALS[type(refused)]
        return error(status, code, message.format(refused), CLOSE if status in (408, 413) else None)
    return Response(encode(answer), media_type=JSON)


def is_local(scope: Scope) -> bool:
    """Whether the sender is on this machine: it comes from loopback, or from the very address it has come to."""
    client, server = scope.get("client"), scope.get("server")
    if client is None:
        return False
    return is_loopback(client[0]) or (server is not None and client[0] == server[0])


def _token(request: Request) -> bytes | None:
    """The bearer's token, None where there is none or more than one."""
    lines = request.headers.getlist("authorization")
    scheme, _, token = lines[0].partition(" ") if len(lines) == 1 else ("", "", "")
    return token.encode("latin-1") if scheme.lower() == "bearer" and token else None
