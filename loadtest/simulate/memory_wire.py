"""Connections in memory, in place of the gateway's wire on both its sides.

`MemoryClient` and `MemoryReply` have the surface of `gateway.upstream.client.Client` and `Reply`, `Wire` is what a
`Responder` writes to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Literal

from gateway.upstream.client import EngineError
from loadtest.clients.calls import ClientCall
from loadtest.simulate.memory_engine import HANGS, MemoryEngine
from loadtest.simulate.memory_provider import MemoryProvider

REQUEST_ID = b"x-request-id: "
FOR_ANOTHER = b'"do_remote_decode":true'  # a request whose answer another engine writes
REMEMBERED = 1 << 16  # a run of any length has its place in memory
Upstream = MemoryEngine | MemoryProvider


class Sends:
    """Requests that one gateway sent, over all its engines. `again` counts calls sent again though an answer had begun;
    only the last REMEMBERED of those are known. `sending` is told of each request, `failed` of each that was given up
    as its engine's failure, or for the time it took, and whether the engine is taken for dead."""

    def __init__(
        self, sending: Callable[[bytes], None] = lambda _: None, failed: Callable[[bytes, bool], None] = lambda *_: None
    ) -> None:
        self.again = 0
        self.failed, self._sending = failed, sending
        self._relayed: dict[bytes, None] = {}

    def sent(self, request_id: bytes) -> None:
        self._sending(request_id)
        if request_id in self._relayed:
            self.again += 1

    def relayed(self, request_id: bytes) -> None:
        self._relayed[request_id] = None
        if len(self._relayed) > REMEMBERED:
            for oldest in list(islice(self._relayed, REMEMBERED // 16)):  # at once: see gateway.core.engines.fleet
                del self._relayed[oldest]


class MemoryReply:
    """An engine's answer, as `gateway.upstream.client.Reply` shows it."""

    __slots__ = ("_data", "_done", "_early", "_error", "_leave", "_sends", "_waiter", "complete", "framed",
                 "headers", "heard_at", "length", "request_id", "status")  # fmt: skip

    def __init__(self, waiter: asyncio.Future[None], request_id: bytes, sends: Sends) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.length: int | None = None
        self.complete = False
        self.heard_at = 0.0
        self.framed = True  # its end is known
        self._waiter = waiter
        self.request_id = request_id
        self._sends = sends
        self._early: list[bytes] = []
        self._data: Callable[[bytes], None] | None = None
        self._done: Callable[[Exception | None], None] | None = None
        self._error: Exception | None = None
        self._leave: Callable[[], None] | None = None

    @property
    def begun(self) -> bool:
        """Whether the answer has begun, or failed: its sender runs next."""
        return self._waiter.done()

    # -- the engine's side

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None:
        self.status = status
        self.headers = {b"content-type": content_type}
        self.length = length
        self.heard_at = self._waiter.get_loop().time()
        self._early.append(data)
        if not self._waiter.done():
            self._waiter.set_result(None)

    def data(self, data: bytes) -> None:
        self.heard_at = self._waiter.get_loop().time()
        if self._data is not None:
            self._data(data)
        else:
            self._early.append(data)

    def end(self) -> None:
        self.complete = True
        self._leave = None
        self._finish(None)

    def failed(self, kind: Literal["reset", "truncated", "timeout", "stall"], message: str) -> None:
        self._leave = None
        error = self._error = EngineError(kind, message, before_bytes=not self.status)
        if not self._waiter.done():
            self._waiter.set_exception(error)
        else:
            self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        done, self._data, self._done = self._done, None, None
        if done is not None:
            done(error)

    # -- the gateway's side

    def opened(self, leave: Callable[[], None]) -> None:
        """The request is with the engine; `leave` closes its connection."""
        if not self.complete and self._error is None:
            self._leave = leave

    def whole(self) -> bytes:
        """See `Reply.whole`."""
        parts: list[bytes] = []
        self.relay(parts.append, lambda _: None)
        return b"".join(parts)

    def relay(
        self,
        data: Callable[[bytes], None],
        done: Callable[[Exception | None], None],
        whole: Callable[[bytes], None] | None = None,
        sink: object = None,
    ) -> None:
        """See `Reply.relay`; nothing is framed here, so `whole` and `sink` have no use."""
        if self.status < 400 and self.request_id:
            self._sends.relayed(self.request_id)
        early, self._early = self._early, []
        self._data, self._done = data, done
        for piece in early:
            data(piece)
        if self.complete or self._error is not None:
            self._finish(self._error)

    def pause(self) -> None:
        """A client in memory takes whatever comes."""

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises the gateway's EngineError."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parts: list[bytes] = []

        def done(error: Exception | None) -> None:
            if error is None:
                over.set_result(None)
            else:
                over.set_exception(error)

        self.relay(parts.append, done)
        await over
        return b"".join(parts)[:limit]

    def cut(self, kind: Literal["stall"], message: str) -> None:
        """The connection is closed for this reason, in the middle of the answer."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
        self.failed(kind, message)

    def close(self) -> None:
        """Idempotent. Before the answer's end it closes the connection, and the engine aborts."""
        leave, self._leave = self._leave, None
        self._data = self._done = None
        if leave is not None:
            leave()


class MemoryClient:
    """The connections to one engine, as `gateway.upstream.client.Client` makes them."""

    idle = 0

    def __init__(self, engine: Upstream, stall: float, sends: Sends) -> None:
        self.engine = engine
        self.active = 0
        self._stall = stall
        self._sends = sends
        self._unanswered: dict[MemoryReply, None] = {}  # by age: the order of a set is by address
        self._loop = asyncio.get_running_loop()

    async def send(
        self,
        method: bytes,
        path: bytes,
        headers: bytes,
        body: bytes,
        *,
        timeout: float,  # noqa: ASYNC109 # the surface stood in for
        sends: Callable[[], None] = lambda: None,
    ) -> MemoryReply:
        """Return the reply once it has begun, as `Client.send` does. Raises EngineError."""
        loop = self._loop
        waiter: asyncio.Future[None] = loop.create_future()
        at = headers.find(REQUEST_ID) + len(REQUEST_ID)
        request_id = headers[at : headers.find(b"\r\n", at)]
        prefill = FOR_ANOTHER in body  # the call itself is sent after it
        if not prefill:
            self._sends.sent(request_id)
        reply = MemoryReply(waiter, b"" if prefill else request_id, self._sends)
        sends()
        try:
            reply.opened(self.engine.post(path, body, reply, request_id.decode()))
        except ConnectionRefusedError as error:
            raise EngineError("connect", f"cannot connect: {error}", before_bytes=True) from error
        timer = loop.call_later(timeout, self._late, reply)
        self._unanswered[reply] = None
        try:
            await waiter
        except BaseException:
            reply.close()
            raise
        finally:
            timer.cancel()
            self._unanswered.pop(reply, None)
        return reply

    def _late(self, reply: MemoryReply) -> None:
        reply.close()
        self._sends.failed(reply.request_id, False)
        reply.failed("timeout", "the engine did not begin its answer in time")

    def check(self, now: float) -> None:
        """Give up answers of a stopped engine that have been silent for too long."""
        engine = self.engine
        if engine.condition in HANGS and now - engine.changed_at >= self._stall:
            for taker, work in list(engine.open.items()):
                if work is not None and work.begun and isinstance(taker, MemoryReply):
                    taker.cut("stall", f"the engine sent nothing for {self._stall:g} s")

    def abandon(self) -> None:
        """Fail every request whose answer has not begun, as `Client.abandon` does."""
        for reply in [each for each in self._unanswered if not each.begun]:
            reply.close()
            self._sends.failed(reply.request_id, True)
            reply.failed("reset", "the engine is taken for dead")

    def go_by(self, settings: object, api_key: str | None, trust: object = None) -> None:
        """A reload changes nothing about connections in memory."""

    def close(self) -> None:
        """Nothing is kept open."""


class Wire:
    """A client's connection: the transport a Responder writes to, and its owner."""

    __slots__ = ("_begun", "_client_call")

    write_paused = False

    def __init__(self, client_call: ClientCall) -> None:
        self._client_call = client_call
        self._begun = False

    def write(self, data: bytes) -> None:
        """Bytes of HTTP/1.1: the first write begins with a whole head."""
        if self._begun:
            self._client_call.body(data)
            return
        self._begun = True
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(head[9:12])
        fields: dict[bytes, bytes] = {}
        if status != 200:
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b": ")
                fields[name.lower()] = value
        self._client_call.head(status, fields)
        if rest:
            self._client_call.body(rest)

    def leave_by(self, _: float) -> bool:
        return False

    def keeps_alive(self, request: object) -> bool:
        return True

    def answered(self, close: bool) -> None:
        self._client_call.over(True)

    def abandoned(self) -> None:
        self._client_call.over(False)
