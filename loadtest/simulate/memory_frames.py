"""Connections of frames in memory: a relay's channel and its decider's, with time between them.

As TCP: within one connection nothing is lost, doubled or out of order, however long it takes. A connection that breaks
loses what is under way, at any byte; one that a side closes delivers what was sent before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from gateway.frames.channel import Channel

Delay = Callable[[], float]  # seconds of the next bytes on their way


class FrameLink:
    """Connection between a relay and the decider. `delay` gives the delay of each piece of bytes, in either direction;
    `sent` gets each piece with its sender, the relay's channel or the decider's."""

    def __init__(
        self, relay: Channel, decider: Channel, delay: Delay, sent: Callable[[Channel, bytes], None] = lambda *_: None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.delay = delay
        self.sent = sent
        self.up = True
        self.relay = _Side(self, relay)
        self.decider = _Side(self, decider)
        self.relay.other, self.decider.other = self.decider, self.relay
        for side in (self.decider, self.relay):
            side.channel.connection_made(cast("asyncio.Transport", side))  # it has all of the surface that is used

    def hold(self) -> None:
        """From now on nothing arrives, until `release` or the end: a process hangs, or the network does."""
        for side in (self.relay, self.decider):
            side.held = side.held or []

    @property
    def held(self) -> bool:
        """Whether nothing arrives now."""
        return self.decider.held is not None

    def release(self) -> None:
        """Let what was held arrive, in its order."""
        for side in (self.relay, self.decider):
            held, side.held = side.held, None
            for data in held or ():
                side.arrive(data)

    def cut(self, error: Exception | None = None) -> None:
        """Break: what is under way is lost, and both sides hear of it."""
        if self.up:
            self.up = False
            for side in (self.relay, self.decider):
                side.held = None
                self.loop.call_soon(side.channel.connection_lost, error)

    def closed_by(self, side: _Side) -> None:
        """Close one side, or kill its process: what it has sent arrives, and then the end."""
        if self.up:
            self.up = False
            side.channel.closed = True
            self.loop.call_soon(side.channel.connection_lost, None)
            at = max(self.loop.time() + self.delay(), side.last)
            self.loop.call_at(at, side.other.channel.connection_lost, None)


class _Side:
    """Transport of one side: what it writes arrives at the other."""

    def __init__(self, link: FrameLink, channel: Channel) -> None:
        self._link = link
        self.channel = channel
        self.other = self
        self.last = 0.0  # when what was sent last arrives
        self.held: list[bytes] | None = None  # what should have come here

    def write(self, data: bytes) -> None:
        link = self._link
        if link.up and data:
            link.sent(self.channel, data)
            self.last = max(link.loop.time() + link.delay(), self.last)
            link.loop.call_at(self.last, self.other.arrive, data)

    def arrive(self, data: bytes) -> None:
        if self.channel.closed or not (self._link.up or self._link.loop.time() <= self.other.last):
            return
        if self.held is not None:
            self.held.append(data)
        else:
            self.channel.data_received(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self._link.closed_by(self)
