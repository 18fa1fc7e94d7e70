"""Channel between a relay and its decider: messages out, gathered per turn of the loop; messages in, as they come.

Either side that breaks the rules is cut off with one line: bytes that are no frame of ours, and more than MOST_UNSENT
bytes that the other side does not take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from gateway.frames.codec import FrameError, FrameReader, FrameWriter
from gateway.frames.messages import Message

MOST_UNSENT = 128 * 1024**2  # bytes; a policy and 10,000 calls


class Channel(asyncio.Protocol):
    """Connection of frames. `take` receives each message, `lost` the reason of the end; empty: the other side closed
    the connection. `outward` may change a message before it is sent.

    Messages sent by `take` leave together with the others of the same turn of the loop.
    """

    def __init__(
        self,
        reader: FrameReader[Any],
        take: Callable[[Any], None],
        lost: Callable[[str], None],
        outward: Callable[[Message], None] | None = None,
    ) -> None:
        self._reader = reader
        self._take = take
        self._lost = lost
        self._outward = outward
        self._writer = FrameWriter()
        self._loop = asyncio.get_running_loop()
        self._flushing = False
        self._ended = False  # this direction
        self._transport: asyncio.Transport | None = None
        self._why = ""
        self.closed = False

    def send(self, message: Message) -> None:
        """Send it at the end of this turn; into nothing, once the channel is closed or this direction has ended."""
        if self.closed or self._ended:
            return
        if self._outward is not None:
            self._outward(message)
        self._writer.add(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand over what has gathered."""
        self._flushing = False
        transport = self._transport
        if transport is None or self.closed or self._ended:
            return
        transport.write(self._writer.take())
        if transport.get_write_buffer_size() > MOST_UNSENT:
            self.close(f"{MOST_UNSENT} bytes wait to be read on the other side: it hangs")

    def end(self) -> bool:
        """Hand over what has gathered, and close this direction, so that the other side reads all and then closes the
        connection. False: the transport cannot close one direction."""
        self.flush()
        transport = self._transport
        if transport is None or self.closed or not transport.can_write_eof():
            return False
        self._ended = True
        transport.write_eof()
        return True

    def deafen(self) -> None:
        """Hear nothing any more of what the other side sends."""
        self._take = _nothing

    def close(self, why: str = "") -> None:
        """Cut the connection off; `lost` receives `why`."""
        if not self.closed:
            self.closed = True
            self._why = why
            if self._transport is not None:
                self._transport.abort()

    # -- from the loop ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.closed:  # before there was a connection to cut off
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for messages in self._reader.feed(data):
                for message in messages:
                    if self.closed:
                        return
                    self._take(message)
        except FrameError as error:
            self.close(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._lost(self._why or (str(error) if error is not None else ""))


def _nothing(_: object) -> None:
    """Drop a message that comes too late."""
