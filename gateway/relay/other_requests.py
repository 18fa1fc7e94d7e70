"""Requests that are no calls: lists of models, health, help, and those for files and batches."""

from __future__ import annotations

import asyncio
import random

from gateway.core.admission import refusals
from gateway.core.admission.decider import Decider
from gateway.core.answer.error_shape import refusal_body
from gateway.core.engines.models import as_anthropic
from gateway.core.policy.snapshot import Current
from gateway.core.request.cors import shared_lines
from gateway.core.request.not_found import no_route
from gateway.core.request.outcome import AwaitsKeys, Outcome, Refused, refusal_headers
from gateway.core.request.record import Record
from gateway.core.request.routes import Route
from gateway.core.request.tenants import Account
from gateway.relay.endings import Endings
from gateway.relay.heads import JSON, TEXT, note_trace, outcome_help
from gateway.relay.stored import Stored
from gateway.relay.wire.server import Request, Responder


class OtherRequests:
    """Answers what no engine is asked for. `stored`: /v1/files and /v1/batches, where the policy offers them."""

    def __init__(self, current: Current, decider: Decider, endings: Endings, rng: random.Random) -> None:
        self.stored: Stored | None = None
        self._current = current
        self._decider = decider
        self._endings = endings
        self._rng = rng
        self._listing: set[asyncio.Task[None]] = set()
        self._help = outcome_help()

    def route_of(self, path: bytes) -> Route | None:
        """Return the route of a path for files or batches; None: it is none of these."""
        return None if self.stored is None else self.stored.route_of(path)

    def answer_stored(self, request: Request, responder: Responder) -> None:
        """Begin to answer a request for files or batches."""
        assert self.stored is not None  # noqa: S101 # head() has refused the others
        self.stored.begin(self._run_stored(request, responder, self.stored))

    async def _run_stored(self, request: Request, responder: Responder, stored: Stored) -> None:
        """Count a request for files or batches, answer it and record it, as a call."""
        route = stored.route_of(request.path)
        assert route is not None  # noqa: S101 # head() has asked
        record = Record(request_id=self._endings.request_id(request), route=route.path, method=request.method.decode())
        note_trace(request, record)
        cors = shared_lines(request.fields, self._current.policy.cors)
        responder.lines = b"x-request-id: %b\r\n" % record.request_id.encode() + cors
        try:
            await self._serve_stored(request, responder, stored, record)
        except Refused as refused:
            responder.lines = cors
            self._endings.refuse(refused, responder, record)
        except asyncio.CancelledError:
            self._endings.refuse(refusals.cut_by_drain(), responder, record)
            raise
        except Exception:
            responder.lines = cors
            self._endings.refuse(refusals.bug(record.request_id), responder, record)
            raise
        finally:
            request.release()
            self._endings.finish(record, request.at)

    async def _serve_stored(self, request: Request, responder: Responder, stored: Stored, record: Record) -> None:
        answered = False
        try:  # its key may have been removed while its body came
            account = self._current.snapshot.tenants.identify(request.fields, request.peer)
            record.tenant, record.bytes_in = account.name, len(request.body)
            arrived = self._decider.arrive(self._current.snapshot, account, record, request.at, request.body)
            with arrived as admission:
                try:
                    await admission.counted()
                    answered = True
                    await stored.answer(request, responder, account)
                    record.outcome, record.status = Outcome.OK, 200
                finally:
                    admission.ended(record.outcome)
        finally:
            if not answered and request.sink is not None:
                request.sink.lost()

    def answer_here(self, request: Request, responder: Responder, route: Route) -> None:
        """Answer a GET whose answer the gateway has itself."""
        request.release()
        id = b"x-request-id: %b\r\n" % self._endings.request_id(request).encode()
        if route.kind == "help":
            page = self._help.get(request.path.rstrip(b"/"))
            if page is None:
                responder.send(404, JSON + id, no_route(request.method, request.path).body())
            else:
                responder.send(200, TEXT + id, page)
            return
        if route.kind == "models":
            task = asyncio.get_running_loop().create_task(self._list(request, responder, route))
            self._listing.add(task)
            task.add_done_callback(self._listing.discard)
        elif self._decider.up:
            responder.send(200, JSON + id, b"{}")
        else:
            responder.send(503, JSON + id, b'{"status":"no engine is up, or shutting down"}')

    async def _list(self, request: Request, responder: Responder, route: Route) -> None:
        """The list of models, as soon as it is known."""
        id = b"x-request-id: %b\r\n" % self._endings.request_id(request).encode()
        try:
            account = await identified(self._current, request)
            status, body = await self._decider.models(request.path, account, lambda: responder.closed)
        except Refused as refused:
            lines = JSON + id + refusal_headers(refused, self._rng)
            responder.send(refused.status, lines, refusal_body(route.path, refused))
            return
        if b"anthropic-version" in request.fields:
            body = as_anthropic(status, body)
        responder.send(status, JSON + id, body)


async def identified(current: Current, request: Request) -> Account:
    """Return who pays. Wait for the keys of a token's issuer, once. Raises Refused."""
    tenants = current.snapshot.tenants
    try:
        return tenants.identify(request.fields, request.peer)
    except AwaitsKeys:
        if tenants.tokens is not None:
            await tenants.tokens.keys_read()
    return current.snapshot.tenants.identify(request.fields, request.peer)
