"""Event stream of the console (server-sent events): first all entries, then what has changed, once a second.

One task reads for all watchers, and only while there are any. A watcher has no queue: each message is made once the
watcher has taken the last one, so a slow watcher skips readings. A watcher that takes nothing for TAKEN_WITHIN
(http1.py) is reset. At most WATCHERS are served at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.control.console.calls import ended_rows
from gateway.control.console.reading import ConsoleReading
from gateway.shared.tasks import lasting

EVERY = 1.0  # seconds
WATCHERS = 16
ROWS = 500  # ended calls in one message
BEAT = 15.0  # seconds: a line that says nothing, so that both ends see a connection that is dead
GONE = 1000  # keys of entries that are no longer there; with more of them, everybody is told all again


class Entries:
    """Entries of now by key, with the tick of each one's last change. `tick` counts the readings, from 1. The only
    state of a watcher is the tick of its last message."""

    def __init__(self) -> None:
        self.tick = 0
        self._entries: dict[str, tuple[int, bytes]] = {}  # when it changed, and its JSON
        self._gone: dict[str, int] = {}
        self._whole_before = 0  # whoever was told last before this tick is told all

    def take(self, read: Mapping[str, object]) -> None:
        """A reading of all entries."""
        self.tick += 1
        for key, value in read.items():
            encoded = msgspec.json.encode(value)
            known = self._entries.get(key)
            if known is None or known[1] != encoded:
                self._entries[key] = self.tick, encoded
                self._gone.pop(key, None)
        if len(self._entries) > len(read):
            for key in [key for key in self._entries if key not in read]:
                del self._entries[key]
                self._gone[key] = self.tick
        if len(self._gone) > GONE:
            self._gone.clear()
            self._whole_before = self.tick

    def since(self, seen: int) -> bytes | None:
        """Entries that changed after the tick `seen` (0: all entries), as JSON; None if nothing changed."""
        whole = seen == 0 or seen < self._whole_before
        changed = {key: msgspec.Raw(encoded) for key, (tick, encoded) in self._entries.items() if whole or tick > seen}
        gone = [] if whole else [key for key, tick in self._gone.items() if tick > seen]
        if not (changed or gone or whole):
            return None
        return msgspec.json.encode({"whole": whole, "set": changed, "gone": gone})


class Streams:
    """The watchers of one gateway."""

    def __init__(self, reading: ConsoleReading) -> None:
        self._reading = reading
        self._entries = Entries()
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
            seen, told_at = 0, 0.0
            while True:
                ticked, now = self._ticked, time.monotonic()
                changed = self._entries.since(seen)
                seen = self._entries.tick
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
        self._entries.take(self._reading.entries())
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class StreamAnswer:
    """An ASGI answer of `messages`, until its client leaves or they end."""

    def __init__(self, messages: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        left = asyncio.ensure_future(_left(receive))
        sending = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait((left, sending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (left, sending):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _send(self, send: Any) -> None:
        async with contextlib.aclosing(self._messages()) as messages:
            async for message in messages:
                await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
