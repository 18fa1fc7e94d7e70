"""Forwarding: from a call's grant to the last byte of its answer, which goes from the engine to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import UNSET

from gateway.core.admission.decider import Admission, Decider, Grant
from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused
from gateway.core.request.settlement import possible_output
from gateway.relay.active_call import ActiveCall
from gateway.relay.answer import Relay
from gateway.relay.attempts import Attempts
from gateway.relay.heads import answer_lines, engine_lines
from gateway.relay.settling import note_grant, settle, settle_unanswered
from gateway.relay.tracing import Tracing
from gateway.relay.wire.server import Request, Responder


class Forwarding:
    """The pipeline's exchange where the gateway itself carries the bytes."""

    def __init__(
        self, decider: Decider, attempts: Attempts, clock: Callable[[], float], tracing: Tracing | None = None
    ) -> None:
        self._tracing = tracing
        self._decider = decider
        self._attempts = attempts
        self._clock = clock

    async def exchange(
        self,
        request: Request,
        responder: Responder,
        live: ActiveCall,
        call: Call,
        admission: Admission,
        grant: Grant,
    ) -> None:
        """Send the call, relay its answer, settle it. Raises Refused."""
        record = live.record
        note_grant(record, call, grant, self._clock())
        headers = engine_lines(request, call, record)
        if self._tracing is not None and record.trace_id is UNSET:
            headers += self._tracing.unsampled()
        try:
            reply = await self._attempts.send(request.path, headers, call, grant, record)
        except (asyncio.CancelledError, Refused):
            # A stream's first token is its first byte; of a whole answer nothing is seen before its last.
            since = None if call.stream else call.sent_at
            wrote = 0 if since is None else possible_output(call, 0, self._clock() - since, grant.pace)
            settle_unanswered(call, admission, record, wrote, self._clock())
            raise
        try:
            call.body = b""  # no engine is tried any more
            if request.held is not None:
                request.release()
            now = self._clock()
            record.ttft = now - request.at
            if reply.status < 400:
                grant.first_byte(now)
            content_type = reply.headers.get(b"content-type", b"application/octet-stream")
            relay = Relay(
                call, reply, responder, answer_lines(call, admission, record, grant.engine.name, content_type)
            )
            try:
                if reply.complete or self._attempts.current.policy.deadlines.on_deadline != "cancel":
                    await relay.finished()
                else:
                    await _until_deadline(relay, call.deadline, live)
            except asyncio.CancelledError:
                # OpenAI's client closes at `[DONE]`, before the chunk that ends the body: it has its answer. So it has
                # where its deadline comes, or the drain, in the moment between the two.
                if record.reason == "slow_client" or not relay.delivered():
                    raise
                responder.end()
            finally:
                settle(call, grant, admission, relay, reply.heard_at, record, self._decider, self._clock())
        finally:
            reply.close()


async def _until_deadline(relay: Relay, deadline: float, live: ActiveCall) -> None:
    """The answer, to its end or to the deadline."""
    timer = asyncio.get_running_loop().call_at(deadline, live.leave, "deadline")
    try:
        await relay.finished()
    finally:
        timer.cancel()
