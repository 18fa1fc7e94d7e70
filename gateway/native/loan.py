"""Loan of a stream's two sockets to the pump, and their return. The only place where a descriptor changes hands.

| state | who reads the engine and writes to the client | left by |
| --- | --- | --- |
| counting | the transports | enough chunks that needed no reading, in a row |
| asked | the transports | the next turn of the loop: lent if both sockets are bare, else counting |
| lent | the pump | a read that the pump does not pass on, or whoever calls `end` |

A socket is bare if it is of TCP or a unix socket, without TLS and with nothing buffered. The engine's transport does
not read meanwhile. The client's goes on reading, so a client that leaves is seen as ever. The pump gets copies of both
descriptors: a transport that closes its own cannot make the pump write to whoever gets the number next.

The engine's connection calls `end` before it closes, or forgets who takes the answer. Nobody pauses it meanwhile, since
nothing waits for the client's socket. The call of a client that leaves closes its reply a turn later: until then the
pump has that client's socket, and nobody else's.

After each return twice as many chunks must go by before the next loan, so a stream that often needs to be read pays for
few of them.
"""

from __future__ import annotations

import asyncio
import os
import resource
from typing import TYPE_CHECKING, Protocol

from gateway.native import Pump

if TYPE_CHECKING:
    from gateway.native.pump import Pump as StreamPump

FIRST_AFTER = 2  # chunks


class EngineSide(Protocol):
    """Owner of the engine's socket."""

    def bare_socket(self) -> int | None:
        """Return the socket's descriptor if it may be lent now."""

    def lend(self, loan: Loan) -> None:
        """Leave the socket to the loan until it ends."""

    def take_back(self, data: bytes, heard_at: float) -> None:
        """Read the socket again. `data` was read meanwhile, at `heard_at` seconds, and is still to be relayed."""


class ClientSide(Protocol):
    """Owner of the client's socket."""

    def bare_socket(self) -> int | None:
        """Return the socket's descriptor if it may be lent now."""

    def write_rest(self, data: bytes) -> None:
        """Write the part of framed chunks that the socket did not take."""


class Loan:
    """Loans of one stream, one after another. `reads`: chunks that the pump passed on, in all of them."""

    __slots__ = ("_after", "_left", "_loop", "_pump", "_reads", "_sink", "_source")

    def __init__(self, source: EngineSide, sink: ClientSide) -> None:
        self._loop = asyncio.get_running_loop()
        self._source = source
        self._sink = sink
        self._pump: StreamPump | None = None
        self._reads = 0
        self._after = self._left = FIRST_AFTER

    @property
    def active(self) -> bool:
        """Whether the sockets are lent."""
        return self._pump is not None

    @property
    def reads(self) -> int:
        return self._reads + (0 if self._pump is None else self._pump.reads)

    @property
    def heard_at(self) -> float:
        """Seconds of the loop's clock of the pump's last read; 0 where there was none."""
        return 0.0 if self._pump is None else self._pump.heard_at

    def count(self) -> None:
        """Count a chunk that the transports passed on without reading it."""
        self._left -= 1
        if self._left == 0:
            self._loop.call_soon(self._begin)  # by then what was written is with the kernel

    def end(self) -> None:
        """Give both sockets back to their owners, if they are lent."""
        self._return(b"")

    def _begin(self) -> None:
        self._left = self._after
        source, sink = self._source.bare_socket(), self._sink.bare_socket()
        if Pump is None or source is None or sink is None:
            return
        source, sink = _copies(source, sink)
        if source < 0:
            return
        self._pump = pump = Pump(source, sink)
        self._source.lend(self)
        self._loop.add_reader(source, pump.step, self._handed_back)

    def _handed_back(self, data: bytes, sent: int) -> None:
        self._after *= 2
        if sent:  # the client's socket is full: these are chunks that may go on as they are
            self._return(b"")
            self._sink.write_rest(data[sent:])
        else:
            self._return(data)

    def _return(self, data: bytes) -> None:
        pump, self._pump = self._pump, None
        if pump is None:
            return
        self._loop.remove_reader(pump.source)
        os.close(pump.source)
        os.close(pump.sink)
        self._reads += pump.reads
        self._left = self._after
        self._source.take_back(data, pump.heard_at)


def plain_socket(transport: asyncio.Transport) -> int | None:
    """The descriptor of a transport without TLS that has sent all that was written to it."""
    sock = transport.get_extra_info("socket")
    if sock is None or transport.get_extra_info("sslcontext") is not None or transport.get_write_buffer_size():
        return None
    descriptor: int = sock.fileno()
    return None if descriptor < 0 else descriptor


def _copies(source: int, sink: int) -> tuple[int, int]:
    """Copies of both descriptors; (-1, -1) where the process uses a quarter of its descriptors. The others are for
    connections: clients and engines may have all that `serve/starting.py` leaves them, and copies come on top."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
    if max(source, sink) > most:
        return -1, -1
    copy = os.dup(source)
    try:
        return copy, os.dup(sink)
    except OSError:
        os.close(copy)
        return -1, -1
