"""State that all connections of one server share: open connections, and seats that are left.

A connection takes a seat. Seats are bounded in all and for each address, so that no client keeps the others out. Where
none is left, the connection that has been idle for longest gives up its own; only then is a newcomer refused. Those
refused hold no seat while they read why.

On a port with a token, an address's share is of those that have not shown it, and they give up their seats first
(`gateway/shared/strangers.py`).

Relays of one gateway accept from the same sockets. One that is full leaves newcomers to those that are not; where all
are, it does what one server does alone.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from gateway.core.request.body_memory import BodyMemory
from gateway.relay.wire.http1 import KnownHeads
from gateway.relay.wire.messages import Request, ServerSettings, WireError
from gateway.relay.wire.responder import Responder
from gateway.relay.wire.seat_board import RelaySeats
from gateway.shared.strangers import UNIX, Strangers

IDLE_AT_LEAST: Final = 1.0  # seconds before a connection is given up for another: a flood must not evict newcomers
LOOK_EVERY: Final = 0.1  # seconds at least between two searches for idle connections
FOUND_AT_ONCE: Final = 64  # idle connections that one search yields


class Handler(Protocol):
    """Handler of a server's requests."""

    def head(self, request: Request) -> bytes | None:
        """Headers complete, body unread. None to go on, or a finished `answer(...)` that ends the request unread."""

    def body_by(self, request: Request) -> float:
        """Loop time after which the body is of no use. Called if the body does not come with its head."""

    def call(self, request: Request, responder: Responder) -> None:
        """The request is complete. Synchronous; answers through the responder, now or later, and releases the request
        when it needs the body no more."""


class OpenConnection(Protocol):
    """A connection, as its server sees it. `peer`: its client's address, or `unix`."""

    peer: str

    @property
    def idle_since(self) -> float:
        """The loop's time since when nothing is under way on it; infinity where something is."""

    def close_if_idle(self) -> None:
        """Draining: a connection without a request has no reason to stay."""

    def warn(self) -> None:
        """Draining is nearly over: tell whoever answers here."""

    def expel(self) -> None:
        """Draining is over."""


class Shared:
    """State that all connections of one server share. `clock` returns the loop's time. `board`: seats of the relays
    that accept from the same sockets; None: no other relay does."""

    def __init__(
        self,
        handler: Handler,
        settings: ServerSettings,
        bodies: BodyMemory,
        clock: Callable[[], float],
        board: RelaySeats | None = None,
    ) -> None:
        self.handler = handler
        self.settings = settings
        self.heads = KnownHeads()
        self.bodies = bodies
        self.open: set[OpenConnection] = set()
        self.empty = asyncio.Event()
        self.empty.set()
        self.draining = False
        self.gently = False  # draining, and another has the listening sockets: what is open is served once more
        self.refusals: dict[int, int] = {}
        self.seats = 0  # taken
        self._strangers = Strangers()
        self.board = board
        self._clock = clock
        self._peers: dict[str, int] = {}  # seats taken by address
        self._idle: deque[tuple[OpenConnection, float]] = deque()  # found by the last search, the longest idle first
        self._searched: tuple[str | None, float] = (None, -math.inf)  # for whom, when

    def joins(self, member: OpenConnection, *, seated: bool) -> None:
        """A connection is there."""
        self.open.add(member)
        self.empty.clear()
        if seated:
            self.seats += 1
            self._peers[member.peer] = self._peers.get(member.peer, 0) + 1
            settings = self.settings
            if settings.strangers:
                self._strangers.add(member, member.peer, settings.strangers, settings.max_per_peer)
            self.tell_board()

    def leaves(self, member: OpenConnection, *, seated: bool) -> None:
        """A connection is gone."""
        self.open.discard(member)
        self._strangers.remove(member)
        if seated:
            self.seats -= 1
            left = self._peers[member.peer] - 1
            if left:
                self._peers[member.peer] = left
            else:
                del self._peers[member.peer]
            self.tell_board()
        if not self.open:
            self.empty.set()

    def knows(self, member: OpenConnection) -> None:
        """A connection has shown the port's token."""
        self._strangers.remove(member)

    def is_stranger(self, member: OpenConnection) -> bool:
        """Whether the port has a token that this connection has not shown."""
        return member in self._strangers

    @property
    def _free(self) -> bool:
        return self.seats < self.settings.max_connections

    def tell_board(self) -> None:
        """Show other relays whether a seat is left here."""
        if self.board is not None:
            self.board.tell(self._free and not self.draining)

    def accepts(self) -> bool:
        """Whether the next connection is for this server: it has a seat left, or no other relay has."""
        return self.board is None or self._free or not self.board.elsewhere

    def full_for(self, peer: str) -> WireError | None:
        """Refusal of one more connection of this peer; None: a seat is free, or an idle connection has been given
        up."""
        settings = self.settings
        bounded = not settings.strangers and peer != UNIX and not settings.exempt(peer)
        if bounded and self._peers.get(peer, 0) >= settings.max_per_peer and not self._freed(peer):
            return WireError(
                503, "too many connections from your address; close some, or try again shortly", "connections"
            )
        full = self.seats >= settings.max_connections
        if full and not self._strangers.expel_oldest() and not self._freed(None):
            return WireError(503, "too many connections; try again shortly", "connections")
        return None

    def _freed(self, peer: str | None) -> bool:
        """Close the connection that has been idle for longest, of this peer or (None) of any. False: none is idle."""
        whose, at = self._searched
        if whose != peer or not self._idle:
            now = self._clock()
            if now < at + LOOK_EVERY:
                return False
            self._searched = (peer, now)
            self._idle.clear()
            idle = ((member.idle_since, id(member), member) for member in self.open if peer in (None, member.peer))
            for since, _, member in heapq.nsmallest(FOUND_AT_ONCE, idle):
                if since <= now - IDLE_AT_LEAST:
                    self._idle.append((member, since))
        while self._idle:
            member, since = self._idle.popleft()
            if member in self.open and member.idle_since == since:
                member.close_if_idle()
                return True
        return False
