"""Place of one process among those of one gateway: who it is, and what its parent has opened for it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import signal
import socket
from collections.abc import Callable
from typing import Literal

import msgspec

from gateway.decider.loading import Configuration
from gateway.relay.wire.seat_board import RelaySeats
from gateway.serve.processes.last_good import LastGood
from gateway.serve.upgrade.receiver import InheritedSockets
from gateway.shared.certificate import Contents

BEAT = 0.2  # seconds between two signs of life
# From the parent: end as SIGTERM says, where it has come to the parent; a second one hurries.
END = b"e"
# From a child: it lives; it serves; nobody may connect any more; another gateway has the sockets; it can serve, so the
# gateway before may be told to stop; the operator has been told where it listens; another gateway is given the sockets,
# and may serve with them.
ALIVE, READY, CLOSING, HANDED, TAKE, TOLD, OFFERED = b".", b"r", b"c", b"h", b"t", b"s", b"o"
PR_SET_PDEATHSIG = 1  # linux/prctl.h

Role = Literal["decider", "relay"]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """`number`: of a relay, 0 for the decider. `epoch`: higher at every start of a process. `data`: the data port's
    listening sockets, `control` the control port's, `inner` the decider's for relays, at `path`. `beats` goes to the
    parent. `living`: the relays that lived already, by number. `secret`: of the cache salts, where no file has one.
    `first`: no process of this role and number was there before. `told`: a decider before has told the operator where
    the gateway listens. `inherited`: from a gateway that is taken over. `seats`: which relays have a seat left; None:
    there is no other process."""

    role: Role
    number: int
    epoch: int
    relays: int
    data: list[socket.socket]
    control: socket.socket
    inner: socket.socket
    path: str
    beats: socket.socket
    living: dict[int, int]
    secret: str
    parent: int
    started: float  # seconds since 1970, of this process
    parent_started: float
    first: bool
    told: bool = False
    inherited: InheritedSockets
    seats: mmap.mmap | None = None
    last: LastGood[Configuration] | None = None  # what a decider goes by, for the next one
    certificate: LastGood[Contents] | None = None  # of this role's port, for the next process of the role

    @property
    def before(self) -> Configuration | None:
        """Configuration that the decider before this one went by; None: it is the first, or nothing is known."""
        return None if self.last is None else self.last.load()

    @property
    def own_seats(self) -> RelaySeats | None:
        """The board, as this relay has it."""
        return None if self.seats is None else RelaySeats(self.seats, self.number - self.inherited.relays - 1)

    def stop_listening(self) -> None:
        """Close this process's data port: a socket that one process has open still takes connections."""
        for each in self.data:
            each.close()
        self.data.clear()

    def complete(self, configuration: Configuration) -> Configuration:
        """The configuration with a secret for cache salts that outlives this process."""
        if configuration.cache_secret is not None:
            return configuration
        return msgspec.structs.replace(configuration, cache_secret=self.secret)


class Beats:
    """Signs of life to the parent, whose end is this process's end too. `end` is called at each of its orders to end:
    SIGTERM to a child alone would take a part of the gateway away, and is ignored."""

    def __init__(self, beats: socket.socket, end: Callable[[], None]) -> None:
        self._beats = beats
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(beats, self._read)
        self._timer = self._loop.call_soon(self._beat)

    def tell(self, sign: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # the parent has signs enough
            self._beats.send(sign)

    def _beat(self) -> None:
        self.tell(ALIVE)
        self._timer = self._loop.call_later(BEAT, self._beat)

    def _read(self) -> None:
        orders = self._beats.recv(64)
        if not orders:
            os.kill(os.getpid(), signal.SIGKILL)  # nobody is left to drain for
        for _ in range(orders.count(END)):
            self._end()


def die_with(parent: int) -> None:
    """SIGKILL for this process when its parent ends, or now, where it has: also for one that is stopped or hangs."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # of Linux alone; elsewhere the end of `beats` tells
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
