"""Forwarding: from a call's grant to the last byte of its answer, which goes from the engine to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing

import msgspec
from msgspec import UNSET

from gateway.core.admission.decider import Admission, Decider, Grant
from gateway.core.answer.json_usage import JSONUsage
from gateway.core.engines.breaker import Ending
from gateway.core.request.call import Call
from gateway.core.request.model_name import with_model
from gateway.core.request.outcome import Refused
from gateway.core.request.record import Record
from gateway.core.request.settlement import clamped_usage
from gateway.relay.active_call import ActiveCall
from gateway.relay.answer import Relay
from gateway.relay.attempts import Attempts, failure
from gateway.relay.batcher import Exchanged
from gateway.relay.heads import answer_lines, engine_lines
from gateway.relay.retry_after import retry_after
from gateway.relay.settling import note_grant, settle, settle_unanswered
from gateway.relay.tracing import Tracing
from gateway.relay.wire.server import Request, Responder
from gateway.upstream.client import EngineError, Reply

NO_FIELDS: dict[bytes, bytes] = {}  # of a request that was sent
WHOLE_AT_MOST = 64 * 1024**2  # bytes of a merged answer
JSON_TYPE, BYTES = b"application/json", b"application/octet-stream"
METADATA = b"metadata"  # vLLM's header with the shapes and the usage of vectors that are given as bytes
POOLED = ("embedding", "pooling")  # kinds of routes


class Forwarding(msgspec.Struct, eq=False):
    """The pipeline's exchange where the gateway itself carries the bytes."""

    _decider: Decider
    _attempts: Attempts
    _clock: Callable[[], float]
    _tracing: Tracing | None = None

    async def exchange(
        self, request: Request, responder: Responder, live: ActiveCall, call: Call, admission: Admission, grant: Grant
    ) -> None:
        """Send the call, relay its answer, settle it. Raises Refused."""
        record = live.record
        note_grant(record, call, grant, self._clock())
        headers = engine_lines(request, call, record)
        if self._tracing is not None and record.trace_id is UNSET:
            headers += self._tracing.unsampled()
        reader = _reader(grant)  # known only until the prompt is read
        try:
            reply = await self._attempts.send(request.path, headers, call, grant, record)
        except (asyncio.CancelledError, Refused):
            settle_unanswered(call, admission, record, self._clock(), pace=grant.pace, since=call.sent_at)
            raise
        try:
            # No engine is tried any more: a stream of minutes keeps nothing of what was sent.
            call.body = headers = b""
            request.fields = NO_FIELDS
            if request.held is not None:
                request.release()
            now = self._clock()
            record.ttft = now - request.at
            if reply.status < 400:
                grant.first_byte(now)
                if call.stream and call.route.kind == "response" and call.sent_at is not None:
                    # vLLM begins it before it reads the prompt: the first token has the time of a first byte.
                    reply.wait_until(call.sent_at + self._attempts.current.policy.timeouts.first_byte)
            lines = answer_lines(call, admission, record, grant.engine.name, body_type(reply, BYTES), reader)
            relay = Relay(call, reply, responder, lines + _metadata(call, reply), record.bytes_in)
            del lines
            try:
                if not relay.send_whole():
                    if not reply.complete and self._attempts.current.policy.deadlines != "run":
                        responder.leave_by(call.deadline)
                    await relay.finished()
            except asyncio.CancelledError:
                if record.reason == "slow_client" or not relay.delivered():
                    raise
                responder.end()
            finally:
                if call.asked_model and relay.finish_reason:
                    record.finish = relay.finish_reason
                settle(call, grant, admission, relay, reply.heard_at, record, self._decider, self._clock())
        finally:
            reply.close()

    # -- for the batcher ------------------------------------------------------------------------------------------

    async def exchange_whole(self, call: Call) -> Exchanged:
        """Admit a call of the batcher like any other, send it, and return its whole answer. The calls that share it
        are judged and charged one by one."""
        asked = call.model
        try:
            with await self._decider.ask(call) as grant:
                if call.model != asked:  # it has waited in vain for a member of its route
                    call.body = with_model(call.body, call.model, b"application/json", call.route)
                return await self._whole(call, grant)
        finally:
            call.body = b""  # whoever still knows the call

    async def _whole(self, call: Call, grant: Grant) -> Exchanged:
        record = Record(request_id=call.request_id, route=call.route.path)
        headers = b"content-type: application/json\r\nx-request-id: %b\r\n" % call.request_id.encode()
        granted = self._clock()
        path = call.route.path.encode()
        with closing(await self._attempts.send(path, headers, call, grant, record)) as reply:
            first_byte = self._clock()
            try:
                body = await reply.read(WHOLE_AT_MOST)
            except EngineError as error:
                grant.ending = Ending.FAILURE
                call.sent_at = None
                raise failure(grant.engine, str(error), str(error)) from error
        usage = JSONUsage()
        if reply.status < 400:
            grant.first_byte(first_byte)
            usage.whole(body)
            told = call.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
            grant.wrote(clamped_usage(call, len(call.body), told, 0, self._decider.context)[0])
            if usage.prompt_tokens is not None:
                self._decider.learn(call, usage.prompt_tokens, 0)
        return Exchanged(
            status=reply.status,
            body=body,
            engine=record.engine,
            engine_name=grant.engine.name,
            content_type=body_type(reply, JSON_TYPE),
            again=retry_after(reply.headers),
            attempts=record.attempts,
            granted=granted,
            first_byte=first_byte,
            prompt_tokens=usage.prompt_tokens,
        )


def body_type(reply: Reply, unsaid: bytes) -> bytes:
    """Type of an answer's body, as its client gets it. `unsaid`: where the engine names none. Errors are written here,
    in JSON, and so are estimates in their place."""
    return JSON_TYPE if reply.status >= 400 else reply.headers.get(b"content-type", unsaid)


def _metadata(call: Call, reply: Reply) -> bytes:
    """The answer's line with what vLLM tells of vectors that are given as bytes; empty: nothing."""
    found = reply.headers.get(METADATA)
    return b"" if found is None or call.route.kind not in POOLED else b"metadata: %b\r\n" % found


def _reader(grant: Grant) -> str:
    """Name of the engine that reads the prompt for another; empty: none does."""
    half = grant.prefill
    return half.engine.name if half is not None and half.engine is not None else ""
