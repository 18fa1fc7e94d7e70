"""Retries and hedging: from a grant to the first bytes of an answer. The only place where a call changes engines.

A failure that the client has seen nothing of is tried again elsewhere, as far as the grant allows. Hedging is a second
attempt while the first is slow to answer: whichever answers first serves the call, the other is cancelled. It needs
room on another engine now (nobody waits twice) and a retry of the budget, so it adds no more load than retries may. A
send that is cancelled closes its connection, and vLLM aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from msgspec import UNSET

from gateway.core.admission import refusals
from gateway.core.admission.decider import SLOWER, Grant, GrantedEngine
from gateway.core.admission.shaping import shape_body
from gateway.core.answer.engine_head import wrong_body
from gateway.core.engines.breaker import Ending, ending_of
from gateway.core.engines.trouble import OWN
from gateway.core.kv_transfer import FETCH, decode_body
from gateway.core.policy.policy import Policy
from gateway.core.policy.snapshot import Current
from gateway.core.request.call import Call
from gateway.core.request.engine_priority import with_priority
from gateway.core.request.model_name import with_model
from gateway.core.request.outcome import Refused
from gateway.core.request.record import Record
from gateway.core.routes.provider_call import dropped_line, provider_body, provider_lines
from gateway.relay.prefilling import Prefilling
from gateway.relay.retry_after import retry_after
from gateway.upstream.client import Client, EngineError, Reply
from gateway.upstream.unread import limited

# Failures of an engine before its first byte, by the policy's names for them: nothing of the answer has been used.
# Statuses that are no answer to the caller: an engine's credentials are the gateway's, and redirects are not followed.
MISPLACED = dict.fromkeys((401, 407), "it takes no key that the gateway has for it") | dict.fromkeys(
    range(300, 400), "it sends callers elsewhere, which is not followed"
)
RETRIED = frozenset((429, 502, 503, 504, *MISPLACED))  # each failure of the connection is retried too
CAUSES = {"connect": "connect", "timeout": "timeout"} | dict.fromkeys(
    ("reset", "garbage", "truncated", "stall", "closed"), "reset"
)
# Statuses of a provider that say nothing of the call: its key, its money, its model, its limits. Its 429 is no 429 of
# the caller's: it counts as a 503.
REFUSED_OUTSIDE = {429: "503"} | {status: str(status) for status in (*MISPLACED, 402, 403, 404, 408)}
# Failures to connect, by the decider's reasons, in words that tell a caller no address.
UNREACHABLE = {
    "tls_expired": "its TLS certificate has expired",
    "tls_name": "its TLS certificate is for another name",
    "tls_untrusted": "its TLS certificate is not trusted",
}
EARLY = 0.005  # seconds that a time-out may come before its time: loops count milliseconds, and timers have slack


class Attempts:
    """`current`: the policy of new calls."""

    def __init__(self, current: Current, clients: Mapping[str, Client], clock: Callable[[], float]) -> None:
        self.current = current
        self.clients = clients
        self.clock = clock
        self.prefilling = Prefilling(clients, clock)

    async def send(self, path: bytes, headers: bytes, call: Call, grant: Grant, record: Record) -> Reply:
        """Send the call; on a failure try another engine within the budget. `grant` is then of the engine that
        answered. `headers` are lines for the engine. Raises Refused."""
        failed: set[str] | None = None
        params = b"" if grant.prefill is None else await self.prefilling.params(path, headers, call, grant, record)
        while True:
            after = None if params else grant.hedge_after()
            reply: Reply | None = None
            again: int | None = None
            try:
                if after is None:
                    sending = self._outside if grant.engine.provider else self._sending
                    reply = _checked(call, await sending(path, headers, call, record, grant, params))
                else:
                    send = partial(self._send, path, headers, call, record)
                    reply = await hedged(grant, send, after)
                    record.engine = grant.engine.id
            except EngineError as error:
                kind, message, told = self._unanswered(call, grant, error)
            else:
                if params and reply.status >= 400 and reply.status not in RETRIED:
                    reply.close()
                    params = self._unfetched(grant, record, params)
                    continue
                kind, message = _heard(grant, reply)
                if not message:
                    return reply
                told = message
                call.sent_at = None
                again = retry_after(reply.headers)
            self._trace(call, grant, kind)
            failed = set() if failed is None else failed
            pause = None if self._over(call) else await _again(grant, kind, record.attempts, failed, reply)
            if reply is not None:
                if kind == "429" and pause is None:
                    return reply  # nobody else can be asked: let the client hear it
                reply.close()
            if pause is None:
                if self._over(call):
                    raise refusals.no_first_byte()
                raise failure(grant.engine, message, told, again)
            failed.add(grant.engine.id)
            if pause:
                await asyncio.sleep(pause)
            params = self._unfetched(grant, record, params)
            await _move(grant, frozenset(failed), call, headers, record)

    def _unanswered(self, call: Call, grant: Grant, error: EngineError) -> tuple[str, str, str]:
        """Report an attempt without an answer. Return its kind, by the policy's names, what happened, and what
        to tell the caller."""
        kind, over = CAUSES[error.kind], self._over(call)
        if grant.engine.provider and kind == "reset" and not error.whole:
            kind = "connect"  # no provider takes money for a part of a request
        if kind != "timeout" or not over or not error.sent:  # else it was at work
            call.sent_at = None
        # It never got there: it costs nothing, and a caller who leaves no time to connect is no fault of the engine's.
        reason = OWN if kind == "timeout" and not error.sent else error.reason
        grant.failed(kind, str(error), reason, over=over)
        told = UNREACHABLE.get(error.reason, "it cannot be reached") if error.kind == "connect" else str(error)
        return kind, str(error), told

    def _unfetched(self, grant: Grant, record: Record, params: bytes) -> bytes:
        """The call's own engine did not answer with a prompt that was read elsewhere: it reads the prompt itself, or
        the next engine does. Return no parameters."""
        if params and record.prefill is not UNSET:
            record.prefill.failure = FETCH
            grant.prefilled(self.clock(), FETCH, "", "")
        return b""

    async def _send(self, path: bytes, headers: bytes, call: Call, record: Record, grant: Grant) -> Reply:
        """Make one attempt of several. Raises EngineError, also for an answer that cannot be the engine's."""
        return _checked(call, await self._sending(path, headers, call, record, grant, b""))

    def _sending(
        self, path: bytes, headers: bytes, call: Call, record: Record, grant: Grant, params: bytes
    ) -> Coroutine[Any, Any, Reply]:
        """Begin one attempt on the grant's engine; the coroutine waits for its answer. `params`: where the engine
        fetches the prompt's KV cache."""
        engine, now = grant.engine, self.clock()
        if call.trace is not None:
            headers += call.trace.attempt(engine.id, now)
        record.attempts += 1
        record.engine = engine.id
        body = shape_body(call.body, call.route.kind, call.shaped) if call.shaped else call.body
        if params:
            body = decode_body(body, params)
        if grant.priority:
            headers, body = with_priority(headers, body, call.route, grant.priority)
        timeout, left = patience(call, grant, self.current.policy), call.deadline - now
        if left < timeout:  # noqa: PLR1730 # min() costs as much as a call
            timeout = left
        if engine.provider:
            path, headers, body = self._for_provider(path, call, body, grant)
            sends = partial(self._sends, call)
            return self.clients[engine.id].send(b"POST", path, headers, body, timeout=timeout, sends=sends)
        if call.sent_at is None:  # else this is a second attempt
            call.sent_at = now
        return self.clients[engine.id].send(b"POST", path, headers, body, timeout=timeout)

    async def _outside(
        self, path: bytes, headers: bytes, call: Call, record: Record, grant: Grant, params: bytes
    ) -> Reply:
        """Make an attempt at a provider. If its caller leaves before the first byte is sent, it costs no money."""
        try:
            return await self._sending(path, headers, call, record, grant, params)
        except asyncio.CancelledError:
            if call.sent_at is None:
                grant.failed("connect", "the caller left before the call was sent", OWN, over=False)
            raise

    def _sends(self, call: Call) -> None:
        """Note that the first byte of an attempt goes out now, unless that of another one has."""
        if call.sent_at is None:
            call.sent_at = self.clock()

    def _for_provider(self, path: bytes, call: Call, body: bytes, grant: Grant) -> tuple[bytes, bytes, bytes]:
        """Return path, head and body as a provider takes them. Raises Refused where the policy no longer has it."""
        provider = self.current.policy.providers.get(grant.engine.provider)
        model = None if provider is None else provider.models.get(call.model)
        if model is None or not call.leaves:
            words = "the policy no longer has it"
            grant.failed("connect", words, OWN, over=False)  # it was not sent: it costs neither tokens nor money
            raise failure(grant.engine, words, words)
        call.answers_as = call.asked_model or call.model
        body, dropped = provider_body(call, body, model)
        call.dropped = dropped_line(dropped)
        return path.removeprefix(b"/v1"), provider_lines(call), body

    def _trace(self, call: Call, grant: Grant, kind: str) -> None:
        """Note the failure of an attempt where the call is traced."""
        if call.trace is not None:
            call.trace.failed(grant.engine.id, kind, self.clock())

    def _over(self, call: Call) -> bool:
        """Whether the call's deadline is why an attempt has ended now, or leaves no time for another."""
        return self.clock() + EARLY >= call.deadline


async def _move(grant: Grant, failed: frozenset[str], call: Call, lines: bytes, record: Record) -> None:
    """Move the grant to another engine. A call for a model route may get another model with it."""
    model, call.answers_as, call.dropped = call.model, "", b""
    await grant.move(failed)
    if call.model != model:
        content_type = lines.partition(b"\r\n")[0].removeprefix(b"content-type: ")  # the first, see engine_lines
        call.body = with_model(call.body, call.model, content_type, call.route)
        record.model = call.model


def _checked(call: Call, reply: Reply) -> Reply:
    """Return the reply. Raises EngineError if it cannot be the engine's answer."""
    wrong = wrong_body(call, reply.status, reply.headers, reply.length) if reply.status < 300 else ""
    if wrong:
        reply.close()
        raise EngineError("garbage", wrong)
    return reply


def patience(call: Call, grant: Grant, policy: Policy) -> float:
    """Seconds that an engine has for a call's first byte; a whole answer's comes with its last."""
    if call.stream:
        return policy.timeouts.first_byte
    return policy.timeouts.first_byte + SLOWER * (call.shaped or call.asked) * grant.tpot


def _heard(grant: Grant, reply: Reply) -> tuple[str, str]:
    """Report the head of an answer. Return the kind of failure that its status is, and words for it; empty: it is an
    answer to the caller. What a provider says of the gateway's key, money or limits is none."""
    status = reply.status
    if status < 300:
        grant.answered(status)
        return "", ""
    if not grant.engine.provider or (status < 500 and status not in REFUSED_OUTSIDE):
        message = answered(grant, status)
        return str(status), message if status in RETRIED else ""
    kind = REFUSED_OUTSIDE.get(status, str(status))
    pause = retry_after(reply.headers) or 0
    message = f"it answered {status}" + (f", and asked for {pause} s without calls" if pause else "")
    grant.failed(kind, message, "", over=False, pause=pause)
    return kind, message


def answered(grant: Grant, status: int) -> str:
    """Tell the grant what its engine has answered. Returns words for it, in case it is a failure."""
    message = f"it answered {status}"
    if status not in MISPLACED:
        grant.answered(status)
        return message
    message += f": {MISPLACED[status]}"
    grant.failed(str(status), message, "", over=False)
    return message


async def _again(grant: Grant, kind: str, attempts: int, failed: set[str], reply: Reply | None) -> float | None:
    """Ask for a further attempt as Grant.again does. If the call is cancelled meanwhile, close its reply."""
    try:
        return await grant.again(kind, attempts, failed)
    except BaseException:
        if reply is not None:
            reply.close()
        raise


def failure(engine: GrantedEngine, message: str, told: str, again: int | None = None) -> Refused:
    """The refusal after an engine's failure. `again`: seconds of the engine's own Retry-After."""
    return refusals.engine_failed(engine.name, engine.id, message, told, again)


async def hedged(
    grant: Grant,
    send: Callable[[Grant], Coroutine[Any, Any, Reply]],
    after: float,
) -> Reply:
    """The first good reply of two attempts; where none is good, the first attempt's end. `grant` is then of the engine
    that the reply is from. Good is whatever is no failure of the engine: one that fails fast must not win.

    The grant is asked once for a second, `after` seconds from now. Raises EngineError.
    """
    first = asyncio.ensure_future(send(grant))
    other: Grant | None = None
    tasks = [first]
    try:
        with contextlib.suppress(TimeoutError):
            async with limited(after):
                await asyncio.wait(tasks)
        if not first.done():
            other = await grant.second(first)
        if other is not None and attempt_ending(first) is not Ending.SUCCESS:  # it may have failed meanwhile
            tasks.append(asyncio.ensure_future(send(other)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not any(attempt_ending(task) is Ending.SUCCESS for task in tasks):  # one has failed: the other decides
            await asyncio.wait(tasks)
        winner = next((task for task in tasks if attempt_ending(task) is Ending.SUCCESS), first)
        if other is not None and winner is not first:
            grant.ending = attempt_ending(first)
            grant.take(other)
            other = None
        tasks.remove(winner)
        return winner.result()
    finally:
        # Nothing is awaited from here on: a cancellation could come in between, and holds and replies would be lost.
        for task in tasks:
            task.cancel()
            task.add_done_callback(_drop)
        if other is not None:
            other.close()


def attempt_ending(task: asyncio.Future[Reply]) -> Ending:
    """Return what an attempt says about its engine so far."""
    if not task.done() or task.cancelled():
        return Ending.NEUTRAL
    return ending_of(None if task.exception() is not None else task.result().status)


def _drop(task: asyncio.Future[Reply]) -> None:
    """End an attempt nobody needs any more: its connection closes, or goes back to the pool if its answer is whole."""
    if task.cancelled():
        return
    error = task.exception()
    if error is None:
        task.result().close()
    elif not isinstance(error, EngineError | Refused):
        raise error
