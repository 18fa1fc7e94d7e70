"""Callers that keep a gateway busy while something is done to it, and count how each call has ended.

They are the load test's client: as strict as a client can be, and a tenth of the work of OpenAI's.
"""

from __future__ import annotations

import asyncio
import select
from collections import Counter
from urllib.parse import urlsplit

from loadtest.clients.answer import Answer
from loadtest.clients.client import Exchange
from tests.raw_calls import chat

PATIENCE = 60.0  # seconds for one call
AGAIN = 0.1  # seconds before a call is tried again


class BusyCallers:
    """Calls one after another on each of `width` lines, until it is over; every `streams`th line streams. `fresh`: of
    so many lines one has a connection for each call, and the others keep theirs; 0: all keep theirs. `retries`: of a
    call that nothing of a stream has come of."""

    def __init__(self, url: str, width: int = 12, *, streams: int = 2, fresh: int = 3, retries: int = 0) -> None:
        self.ended: Counter[str] = Counter()
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._width, self._streams, self._fresh, self._retries = width, streams, fresh, retries
        self._over = False

    async def __aenter__(self) -> BusyCallers:
        self._lines = [asyncio.create_task(self._line(number)) for number in range(self._width)]
        return self

    def stop(self) -> Counter[str]:
        """Begin no call any more; the ends so far."""
        self._over = True
        return Counter(self.ended)

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await asyncio.gather(*self._lines)

    async def more(self, calls: int) -> None:
        """Until so many more have ended well."""
        async with asyncio.timeout(240):
            wanted = self.ended["ok"] + calls
            while self.ended["ok"] < wanted:
                await asyncio.sleep(0.01)

    async def _line(self, number: int) -> None:
        stream = number % self._streams == 0
        keep = not self._fresh or number % self._fresh != 0
        kept: asyncio.Transport | None = None
        while not self._over:
            for tried in range(self._retries + 1):
                answer, kept = await self._call(kept, stream=stream, keep=keep)
                if answer.outcome == "ok" or answer.streamed:
                    break
                await asyncio.sleep(AGAIN * tried)
            self.ended["ok" if answer.outcome == "ok" else f"{answer.outcome}: {answer.why}"] += 1
        if kept is not None:
            kept.close()

    async def _call(
        self, kept: asyncio.Transport | None, *, stream: bool, keep: bool
    ) -> tuple[Answer, asyncio.Transport | None]:
        """Make a call, and return its connection where that can take another."""
        loop = asyncio.get_running_loop()
        request = chat(self._host, "sim", "Why is the river level?", max_tokens=60 if stream else 16, stream=stream)
        answer, over = Answer(expected="stream" if stream else "json"), loop.create_future()
        exchange = Exchange(request, answer, over, keep=keep)
        try:
            async with asyncio.timeout(PATIENCE):
                if kept is not None and _open(kept):
                    kept.set_protocol(exchange)
                    exchange.connection_made(kept)
                else:
                    if kept is not None:
                        kept.close()
                    await loop.create_connection(lambda: exchange, self._host, self._port)
                await over
        except (OSError, TimeoutError) as error:
            exchange.failed(repr(error))
        return answer, exchange.transport if exchange.reusable else None


def _open(transport: asyncio.Transport) -> bool:
    """Whether the other side has not closed it since, as far as can be known before it is used."""
    return not transport.is_closing() and not select.select([transport.get_extra_info("socket")], [], [], 0)[0]
