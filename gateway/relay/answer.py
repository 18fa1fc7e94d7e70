"""Relay of an engine's answer: bytes in at `data`, bytes out on the client's transport.

Both are synchronous and called from the engine connection's own read callback, so a chunk costs no coroutine wake-up;
backpressure runs the other way through `Reply.pause` and `resume`. A stream is passed on in whole events: when the
engine dies in the middle, the client gets an error event it can parse and no `[DONE]`, never a fake success.
"""

from __future__ import annotations

import asyncio

from gateway.core.admission import refusals
from gateway.core.answer.engine_error import NO_SUCH_ROUTE, engine_error, is_refusal
from gateway.core.answer.error_shape import error_event, shaped
from gateway.core.answer.json_usage import JSONUsage
from gateway.core.answer.naming import AnswerNaming
from gateway.core.answer.sse_usage import SSEUsage, UsageError
from gateway.core.request.call import Call
from gateway.core.request.outcome import BUG, OK, STATUS, Outcome, error_body
from gateway.native.loan import Loan
from gateway.relay.retry_after import retry_after, retry_lines
from gateway.relay.wire.server import Responder
from gateway.upstream.client import EngineError, Reply

ERROR_BODY_AT_MOST = 256 * 1024  # bytes; of a longer one the beginning is read: vLLM may repeat a whole request, twice


class Relay:
    """Answer to one call. After `finished`: `outcome`, `status`, and `usage` (the engine's own token numbers, if it
    told).

    `sent`: bytes of the call's body. `reads` counts what came of a body, in pieces: in a stream no more than one per
    token. `held_up`: the engine was not read for a while, since the client did not read.
    """

    __slots__ = (
        "_call", "_end", "_headers", "_loan", "_naming", "_reads", "_reply", "_responder", "detail", "error", "held_up",
        "outcome", "status", "usage",
    )  # fmt: skip

    def __init__(self, call: Call, reply: Reply, responder: Responder, headers: bytes, sent: int = 0) -> None:
        self._call = call
        self._reply = reply
        self._responder = responder
        self._headers = headers
        self._end: asyncio.Future[None] | None = None
        self.error: EngineError | None = None
        self.status = reply.status
        self.detail = ""  # what an engine said of its own failure, for the log
        self._reads = 0
        self._loan: Loan | None = None  # of a stream whose events the pump may pass on
        self.held_up = False
        # Of a call for a model route or to a provider: the answer has the name that was asked for.
        name = call.answers_as or call.asked_model
        self._naming = AnswerNaming(name, stream=call.stream) if name else None
        self.outcome = BUG
        self.usage = (
            SSEUsage(
                call.route.usage_option and not call.wants_usage, cut=call.usage_cut, single=call.n == 1, sent=sent
            )
            if call.stream
            else JSONUsage()
        )

    def send_whole(self) -> bool:
        """Send a short answer that is here as a whole: one write, no future. False: `finished` has to relay it."""
        reply, usage = self._reply, self.usage
        if reply.status >= 400 or not isinstance(usage, JSONUsage) or not reply.complete or not reply.framed:
            return False
        body = reply.whole()
        usage.whole(body)
        if self._naming is not None:
            body = self._naming.finish(body)
        self._responder.send(reply.status, self._headers, body)
        self.outcome = OK
        return True

    async def finished(self) -> None:
        """Relay to the end of the answer, whichever way it ends. Cancellation leaves the reply to its owner."""
        reply, responder, usage = self._reply, self._responder, self.usage
        if reply.status >= 400:
            if self._call.route.counts and reply.status in NO_SUCH_ROUTE:
                self._estimate()
            else:
                await self._pass_error()
            return
        self._end = asyncio.get_running_loop().create_future()
        responder.flow(self._hold_up, reply.resume)
        if not responder.started:  # else progress comments went before
            length = None if self._call.stream or self._naming is not None else reply.length
            responder.start(reply.status, self._headers, length)
            self._headers = b""
        # Anthropic's streams end without [DONE]: their last event is told by what was read, so all of it is read.
        as_it_came = isinstance(usage, SSEUsage) and not self._call.route.last_event and self._naming is None
        if as_it_came:
            self._loan = reply.relay(self.data, self._done, self.chunk, responder)
        else:
            reply.relay(self.data, self._done)
        await self._end
        self._finish()

    @property
    def reads(self) -> int:
        """Pieces that came of a body."""
        return self._reads if self._loan is None else self._reads + self._loan.reads

    @property
    def finish_reason(self) -> str:
        """The finish reason, of a call for a model route; empty: none was read."""
        return "" if self._naming is None else self._naming.reason

    @property
    def told(self) -> bool:
        """Whether the engine has told its own numbers of the whole answer."""
        usage = self.usage
        if isinstance(usage, SSEUsage):
            usage.sum_up()
            return usage.whole and usage.prompt_tokens is not None
        return usage.prompt_tokens is not None

    def delivered(self) -> bool:
        """Whether the client has the whole answer, though it has not been ended: then that is its outcome.

        A deadline or a drain may come in the moment between the last event and the chunk that ends the body."""
        usage, end = self.usage, self._end
        if end is not None and end.done() and not end.cancelled() and self.error is None:
            self._finish()  # the engine has ended it in this turn of the loop
            return True
        if isinstance(usage, SSEUsage) and usage.delivered(self._call.route.last_event):
            self.outcome = Outcome.OK
            return True
        return False

    def _hold_up(self) -> None:
        self.held_up = True
        self._reply.pause()

    def data(self, data: bytes) -> None:
        """Body bytes from the engine: the hot path."""
        self._reads += 1
        try:
            data = self.usage.feed(data)
        except UsageError as error:
            self._reply.close()
            self._done(EngineError("garbage", str(error)))
            return
        if self._naming is not None:
            data = self._naming.feed(data)
        if data:
            self._responder.write(data)

    def chunk(self, chunk: bytes) -> None:
        """A read that is one whole chunk: the hottest path. What needs no reading goes on as it came."""
        usage = self.usage
        if isinstance(usage, SSEUsage) and usage.passes(chunk):
            self._reads += 1
            self._responder.write_chunk(chunk)
            if self._loan is not None:
                self._loan.count()
        else:
            self.data(chunk[chunk.index(b"\r\n") + 2 : -2])

    def _done(self, error: EngineError | None) -> None:
        self.error = self.error or error
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def _finish(self) -> None:
        reply, responder, usage = self._reply, self._responder, self.usage
        if self.error is not None and self.delivered():  # what breaks after the last event takes nothing away
            responder.end()
            return
        if self.error is None:
            rest = usage.finish()
            if isinstance(usage, SSEUsage) and not usage.ended(self._call.route.last_event):
                self.error = EngineError("truncated", "the stream ended before its last event")
            elif (
                not reply.framed
                and isinstance(usage, JSONUsage)
                and usage.cut
                and b"json" in reply.headers.get(b"content-type", b"")
            ):
                self.error = EngineError("truncated", "the engine closed the connection in the middle of its answer")
            else:
                responder.write(rest if self._naming is None else self._naming.finish(rest))
        if self.error is None:
            responder.end()
            self.outcome = Outcome.OK
            # An error event inside a stream is the engine's own ending: passed on, and not counted as a success.
            if isinstance(usage, SSEUsage) and usage.error:
                self.outcome = Outcome.ENGINE_REFUSED if usage.refused else Outcome.UPSTREAM
            return
        self.outcome = Outcome.TRUNCATED
        self.detail = f"The engine failed in the middle of the answer: {self.error}."
        if self._call.stream:
            advice = STATUS[Outcome.TRUNCATED]
            message = f"The engine failed in the middle of the answer: {self.error}. What came so far is incomplete."
            route, body = self._call.route, error_body(message, advice.type, advice.code)
            responder.write(error_event(route, shaped(route.path, advice.status, body)))
            responder.end(close=True)
        else:
            responder.abort()

    def _estimate(self) -> None:
        """The gateway's own estimate of the prompt's tokens, in place of an engine's count."""
        self.status = 200
        body = b'{"input_tokens":%d}' % self._call.prompt_tokens
        self._responder.send(200, self._headers + b"x-weir-estimated: true\r\n", body)
        self.outcome = Outcome.OK

    async def _error_body(self) -> bytes:
        """The body of an error, or the beginning of a long one. Raises EngineError."""
        read: asyncio.Future[EngineError | None] = asyncio.get_running_loop().create_future()
        body = bytearray()

        def done(error: EngineError | None) -> None:
            if not read.done():
                read.set_result(error)

        def data(piece: bytes) -> None:
            body.extend(piece)
            if len(body) >= ERROR_BODY_AT_MOST:
                done(None)

        self._reply.relay(data, done)
        error = await read
        if error is not None:
            raise error
        return bytes(body[:ERROR_BODY_AT_MOST])

    async def _pass_error(self) -> None:
        """An engine's own error, in the one form our callers know. Raises Refused."""
        try:
            body = await self._error_body()
        except EngineError as error:
            message = f"The engine answered {self.status} and failed in the middle of saying why: {error}."
            raise refusals.wrong_answer(message) from error
        body, self.detail = engine_error(self.status, body, self._call.route.path, self._call.model)
        body = shaped(self._call.route.path, self.status, body)
        if self._responder.started:  # by progress comments
            self._responder.write(error_event(self._call.route, body))
            self._responder.end(close=True)
        else:
            again = retry_after(self._reply.headers)  # an engine knows best when it can do more
            self._responder.send(self.status, self._headers + retry_lines(self.status, again), body)
        self.outcome = Outcome.ENGINE_REFUSED if is_refusal(self.status) else Outcome.UPSTREAM
