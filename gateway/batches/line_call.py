"""Call of one line: through the same pipeline as a client's, with an answer that is kept instead of sent.

The pipeline writes HTTP/1.0 here, whose body ends with the connection: nothing has to be decoded.
"""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from gateway.core.request.body_memory import SMALL, BodyLease, BodyMemory
from gateway.core.request.routes import Route
from gateway.core.request.tenants import Account
from gateway.relay.pipeline import Pipeline
from gateway.relay.wire.messages import Request
from gateway.relay.wire.responder import Responder

PEER = "batch"  # in place of a client's address


class LineAnswer(msgspec.Struct, frozen=True):
    """The answer to a line. `retry_after`: seconds that it names; `helps`: it does not say that no retry can help."""

    status: int
    body: bytes
    retry_after: float | None = None
    helps: bool = True


NO_ROOM = LineAnswer(503, b"", 1.0)  # no memory for its body
BROKEN = LineAnswer(502, b"")  # it began, and did not end


class LineCall:
    """One call, begun when it is made. `answer` comes in any case; `leave` gives the call up."""

    write_paused = False

    def __init__(
        self,
        pipeline: Pipeline,
        bodies: BodyMemory,
        route: Route,
        account: Account,
        fields: dict[bytes, bytes],
        body: bytes,
    ) -> None:
        self.answer: asyncio.Future[LineAnswer] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []
        request = Request(b"POST", route.path.encode(), b"", list(fields.items()), fields, 0, len(body), False, False)
        request.peer = PEER
        request.at = asyncio.get_running_loop().time()
        request.body = body
        self._responder = Responder(self, cast(asyncio.Transport, self), request)
        if len(body) > SMALL:
            request.held = BodyLease(bodies, account.name)
            if request.held.resize(len(body)):
                self._end(NO_ROOM)
                return
        pipeline.begin(request, self._responder, route, account)

    def leave(self) -> None:
        """Give the call up; its hold and its connection are released."""
        if not self._responder.closed:
            self._responder.left("client_gone")
        self._end(BROKEN)

    def _end(self, answer: LineAnswer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    # -- as the responder's transport and connection

    def write(self, data: bytes) -> None:
        self._parts.append(bytes(data))

    def keeps_alive(self, request: Request) -> bool:
        return False

    def answered(self, close: bool) -> None:
        self._end(_answer(b"".join(self._parts)))

    def abandoned(self) -> None:
        self._end(BROKEN)


def _answer(message: bytes) -> LineAnswer:
    head, _, body = message.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    fields = dict(line.split(b": ", 1) for line in lines if b": " in line)
    after = fields.get(b"retry-after")
    helps = fields.get(b"x-should-retry") != b"false"
    return LineAnswer(int(first.split(b" ")[1]), body, None if after is None else float(after), helps)
