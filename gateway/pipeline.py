"""The life of one request, top to bottom. Read this first.

    parse -> estimate -> hold on the ledger, or wait in the class's queue -> choose an engine -> forward
    -> first byte (the only place that may change engine) -> relay (no retry past this line) -> settle -> record

`_serve` is that order. Each resource is one `with`, and leaving it, also by cancellation, is its settlement: the
grant gives its hold back, the reply its connection. There is one wait, one retry point and one place that records.
The bytes of an answer never pass through a coroutine: the engine's connection calls `Relay.data`, and that writes to
the client's transport.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import count

from gateway.core.call import Call, CallSettings, Route, parse, route_of
from gateway.core.cors import preflight, shared_lines
from gateway.core.cost import CostModel
from gateway.core.fleet import Fleet
from gateway.core.models import model_list
from gateway.core.outcome import Outcome, Record, Refused, refusal_headers
from gateway.core.policy import Policy
from gateway.core.retries import RetryBudget
from gateway.dispatch import Dispatch, Grant
from gateway.relay import Relay
from gateway.wire.client import Client, EngineError, Reply
from gateway.wire.server import Request, Responder, answer

JSON = b"content-type: application/json\r\n"
# Failures of an engine before its first byte, by the policy's names for them: nothing of the answer has been used.
CAUSES = {"connect": "connect", "timeout": "timeout"} | dict.fromkeys(
    ("reset", "garbage", "truncated", "stall", "closed"), "reset"
)

PASSED_ON = (b"traceparent", b"tracestate")  # request headers an engine may see, beside those written here


class Pipeline:
    """The handler of the data port. `observe` is given the Record of every call once it has ended."""

    def __init__(
        self,
        policy: Policy,
        call_settings: CallSettings,
        fleet: Fleet,
        dispatch: Dispatch,
        cost: CostModel,
        retries: RetryBudget,
        clients: Mapping[str, Client],
        observe: Callable[[Record], None],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.policy = policy
        self.call_settings = call_settings
        self.fleet = fleet
        self.dispatch = dispatch
        self.cost = cost
        self.retries = retries
        self.clients = clients
        self.observe = observe
        self.clock = clock
        self.rng = rng
        self.tasks: set[asyncio.Task[None]] = set()
        self._id_prefix = secrets.token_hex(6)
        self._ids = count(1)

    # -- what the data port calls -------------------------------------------------------------------------------

    def head(self, request: Request) -> bytes | None:
        """Refuse before the body is read what no body can save."""
        route = route_of(request.path)
        if route is None:
            refused = Refused(Outcome.NOT_FOUND, "There is no such route here.", code="route_not_found")
        elif request.method.decode() not in route.methods:
            if request.method == b"OPTIONS":
                allowed = preflight(request.fields, self.policy.cors.origins, route.methods)
                if allowed is not None:
                    return answer(204, allowed, b"")
            allow = b"allow: %b\r\n" % ", ".join(route.methods).encode()
            refused = Refused(Outcome.METHOD_NOT_ALLOWED, f"{route.path} takes {route.methods[0]}.", headers=allow)
        else:
            return None
        record = Record(request_id=self._request_id(request), route=route.path if route else "other")
        record.method = request.method.decode()
        headers = self._refusal(refused, record) + shared_lines(request.fields, self.policy.cors.origins)
        self._finish(record, request.at)
        return answer(refused.status, headers, refused.body())

    def call(self, request: Request, responder: Responder) -> None:
        """A request, whole. GETs are answered here; a call gets a task, which its client's leaving cancels."""
        route = route_of(request.path)
        assert route is not None  # noqa: S101 # head() has refused the others
        if self.policy.cors.origins:
            responder.lines = shared_lines(request.fields, self.policy.cors.origins)
        if route.kind in ("models", "health"):
            self._answer_here(request, responder, route)
            return
        record = Record(request_id=self._request_id(request), route=route.path, bytes_in=len(request.body))
        task = asyncio.get_running_loop().create_task(self._run(request, responder, route, record))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

        def gone(reason: str) -> None:
            record.reason = reason
            task.cancel()

        responder.watch(gone)

    def _answer_here(self, request: Request, responder: Responder, route: Route) -> None:
        if route.kind == "models":
            status, body = model_list(self.fleet, request.path)
        else:
            up = not self.dispatch.leaving and any(engine.up for engine in self.fleet)
            status, body = (200, b"{}") if up else (503, b'{"status":"no engine is up, or shutting down"}')
        responder.send(status, JSON + b"x-request-id: %b\r\n" % self._request_id(request).encode(), body)

    # -- the life of a call -------------------------------------------------------------------------------------

    async def _run(self, request: Request, responder: Responder, route: Route, record: Record) -> None:
        """`_serve`, and what becomes of its exceptions. Nothing but a bug leaves here as an exception."""
        try:
            await self._serve(request, responder, route, record)
        except Refused as refused:
            self._refuse(refused, responder, record)
        except asyncio.CancelledError:
            if not record.reason:
                raise
            self._left(responder, record)
        except Exception:
            message = f"This is a bug in the gateway. Please report request id {record.request_id}."
            self._refuse(Refused(Outcome.BUG, message), responder, record)
            raise
        finally:
            self._finish(record, request.at)

    async def _serve(self, request: Request, responder: Responder, route: Route, record: Record) -> None:
        call = parse(
            route,
            request.fields,
            request.body,
            settings=self.call_settings,
            request_id=record.request_id,
            tenant="anonymous",
            now=request.at,
        )
        self.cost.estimate(call, self.fleet.context(call.model))
        self._describe(call, record)
        async with self.dispatch.admitted(call) as grant:
            record.queue = self.clock() - request.at
            reply = await self._first_byte(request, call, grant, record)
            with closing(reply):
                now = self.clock()
                record.ttft = now - request.at
                if reply.status < 400:
                    grant.first_byte(now)
                relay = Relay(call, reply, responder, self._answer_headers(call, grant, record, reply))
                try:
                    await relay.finished()
                except asyncio.CancelledError:
                    # OpenAI's own client closes at `[DONE]`, before the chunk that ends the body: it has its answer.
                    if record.reason != "client_gone" or not relay.delivered():
                        raise
        self._settle(call, relay, record)

    async def _first_byte(self, request: Request, call: Call, grant: Grant, record: Record) -> Reply:
        """Send the call; on a failure the client has seen nothing of, try another engine within the budget."""
        headers = self._engine_headers(request, call)
        self.retries.call(self.clock())
        failed: set[str] = set()
        while True:
            record.attempts += 1
            engine = grant.engine
            record.engine = engine.id
            timeout = min(self.policy.timeouts.first_byte, call.deadline - self.clock())
            try:
                reply = await self.clients[engine.id].send(b"POST", request.path, headers, call.body, timeout=timeout)
            except EngineError as error:
                kind, message = CAUSES[error.kind], str(error)
                if kind == "connect":
                    engine.down()  # until its health answers again
            else:
                kind, message = str(reply.status), f"it answered {reply.status}"
                if kind not in self.policy.retries.on:
                    return reply
                reply.close()
            failed.add(engine.id)
            now = self.clock()
            if now >= call.deadline:
                raise Refused(Outcome.EXPIRED, "The deadline passed before the engine's first byte.")
            retry = kind in self.policy.retries.on and record.attempts <= self.policy.retries.per_call
            if not retry or not self.retries.take(now):
                raise Refused(Outcome.UPSTREAM, f"Engine {engine.id} failed: {message}.", retry_after=1.0)
            await asyncio.sleep(self.retries.backoff(record.attempts, self.rng))
            await grant.move(frozenset(failed))

    def _settle(self, call: Call, relay: Relay, record: Record) -> None:
        """The engine's own numbers replace the estimate, and teach it; a failed answer teaches nothing."""
        record.outcome = relay.outcome
        record.status = relay.status
        usage = relay.usage
        if usage.prompt_tokens is None:
            return
        record.settled = True
        record.prompt_tokens = usage.prompt_tokens
        record.completion_tokens = usage.completion_tokens or 0
        record.cached_tokens = usage.cached_tokens or 0
        if relay.outcome is Outcome.OK:
            self.cost.learn(call, record.prompt_tokens, record.completion_tokens)

    # -- headers ------------------------------------------------------------------------------------------------

    def _request_id(self, request: Request) -> str:
        """The client's own id if it is sane (1..128 visible ASCII), else one made here."""
        given = request.fields.get(b"x-request-id")
        if given and len(given) <= 128 and given.isascii() and given.decode().isprintable() and b" " not in given:
            return given.decode()
        return f"{self._id_prefix}-{next(self._ids):x}"

    def _engine_headers(self, request: Request, call: Call) -> bytes:
        content_type = request.fields.get(b"content-type") or b"application/json"
        lines = b"content-type: %b\r\nx-request-id: %b\r\n" % (content_type, call.request_id.encode())
        for name in PASSED_ON:
            value = request.fields.get(name)
            if value is not None:
                lines += b"%b: %b\r\n" % (name, value)
        return lines

    @staticmethod
    def _answer_headers(call: Call, grant: Grant, record: Record, reply: Reply) -> bytes:
        return (
            b"content-type: %b\r\nx-request-id: %b\r\nx-weir-engine: %b\r\nx-weir-class: %b\r\nx-weir-queue-ms: %d\r\n"
            % (
                reply.headers.get(b"content-type", b"application/octet-stream"),
                call.request_id.encode(),
                grant.engine.id.encode(),
                call.class_name.encode(),
                record.queue * 1000,
            )
        )

    def _refusal(self, refused: Refused, record: Record) -> bytes:
        record.outcome = refused.outcome
        record.status = refused.status
        record.reason = record.reason or refused.message
        return JSON + b"x-request-id: %b\r\n" % record.request_id.encode() + refusal_headers(refused, self.rng)

    # -- endings ------------------------------------------------------------------------------------------------

    def _refuse(self, refused: Refused, responder: Responder, record: Record) -> None:
        headers = self._refusal(refused, record)
        if responder.started:
            responder.abort()
        else:
            responder.send(refused.status, headers, refused.body())

    def _left(self, responder: Responder, record: Record) -> None:
        """The task was cancelled: the client left, read too slowly, or the drain's time is over."""
        if record.reason == "drain":
            refused = Refused(Outcome.DRAINING, "This gateway is shutting down.", retry_after=1.0)
            headers = self._refusal(refused, record)
            if not responder.started:
                responder.send(refused.status, headers, refused.body())
            elif record.stream:
                responder.write(b"data: %b\n\n" % refused.body())
                responder.end(close=True)
            else:
                responder.abort()
            return
        record.outcome = Outcome.SLOW_CLIENT if record.reason == "slow_client" else Outcome.CLIENT_GONE
        record.status = 499

    @staticmethod
    def _describe(call: Call, record: Record) -> None:
        record.tenant = call.tenant
        record.class_name = call.class_name
        record.model = call.model
        record.stream = call.stream
        record.prompt_tokens = record.estimated_prompt_tokens = call.prompt_tokens
        record.held_tokens = call.cost

    def _finish(self, record: Record, began: float) -> None:
        record.total = self.clock() - began
        self.observe(record)
