"""Life of one request, from top to bottom. Read this first.

    who pays -> parse -> estimate -> class -> charge the limits -> hold on the ledger, or wait in the class's queue
    -> choose an engine -> forward -> first byte (the only place that may change engine) -> relay (no retry past this
    line) -> settle -> record

`_serve` is that order. Each resource is one `with`, and leaving it, also by cancellation, is its settlement: the
charge gives back what was not used, the grant its hold, the reply its connection. There is one wait, one retry point
and one place that records. From the grant on it goes on in `forwarding.py`. The bytes of an answer never pass through
a coroutine: the engine's connection calls `Relay.data`, and that writes to the client's transport.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from gateway.core.admission import refusals
from gateway.core.admission.decider import Admission, Decider, Grant
from gateway.core.admission.witness import BatchWitness
from gateway.core.answer.engine_error import engine_error, is_refusal
from gateway.core.answer.error_shape import refusal_body
from gateway.core.answer.naming import named
from gateway.core.policy.snapshot import Snapshot, largest_body
from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.call import Call
from gateway.core.request.classes import claim
from gateway.core.request.cors import preflight, shared_lines
from gateway.core.request.headers import head_time_limit, progress_interval
from gateway.core.request.model_name import with_model
from gateway.core.request.not_found import canonical, no_method, no_route
from gateway.core.request.outcome import AwaitsKeys, Outcome, Refused
from gateway.core.request.parser import parse
from gateway.core.request.record import Record
from gateway.core.request.routes import Route, route_of
from gateway.core.request.settlement import clamped_usage
from gateway.core.request.tenants import ANONYMOUS, Account
from gateway.core.routes.provider_call import may_leave
from gateway.relay.active_call import ActiveCall
from gateway.relay.attempts import Attempts
from gateway.relay.batcher import Batcher, Exchanged
from gateway.relay.endings import Endings
from gateway.relay.forwarding import Forwarding
from gateway.relay.heads import answer_lines, note_trace
from gateway.relay.large_bodies import LARGE, LargeBodies
from gateway.relay.mirror import Mirrors
from gateway.relay.other_requests import OtherRequests, identified
from gateway.relay.progress import Progress
from gateway.relay.retry_after import retry_lines
from gateway.relay.settling import TOO_BUSY, settle_unanswered
from gateway.relay.stored import Stored
from gateway.relay.tracing import Tracing
from gateway.relay.wire.server import Request, Responder, answer

KEYLESS_BODY = 1024  # bytes of a body, which is dropped: nobody has said who sends it
LOGGED_AT_MOST = 64 * 1024  # bytes of a body


# From a call's grant to its answer's end, settled. Raises Refused.
Exchange: TypeAlias = Callable[[Request, Responder, ActiveCall, Call, Admission, Grant], Awaitable[None]]


class Pipeline:
    """Handler of the data port. `observe` receives the Record of every call once it has ended. `exchange` runs a call
    from its grant to its end; None: the gateway forwards the call itself."""

    def __init__(
        self,
        decider: Decider,
        attempts: Attempts,
        observe: Callable[[Record], None],
        rng: random.Random,
        bodies: BodyMemory,
        witness: BatchWitness | None = None,
        large: LargeBodies | None = None,
        exchange: Exchange | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        current, clock = attempts.current, attempts.clock
        self.current, self.clock = current, clock
        self.decider = decider
        self.attempts = attempts
        forwarding = Forwarding(decider, attempts, clock, tracing)
        whole = forwarding.exchange_whole
        self.batcher = Batcher(lambda: current.snapshot.merges, whole, clock, bodies, decider.window, witness)
        self._exchange = forwarding.exchange if exchange is None else exchange
        self._forwards = exchange is None
        self.large = large  # who parses large bodies; None: the event loop
        self.tracing = tracing
        self.mirrors = Mirrors(self.begin, rng)
        self.endings = Endings(observe, clock, rng)
        self.others = OtherRequests(current, decider, self.endings, rng)
        self.rng = rng
        self.tasks: dict[asyncio.Task[None], ActiveCall] = {}
        self._whose: Request | None = None  # the request whose head was read last, its route and its account
        self._route: Route | None = None
        self._account: Account | None = None

    # -- calls from the data port -------------------------------------------------------------------------------

    def head(self, request: Request) -> bytes | None:
        """Refuse by the head alone, before the body is read: unknown path, method or key. None: read on."""
        snapshot = self.current.snapshot
        origins = snapshot.policy.cors
        route = route_of(request.path)
        if route is None:
            request.path = canonical(request.path)
            route = route_of(request.path) or self.others.route_of(request.path)
        if route is None:
            refused = no_route(request.method, request.path)
        elif request.method.decode() not in route.methods:
            if request.method == b"OPTIONS":
                allowed = preflight(request.fields, origins, route.methods)
                if allowed is not None:
                    return answer(204, allowed, b"")
            refused = no_method(request.method, route)
        elif route.keyless:
            request.limit = KEYLESS_BODY
            return None
        else:
            return self._sender_head(request, route, snapshot)
        return self._refused_head(refused, request, route)

    def _sender_head(self, request: Request, route: Route, snapshot: Snapshot) -> bytes | None:
        """Refuse by who sends it. None: read on."""
        self._whose = self._account = None
        name = ANONYMOUS
        try:
            account = snapshot.tenants.identify(request.fields, request.peer)
            if snapshot.browser_guard is not None:
                snapshot.browser_guard.check(request.fields, request.peer)
        except AwaitsKeys:  # whoever answers asks again, once the issuer's keys are here
            if route.stored:
                return self._refused_head(refusals.keys_awaited(), request, route)
        except Refused as refused:
            return self._refused_head(refused, request, route)
        else:
            if route.stored and self.others.stored is not None:
                return self._stored_head(request, route, self.others.stored, account)
            self._whose, self._route, self._account, name = request, route, account, account.name
        if not 0 <= request.length <= snapshot.small:
            request.limit = largest_body(snapshot.policy, route)
            request.owner = request.peer if name == ANONYMOUS else name
        return None

    def _refused_head(self, refused: Refused, request: Request, route: Route | None, tenant: str = "") -> bytes:
        record = Record(
            request_id=self.endings.request_id(request), route=route.path if route else "other", tenant=tenant
        )
        note_trace(request, record)
        record.method = request.method.decode()
        headers = self.endings.refusal(refused, record) + shared_lines(request.fields, self.current.policy.cors)
        self.endings.finish(record, request.at)
        return answer(refused.status, headers, refusal_body(request.path.decode("latin-1"), refused))

    def _stored_head(self, request: Request, route: Route, stored: Stored, account: Account) -> bytes | None:
        try:
            stored.head(request, account)
        except Refused as refused:
            return self._refused_head(refused, request, route, account.name)
        return None

    def body_by(self, request: Request) -> float:
        """Return when the caller's own deadline is over."""
        return request.at + head_time_limit(request.fields, self.current.snapshot.calls)

    def call(self, request: Request, responder: Responder) -> None:
        """A request, whole. GETs are answered here; a call gets a task, which its client's leaving cancels."""
        route = self._route if self._whose is request else route_of(request.path)
        if route is None:
            self.others.answer_stored(request, responder)
            return
        origins = self.current.policy.cors
        if origins:
            responder.lines = shared_lines(request.fields, origins)
        if route.here:
            self.others.answer_here(request, responder, route)
            return
        # Its body came with its head: nobody has asked since.
        account = self._account if self._whose is request else None
        self._whose = self._account = None
        self.begin(request, responder, route, account)

    def begin(self, request: Request, responder: Responder, route: Route, account: Account | None) -> ActiveCall:
        """Start a call's task, on a route that is forwarded. `account`: who pays, where it is known already."""
        record = Record(request_id=self.endings.request_id(request), route=route.path, bytes_in=len(request.body))
        if b"traceparent" in request.fields:
            note_trace(request, record)
        live = ActiveCall(record)
        if self.tracing is not None:
            live.trace = self.tracing.begin(request, record, self.clock())
        live.account = account
        # Not create_task, which takes a step more and formats a name for each.
        running = self._run(request, responder, route, live)
        live.task = asyncio.Task(running, loop=asyncio.get_running_loop(), name="call")
        self.tasks[live.task] = live
        responder.watch(live.leave)
        return live

    # -- the life of a call -------------------------------------------------------------------------------------

    async def _run(self, request: Request, responder: Responder, route: Route, live: ActiveCall) -> None:
        """Run `_serve` and answer its exceptions. Only a bug leaves here as an exception."""
        record = live.record
        live.begun = True
        try:
            if record.reason:
                self.endings.left(responder, record, route)
            else:
                await self._serve(request, responder, route, live)
        except Refused as refused:
            if self.large is not None and request.held is not None and not refused.ours:
                self.large.refused(request.held.owner, request.held.size)
            self.endings.refuse(refused, responder, record, route)
        except asyncio.CancelledError:
            if not record.reason:
                raise
            self.endings.left(responder, record, route)
        except Exception:
            self.endings.refuse(refusals.bug(record.request_id), responder, record)
            raise
        finally:
            if live.task is not None:
                del self.tasks[live.task]
            if live.admission is not None:
                live.admission.ended(record.outcome)
            if request.held is not None or (live.call is not None and live.call.body):
                _let_go(request, live.call)
            record.total = self.clock() - request.at
            if self.tracing is not None and live.trace is not None:
                self.tracing.end(live.trace, record, request.at)
            self.endings.observe(record)

    async def _serve(self, request: Request, responder: Responder, route: Route, live: ActiveCall) -> None:
        account = live.account or await identified(self.current, request)
        record, snapshot = live.record, self.current.snapshot
        record.tenant = account.name
        decider = self.decider
        with decider.arrive(snapshot, account, record, request.at, request.body) as admission:
            live.admission = admission
            metered = self._forwards and decider.metered(account.name)
            if self.large is None or request.held is None or len(request.body) <= LARGE:
                call = _parse(route, request, snapshot, account, record, metered)
            else:
                parse = partial(_parse, route, request, snapshot, account, record, metered)
                call = await self.large.parsed(request.held.owner, parse)
            self._parsed(request, live, call, snapshot)
            asked, trace = call.model, call.trace
            judging = admission.judge(call)
            if judging is not None:
                await judging
            if trace is not None:
                trace.judged = self.clock()
            if call.model != asked:
                asked = _rename(request, live, call)
            piece = self.batcher.piece(call) if call.route.merges and self._forwards else None
            if piece is None or self.batcher.is_batch(piece):  # an answer of any length is passed on as it comes
                every = 0.0
                if call.stream and self._forwards:
                    every = progress_interval(request.fields.get(b"x-weir-progress"), snapshot.policy.server.progress)
                with admission.at_once(call) or await self._wait(responder, call, admission, every) as grant:
                    if call.model != asked:  # it has waited in vain, or another decider has judged it meanwhile
                        record.model = _rename(request, live, call)
                    if trace is not None:
                        trace.taken_at, trace.woken = grant.hold.taken_at, call.woken
                    await self._exchange(request, responder, live, call, admission, grant)
                return
            try:
                part = await self.batcher.answer(piece)
            except (asyncio.CancelledError, Refused):
                settle_unanswered(call, admission, record, self.clock())
                raise
            self._answer_part(part, call, admission, responder, record)

    def _parsed(self, request: Request, live: ActiveCall, call: Call, snapshot: Snapshot) -> None:
        """Take a call that was just parsed. From here on its body is what an engine gets."""
        live.call = call
        if request.subset is not None:
            call.subset = request.subset
        if self._forwards:
            if snapshot.policy.providers and may_leave(call):
                call.leaves = len(call.body)
            call.splits = call.route.generates and call.n == 1 and not call.media
        if snapshot.policy.logging.prompts:
            live.record.request = request.body[:LOGGED_AT_MOST].decode("utf-8", "replace")
        live.unchanged = call.body is request.body
        if call.asked_model and self._forwards:
            live.copy = self.mirrors.drawn(call, request, snapshot, live.record)
        request.body = b""
        if live.trace is not None:
            call.trace = live.trace
            call.trace.parsed = self.clock()

    async def _wait(self, responder: Responder, call: Call, admission: Admission, every: float) -> Grant:
        """Wait for an engine. `every`: seconds between progress comments, 0: none are written."""
        asking = admission.ask(call)
        if every:
            asking = Progress(responder, call, every).of(asking)
        return await asking

    def _answer_part(
        self, part: Exchanged, call: Call, admission: Admission, responder: Responder, record: Record
    ) -> None:
        """A call's own part of an answer that others may share."""
        record.engine, record.attempts = part.engine, part.attempts
        record.queue, record.ttft = part.granted - call.arrived, part.first_byte - call.arrived
        record.status, record.model = part.status, call.model
        body, again = part.body, b""
        if part.status >= 400:
            record.outcome = Outcome.ENGINE_REFUSED if is_refusal(part.status) else Outcome.UPSTREAM
            body, record.reason = engine_error(part.status, body, call.route.path, call.model)
            again = retry_lines(part.status, part.again)
        else:
            record.outcome = Outcome.OK
        if part.prompt_tokens is not None:
            record.settled = True
            told, context = part.prompt_tokens, self.decider.context
            record.prompt_tokens = clamped_usage(call, record.bytes_in, told, 0, context)[0]
        if record.outcome is not Outcome.UPSTREAM:  # else the charge stays open for a refund
            admission.settle(0 if part.status == TOO_BUSY else record.prompt_tokens, self.clock())
        if call.asked_model and part.status < 400:
            body = named(body, call.asked_model)
        headers = answer_lines(call, admission, record, part.engine_name, part.content_type)
        responder.send(part.status, headers + again, body)


def _parse(route: Route, request: Request, snapshot: Snapshot, account: Account, record: Record, metered: bool) -> Call:
    """Return what the client asks for. Large bodies are parsed in a thread. Raises Refused."""
    call = parse(
        route,
        request.fields,
        request.body,
        settings=snapshot.calls,
        request_id=record.request_id,
        tenant=account.name,
        now=request.at,
        cache_salt=account.cache_salt,
        metered=metered,
    )
    if account.claimed:
        claim(call, snapshot.classes, account.claimed)
    return call


def _rename(request: Request, live: ActiveCall, call: Call) -> str:
    """Put the call's model into its body, and begin its copy. Return the model."""
    call.body = with_model(call.body, call.model, request.fields.get(b"content-type", b""), call.route)
    live.unchanged = False
    copy, live.copy = live.copy, None
    if copy is not None:
        copy.begin()
    return call.model


def _let_go(request: Request, call: Call | None) -> None:
    """Release the body; the call may be referenced for longer."""
    if call is not None:
        call.body = b""
    if request.held is not None or request.body:
        request.release()
