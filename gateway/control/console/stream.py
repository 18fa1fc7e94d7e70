"""Event stream of the console (server-sent events): first all entries, then what has changed, once a second.

One task reads for all watchers, and only while there are any. A watcher has no queue: each message is made once the
watcher has taken the last one, so a slow watcher skips readings. A watcher that takes nothing for TAKEN_WITHIN
(http1.py) is reset. At most WATCHERS are served at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping

import msgspec
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

from gateway.control.console.calls import ended_rows
from gateway.control.console.reading import ConsoleReading
from gateway.shared.tasks import lasting

EVERY = 1.0  # seconds
WATCHERS = 16
ROWS = 500  # ended calls in one message
BEAT = 15.0  # seconds: a line that says nothing, so that both ends see a connection that is dead


Entries = Mapping[str, bytes]  # of now by key, as JSON; an entry that has not changed is the same object


def read_anew(before: Entries, read: Mapping[str, object]) -> Entries:
    """A reading of all entries after the one before."""
    now = {}
    for key, value in read.items():
        encoded, known = msgspec.json.encode(value), before.get(key)
        now[key] = known if known == encoded else encoded
    return now


def changes(seen: Entries, now: Entries) -> bytes | None:
    """Changes for a watcher that has `seen` these entries (none: all are new), as JSON; None: nothing has changed."""
    changed = {key: msgspec.Raw(encoded) for key, encoded in now.items() if seen.get(key) is not encoded}
    gone = [key for key in seen if key not in now]
    if not (changed or gone):
        return None
    return msgspec.json.encode({"whole": not seen, "set": changed, "gone": gone})


class Streams:
    """The watchers of one gateway."""

    def __init__(self, reading: ConsoleReading) -> None:
        self._reading = reading
        self._entries: Entries = {}
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._ticked = asyncio.Event()  # replaced at each tick

    @property
    def full(self) -> bool:
        return self._watchers >= WATCHERS

    async def messages(self, calls_after: int | None) -> AsyncGenerator[bytes, None]:
        """Yield the events for one watcher, without end. `calls_after`: also send calls that ended after this serial;
        None: send no calls."""
        self._watchers += 1
        try:
            if self._task is None:
                self._read()
                self._task = lasting("the console's reading", self._run)
            seen: Entries = {}
            told_at = 0.0
            while True:
                ticked, now = self._ticked, time.monotonic()
                changed, seen = changes(seen, self._entries), self._entries
                if changed is not None:
                    yield _event("entries", b'{"at":%.1f,%b' % (time.time(), changed[1:]))
                    told_at = now
                more = False
                if calls_after is not None:
                    first, rows = ended_rows(self._reading, calls_after, ROWS)
                    if rows:
                        calls_after, more = first + len(rows) - 1, len(rows) == ROWS
                        yield _event("calls", msgspec.json.encode(rows))
                        told_at = now
                if now - told_at > BEAT:
                    yield b":\n\n"
                    told_at = now
                if not more:
                    await ticked.wait()
        finally:
            self._watchers -= 1
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            self._read()

    def _read(self) -> None:
        self._entries = read_anew(self._entries, self._reading.entries())
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def stream_answer(events: AsyncGenerator[bytes, None]) -> StreamingResponse:
    """Answer of these events, which end with the client that watches them."""
    headers = {"content-type": "text/event-stream", "x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers, background=BackgroundTask(events.aclose))
