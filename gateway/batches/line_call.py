"""Call of one line: through the same pipeline as a client's, with an answer that is kept instead of sent.

What has come of a body counts in `body.memory`. Where it is more than HIGH, or memory is short, its engine waits until
the disk has it.
"""

from __future__ import annotations

import asyncio
from typing import BinaryIO

import msgspec

from gateway.batches.site import BatchSite
from gateway.core.batches.results import MAX_ANSWER
from gateway.core.request.body_memory import SMALL, BodyLease
from gateway.core.request.outcome import MODEL_AWAY, Outcome
from gateway.core.request.routes import Route
from gateway.core.request.tenants import Account
from gateway.relay.inner_client import InnerClient, inner_request
from gateway.shared.protocol import NO_MEMORY
from gateway.shared.threads import in_thread

PEER = "batch"  # in place of a client's address
HIGH = 256 * 1024  # bytes of an answer that are held in memory
WITHOUT_ENGINE = frozenset(
    reason.encode() for reason in (Outcome.NO_ENGINE.value, Outcome.MODEL_UNAVAILABLE.value, NO_MEMORY)
)


class LineAnswer(msgspec.Struct, frozen=True):
    """The answer to a line. Its body is `body`, or stands in the file `spilled`, as long as its call is not closed.
    `retry_after`: seconds that it names; `helps`: it does not say that no retry can help. `away`: no engine has the
    line's model."""

    status: int
    body: bytes
    retry_after: float | None = None
    helps: bool = True
    spilled: BinaryIO | None = None
    away: bool = False


NO_ROOM = LineAnswer(503, b"", 1.0)  # no memory for its body
AWAY = LineAnswer(503, b"", 10.0, away=True)  # the machine that had its model may come back
BROKEN = LineAnswer(502, b"")  # it began, and did not end
TOO_LONG = LineAnswer(200, b"", helps=False)  # its body is more than a line may have
STORAGE_FULL = LineAnswer(200, b"", helps=False)  # its body is more than its tenant may keep


class LineCall:
    """Call of one batch line, started by the constructor. `answer` always resolves: to the answer, or to the OSError of
    the disk. `close` cancels what is left of the call and discards its answer."""

    def __init__(
        self, site: BatchSite, route: Route, account: Account, fields: dict[bytes, bytes], body: bytes
    ) -> None:
        self.answer: asyncio.Future[LineAnswer] = asyncio.get_running_loop().create_future()
        self._site = site
        self._tenant = account.name
        self._head: bytes | None = None
        self._parts: list[bytes] = []  # of the body, in memory
        self._held = 0  # bytes of them, and of those that are being written
        self._spilled = 0  # bytes on the disk
        self._file: BinaryIO | None = None
        self._writer: asyncio.Task[None] | None = None
        self._whole = self._closed = False
        self._lease = BodyLease(site.bodies, account.name)
        request = inner_request(PEER, route.path, fields, body)
        self._client = InnerClient(request, self._write, self._answered, self._abandoned)
        if len(body) > SMALL:
            request.held = BodyLease(site.bodies, account.name)
            if request.held.resize(len(body)):
                self._end(NO_ROOM)
                return
        site.pipeline.begin(request, self._client.responder, route, account)

    def close(self) -> None:
        """Cancel the call, and release its hold, connection, memory and disk space."""
        self._end(BROKEN)
        self._client.leave()
        self._closed = True
        if self._writer is None:
            self._release()

    def _end(self, answer: LineAnswer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def _write(self, data: bytes) -> None:
        if self._head is None:
            self._head, _, data = bytes(data).partition(b"\r\n\r\n")
        if not data or self.answer.done():
            return
        self._parts.append(bytes(data))
        self._held += len(data)
        if self._held + self._spilled > MAX_ANSWER:
            self._end(TOO_LONG)
        elif not self._counted() or self._held > HIGH:
            self._spill()

    def _answered(self) -> None:
        self._whole = True
        if self._file is not None and self._parts:
            self._begin_to_write()
        elif self._writer is None:
            self._tell()

    def _abandoned(self) -> None:
        self._end(BROKEN)

    # -- its body

    def _counted(self) -> bool:
        return not self._lease.resize(self._held if self._held > SMALL else 0)

    def _spill(self) -> None:
        if not self._site.room(self._tenant):
            self._end(STORAGE_FULL)
        elif self._writer is None:
            self._client.write_paused = True
            self._client.responder.paused()
            self._begin_to_write()

    def _begin_to_write(self) -> None:
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_out())

    async def _write_out(self) -> None:
        try:
            while self._parts and not self._closed:
                parts, self._parts = self._parts, []
                size = sum(map(len, parts))
                await in_thread(self._append, parts)
                self._held -= size
                self._spilled += size
                self._site.spilled[self._tenant] += size
                self._counted()
        except OSError as error:
            if not self.answer.done():
                self.answer.set_exception(error)
        finally:
            self._writer = None
            self._client.write_paused = False
            if self._closed:
                self._release()
            elif self._whole:
                self._tell()
            else:
                self._client.responder.resumed()

    def _append(self, parts: list[bytes]) -> None:
        if self._file is None:
            self._file = self._site.folder.spill()
        self._file.writelines(parts)

    def _tell(self) -> None:
        """The answer is whole."""
        first, *lines = (self._head or b"").split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines if b": " in line)
        reason = fields.get(b"x-weir-reason")
        if reason == MODEL_AWAY.encode():
            self._end(AWAY)
            return
        after = fields.get(b"retry-after")
        helps = fields.get(b"x-should-retry") != b"false"
        self._end(
            LineAnswer(
                int(first.split(b" ")[1]), b"".join(self._parts), None if after is None else float(after), helps,
                self._file, away=reason in WITHOUT_ENGINE,
            )
        )  # fmt: skip

    def _release(self) -> None:
        self._parts.clear()
        self._lease.release()
        self._site.spilled[self._tenant] -= self._spilled
        self._spilled = 0
        if self._file is not None:
            self._file.close()
            self._file = None
