"""One JSON line per ended call, written off the hot path.

A call costs one encoding; lines are gathered and handed to a thread a few times a second, so a slow disk or a full
pipe never stops the event loop. If the writer falls behind by more than `LIMIT` bytes, lines are dropped and the
number of them is logged: bounded memory comes before completeness. Nor can it keep the process from ending: the
threads are daemons, and the last lines get `CLOSE_WITHIN` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from threading import Thread

import msgspec

from gateway.core.outcome import Record

EVERY = 0.25  # seconds between writes
LIMIT = 8 * 1024 * 1024  # bytes waiting to be written
CLOSE_WITHIN = 2.0  # seconds


class CallLog:
    """Writes to the file descriptor `fd`. Every client-supplied string is escaped by the JSON encoder."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._encoder = msgspec.json.Encoder()
        self._lines: list[bytes] = []
        self._size = 0
        self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        # Wall-clock time of a record is derived from one reading, so that the hot path needs no second clock.
        self._epoch = time.time() - time.monotonic()

    def write(self, record: Record, now: float) -> None:
        """Take a record; `now` is monotonic seconds, the moment the call ended."""
        if self._size > LIMIT:
            self._dropped += 1
            return
        line = self._encoder.encode(record)
        line = b'{"ts":%.3f,%b\n' % (self._epoch + now, line[1:])
        self._lines.append(line)
        self._size += len(line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if not self._lines:
            return
        loop = asyncio.get_running_loop()
        if self._writing is not None and not self._writing.done():
            self._timer = loop.call_later(EVERY, self._flush)
            return
        if self._dropped:
            self._lines.append(b'{"ts":%.3f,"dropped_lines":%d}\n' % (time.time(), self._dropped))
            self._dropped = 0
        data, self._lines, self._size = b"".join(self._lines), [], 0
        self._writing = loop.create_future()
        Thread(target=_write_and_tell, args=(self._fd, data, self._writing), daemon=True).start()

    async def aclose(self) -> None:
        """Write what is left, in bounded time."""
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WITHIN):
                if self._writing is not None:
                    await asyncio.shield(self._writing)
                self._flush()
                if self._writing is not None:
                    await asyncio.shield(self._writing)


def _write_and_tell(fd: int, data: bytes, written: asyncio.Future[None]) -> None:
    """A thread's work; the loop may have ended before it."""
    write_all(fd, data)
    with contextlib.suppress(RuntimeError):
        written.get_loop().call_soon_threadsafe(written.set_result, None)


def write_all(fd: int, data: bytes) -> None:
    """Blocking write of all of `data`; a reader that went away or a full disk loses the log, not the gateway."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError:
            return
