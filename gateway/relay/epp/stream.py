"""Stream of external processing: one request of a client, from its head to the end of its answer.

    headers, body -> the pipeline's answer: a refusal, or a grant -> response headers, body -> report of the end

The stream's end is the client's leaving: a waiting call is withdrawn, a running one is reported. Each message of the
proxy is read while the call waits, so that its end is seen at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Self

import msgspec

from gateway.core.engines.origin import parse_origin
from gateway.core.request.body_memory import SMALL, BodyMemory
from gateway.core.request.routes import route_of
from gateway.relay.epp import messages
from gateway.relay.epp.endpoints import Endpoints
from gateway.relay.epp.lending import EndReport, Headers, LentCall, headers_of
from gateway.relay.epp.request import BadHead, request_of, unusable_mode, unwanted
from gateway.relay.epp.response import KINDS, ResponseReader
from gateway.relay.inner_client import InnerClient
from gateway.relay.pipeline import Pipeline
from gateway.relay.wire.messages import Request, ServerSettings, WireError, leased, refusal
from gateway.upstream.failures import UnknownName

LEFT = object()  # the proxy has ended its half of the stream


class Misordered(ValueError):
    """A message that cannot come now; the text says which can."""


class Picker(msgspec.Struct, frozen=True):
    """Parts that all streams of a picker share."""

    pipeline: Pipeline
    bodies: BodyMemory
    endpoints: Endpoints
    settings: Callable[[], ServerSettings]
    eof: object  # what grpc.aio's `read` returns at the end of the proxy's half
    trusted: bool  # proxies may be told engines' keys


class PickerStream:
    """Stream of one request. `run` returns at its end. Raises Misordered, after which nothing is held."""

    def __init__(self, picker: Picker, channel: Any) -> None:
        self._picker = picker
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Task[Any] | None = None
        self._mode = self._answer_mode = messages.DUPLEX
        self._trailers = False  # of the request: they follow its body

    async def run(self) -> None:
        try:
            await self._run()
        except BadHead as error:
            raise Misordered(str(error)) from error
        finally:
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.wait((self._reading,))  # so that its exception, if any, has been seen

    async def _run(self) -> None:
        picker = self._picker
        first = await self._next(picker.settings().headers_timeout)
        if first is None or first is LEFT:
            return
        if messages.kind_of(first) != "request_headers":
            raise Misordered("the first message of a stream is request_headers")
        if first.observability_mode:
            raise Misordered("observability_mode: nothing can be decided for a proxy that takes no answers")
        self._mode, self._answer_mode = messages.modes_of(first)
        ended = first.request_headers.end_of_stream
        classes = picker.pipeline.current.policy.classes
        request = request_of(messages.fields_of(first.request_headers), classes, ended=ended)
        if not ended and self._mode not in (messages.BUFFERED, messages.DUPLEX):
            await self._refuse(unusable_mode(messages.mode_name(self._mode)))
            return
        request.subset = await picker.endpoints.allowed(messages.subset_of(first))
        refused: Any = picker.pipeline.head(request)
        if refused is None:
            try:
                refused = await self._body(request, ended)
            except WireError as error:
                refused = refusal(error, request.path)
        if refused is None:
            await self._decided(request)
            return
        request.release()
        if refused is not LEFT:
            await self._refuse(refused)

    # -- the request --------------------------------------------------------------------------------------------

    async def _body(self, request: Request, ended: bool) -> object:
        """Read the request's body, unless it has none. Return LEFT if the proxy has left, else None. Raises
        WireError."""
        settings, body = self._picker.settings(), bytearray()
        limit = min(request.limit, settings.max_body)
        until = min(request.at + settings.body_total, self._picker.pipeline.body_by(request))
        _check(request.length, limit)
        if not ended and self._mode == messages.BUFFERED:
            await self._channel.write(messages.go_on("request_headers"))
        while not ended:
            message = await self._next(min(settings.body_timeout, until - self._loop.time()))
            if message is LEFT:
                return LEFT
            if message is None:
                raise WireError(408, "the rest of the body did not come in time")
            kind = messages.kind_of(message)
            if kind == "request_trailers":
                self._trailers = ended = True
            elif kind == "request_body":
                body += message.request_body.body
                ended = message.request_body.end_of_stream or self._mode == messages.BUFFERED
            else:
                raise Misordered(f"{kind or 'an empty message'} came before the end of the request's body")
            _check(len(body), limit)
            if len(body) > SMALL:
                owner = request.owner or request.peer
                request.held = leased(request.held, self._picker.bodies, owner, len(body))
        request.body = bytes(body)
        return None

    async def _decided(self, request: Request) -> None:
        """Have the pipeline decide, and tell the proxy."""
        body, picker = request.body, self._picker
        reply = KeptReply(request)
        try:
            picker.pipeline.call(request, reply.client.responder)
            reading = self._read_on()
            await asyncio.wait((reading, reply.answer), return_when=asyncio.FIRST_COMPLETED)
            if not reply.answer.done():
                if reading.result() is not picker.eof:
                    raise Misordered(f"{messages.kind_of(reading.result())} came before the picker's answer")
                return
            answer = reply.answer.result()
        except BaseException:
            if request.lent is not None:  # in the moment its stream ended
                request.lent.end(EndReport(None, "client_gone"))
            raise
        finally:
            reply.client.leave()
        lent = request.lent
        if lent is None:
            await self._channel.write(messages.immediate(answer.status, answer.headers, answer.body))
            return
        route = route_of(request.path)
        assert route is not None  # noqa: S101 # the pipeline has forwarded it
        response = ResponseReader(lent, self._answer_mode, route)
        try:
            await self._granted(request, lent, body)
            await self._respond(response)
        finally:
            response.close()

    async def _granted(self, request: Request, lent: LentCall, own: bytes) -> None:
        """Tell the proxy where the request goes. `own`: the client's body."""
        origin = parse_origin(lent.url)
        try:
            endpoint = await self._picker.endpoints.of(origin)
        except UnknownName as error:
            message = f"the engine's address is not known: {error}"
            await self._refuse(refusal(WireError(503, message), request.path))
            return
        wanted = [each for each in lent.for_engine if self._picker.trusted or each[0] != b"authorization"]
        if origin.base_path:
            path = origin.base_path.encode() + request.path
            wanted.append((b":path", b"%b?%b" % (path, request.query) if request.query else path))
        removed = unwanted(request, wanted)
        write = self._channel.write
        if self._mode == messages.BUFFERED:
            if lent.body is not None:
                wanted.append((b"content-length", b"%d" % len(lent.body)))
            message = messages.destined("request_body", endpoint, wanted, removed)
            if lent.body is not None:
                messages.replace(message, "request_body", lent.body)
            await write(message)
            return
        await write(messages.destined("request_headers", endpoint, wanted, removed))
        for piece in messages.pieces("request_body", own if lent.body is None else lent.body, not self._trailers):
            await write(piece)
        if self._trailers:
            await write(messages.go_on("request_trailers"))

    # -- the response -------------------------------------------------------------------------------------------

    async def _respond(self, response: ResponseReader) -> None:
        """Pass the response on to the proxy's end of the stream."""
        while (message := await self._next(math.inf)) is not LEFT:
            kind = messages.kind_of(message)
            if kind == "request_trailers" and self._mode == messages.BUFFERED and not response.begun:
                await self._channel.write(messages.go_on(kind))
                continue
            if kind not in KINDS or response.begun == (kind == "response_headers"):
                raise Misordered(f"{kind or 'an empty message'} came where the engine's answer goes on")
            for each in response.takes(message):
                await self._channel.write(each)

    # -- messages -----------------------------------------------------------------------------------------------

    def _read_on(self) -> asyncio.Task[Any]:
        """Return the read that is under way, begun now if there is none: a stream has one at a time."""
        if self._reading is None:
            self._reading = self._loop.create_task(self._channel.read())
        return self._reading

    async def _next(self, within: float) -> Any:
        """Return the next message, LEFT at the end of the proxy's half, or None after `within` seconds."""
        if within == math.inf and self._reading is None:  # the whole of an answer: a task for each piece would be dear
            message = await self._channel.read()
            return LEFT if message is self._picker.eof else message
        reading = self._read_on()
        await asyncio.wait((reading,), timeout=None if within == math.inf else max(0.0, within))
        if not reading.done():
            return None
        self._reading = None
        message = reading.result()
        return LEFT if message is self._picker.eof else message

    async def _refuse(self, written: bytes) -> None:
        answer = Answer.read(written)
        await self._channel.write(messages.immediate(answer.status, answer.headers, answer.body))


def _check(size: int, limit: int) -> None:
    """Raise WireError for a body that is too large."""
    if size > limit:
        raise WireError(413, f"the body is over the limit of {limit} bytes")


# -- an answer of the pipeline, kept whole ----------------------------------------------------------------------------

_FRAMING = frozenset({b"content-length", b"connection"})


class Answer(msgspec.Struct, frozen=True):
    """Whole answer. `headers` are without those of framing."""

    status: int
    headers: Headers
    body: bytes

    @classmethod
    def read(cls, written: bytes) -> Self:
        """Read an answer as the pipeline writes it."""
        head, _, body = written.partition(b"\r\n\r\n")
        first, _, lines = head.partition(b"\r\n")
        headers = [each for each in headers_of(lines) if each[0] not in _FRAMING]
        return cls(int(first.split(b" ")[1]), headers, body)


class KeptReply:
    """Answer to one call of a picker. `answer` resolves once the answer is whole."""

    def __init__(self, request: Request) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._written = bytearray()
        self.client = InnerClient(request, self._written.extend, self._answered, self._abandoned)

    def _answered(self) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer.read(bytes(self._written)))

    def _abandoned(self) -> None:
        """Nothing is broken off here: an answer is sent whole or not at all."""
        raise RuntimeError("an answer to a picker was broken off")
