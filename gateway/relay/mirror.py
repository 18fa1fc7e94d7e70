"""Mirrors: copies of a share of a model route's calls, sent to another model, whose answers are thrown away.

A copy is a call of the tenant `MIRROR` and the class `batch`. It waits for nobody: without room at once it is dropped
(`Dispatch.queue`). So no caller ever waits for one, and a copy is charged to nobody. MOST copies of MOST_BYTES together
run in one process; beyond that none is made. Nothing downstream slows the answers, so `Pace` does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from msgspec import UNSET

from gateway.core.answer.naming import finish_reason
from gateway.core.policy.snapshot import Snapshot
from gateway.core.request.call import Call
from gateway.core.request.model_name import with_model
from gateway.core.request.outcome import kind_of
from gateway.core.request.record import COPY, MEMBER, Record
from gateway.core.request.routes import Route
from gateway.core.request.tenants import Account
from gateway.relay.active_call import ActiveCall
from gateway.relay.inner_client import InnerClient, inner_request
from gateway.relay.wire.messages import Request
from gateway.relay.wire.responder import Responder

MOST = 64
MOST_BYTES = 16 * 1024**2  # of their bodies
CLASS = b"batch"
PEER = "mirror"  # in place of a client's address
KEPT = 64  # bytes of an answer's last piece: a finish reason may be cut in two

TURN = 0.25  # seconds
PER_TURN = 1024**2  # bytes of all copies' answers; 64 copies of 50 tokens a second are a quarter of it
RESUMED = 4  # answers that are read again in a turn: a read may be 256 KiB

Begin = Callable[[Request, Responder, Route, Account], ActiveCall]


class Mirrors:
    """Copies under way. `begin` starts a call."""

    def __init__(self, begin: Begin, rng: random.Random) -> None:
        self._begin = begin
        self._rng = rng
        self._copies: set[MirrorCopy] = set()
        self._bytes = 0
        self.pace = Pace()

    def drawn(self, call: Call, request: Request, snapshot: Snapshot, record: Record) -> MirrorCopy | None:
        """Return a copy of the call, to be begun; None: its route has no mirror, chance spares it, or there are too
        many. The request must still have its body."""
        route = snapshot.policy.models.get(call.asked_model)
        if route is None or route.mirror is None or self._rng.random() >= route.mirror.share:
            return None
        if len(self._copies) >= MOST or self._bytes + len(request.body) > MOST_BYTES:
            return None
        content_type = request.fields.get(b"content-type", b"application/json")
        body = with_model(request.body, route.mirror.model, content_type, call.route)
        return MirrorCopy(self, call, content_type, body, snapshot.tenants.mirror, record)

    def begin(self, copy: MirrorCopy) -> None:
        """Start a copy's call."""
        self._copies.add(copy)
        self._bytes += copy.size
        copy.request.at = asyncio.get_running_loop().time()
        copy.live = self._begin(copy.request, copy.responder, copy.route, copy.account)
        copy.live.record.mirrored, copy.live.record.asked_model = COPY, copy.name
        copy.member.mirrored = MEMBER

    def ended(self, copy: MirrorCopy) -> None:
        """Forget a copy whose answer has ended."""
        if copy in self._copies:
            self._copies.remove(copy)
            self._bytes -= copy.size
            self.pace.waiting.pop(copy.responder, None)

    def close(self) -> None:
        """Cancel all copies."""
        for copy in list(self._copies):
            copy.close()


class Pace:
    """Bound of the bytes of copies' answers that are read in a turn, so that reading them never holds up callers.

    `waiting`: answers that are read again in a later turn, the first first.
    """

    def __init__(self) -> None:
        self.waiting: dict[Responder, None] = {}
        self._read = 0
        self._timer: asyncio.TimerHandle | None = None  # the end of a turn in which something was read

    def count(self, size: int, responder: Responder) -> None:
        """Count bytes of an answer. Past the turn's bound, `responder` is paused until its turn comes."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TURN, self._next)
        self._read += size
        if self._read > PER_TURN and responder not in self.waiting:
            self.waiting[responder] = None
            responder.paused()

    def _next(self) -> None:
        self._timer, self._read = None, 0
        if self.waiting:
            self._timer = asyncio.get_running_loop().call_later(TURN, self._next)
        for responder in list(self.waiting)[:RESUMED]:
            del self.waiting[responder]
            responder.resumed()


class MirrorCopy:
    """Copy of a call; of the answer, the finish reason alone is read. `member`: record of the call itself, which
    counts beside the copy unless that finds no room: what a mirror does not get is not to look slow at a member."""

    def __init__(
        self, mirrors: Mirrors, call: Call, content_type: bytes, body: bytes, account: Account, member: Record
    ) -> None:
        self.live: ActiveCall | None = None
        self.size = len(body)
        self._mirrors = mirrors
        self.member = member
        self.route, self.name = call.route, call.asked_model
        self.account = account
        self._last = b""
        fields = {b"content-type": content_type, b"x-weir-class": CLASS}
        self.request = inner_request(PEER, call.route.path, fields, body)
        self._client = InnerClient(self.request, self._write, self._ended, self._ended)
        self.responder = self._client.responder

    def begin(self) -> None:
        self._mirrors.begin(self)

    def close(self) -> None:
        """Give the copy up."""
        self._client.leave()
        self._ended()

    def _ended(self) -> None:
        if self.live is not None and kind_of(self.live.record.outcome) == "refused":
            self.member.mirrored = UNSET
        self._mirrors.ended(self)

    def _write(self, data: bytes) -> None:
        self._mirrors.pace.count(len(data), self.responder)
        read = self._last + bytes(data)
        found = finish_reason(read)
        if found and self.live is not None:
            self.live.record.finish = found
        self._last = read[-KEPT:]
