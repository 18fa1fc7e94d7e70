"""Clients of a failover: OpenAI's, with its default retries, beside raw ones that try once.

Each kind has so many lines, in turn on each machine. A line makes one call after another, so as many calls are open as
there are lines. Every second line streams. A raw call has a connection of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec
import openai

from loadtest.clients.client import Answer, Exchange, chat

MODEL = "sim"
MESSAGES: list[Any] = [{"role": "user", "content": "Why is the river level?"}]
TOKENS = 32  # of an answer: a quarter of a second, so that engines begin some dozens of calls a second
PAUSE = 0.05  # seconds of a line after a failure: who is refused at once would count for all others
LIMIT = 60.0  # seconds for a call
NEVER = -1

Kind: TypeAlias = Literal["openai", "raw"]


class CallEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one call. `began`: when its answer did, seconds of `time.monotonic`; 0.0: never. `port`: the client's
    port, of its last try; 0: not known, NEVER: it had no connection."""

    kind: Kind
    began: float
    failure: str = ""
    port: int = 0


class ClosedLoop:
    """Clients of the data ports `urls`, `lines` of each kind, until the end of the `async with`."""

    def __init__(self, urls: Sequence[str], lines: int) -> None:
        self.ends: list[CallEnd] = []
        self._urls = urls
        self._width = lines
        self._over = False

    async def __aenter__(self) -> ClosedLoop:
        self._clients = {
            url: openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT) for url in self._urls
        }
        calls = (self._openai_call, self._raw_call)
        self._lines = [
            asyncio.create_task(self._line(call, self._urls[number // 2 % len(self._urls)], stream=number % 2 == 0))
            for call in calls
            for number in range(self._width)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._lines)
        for client in self._clients.values():
            await client.close()

    async def _line(self, call: Callable[[str, bool], Awaitable[CallEnd]], url: str, *, stream: bool) -> None:
        while not self._over:
            end = await call(url, stream)
            self.ends.append(end)
            if end.failure:
                await asyncio.sleep(PAUSE)

    async def _openai_call(self, url: str, stream: bool) -> CallEnd:
        began, port, failure = 0.0, 0, ""
        create = self._clients[url].chat.completions.create
        try:
            if stream:
                streamed = await create(model=MODEL, messages=MESSAGES, max_tokens=TOKENS, stream=True)
                began = time.monotonic()
                port = streamed.response.extensions["network_stream"].get_extra_info("client_addr")[1]
                reasons = [choice.finish_reason async for chunk in streamed for choice in chunk.choices]
                failure = "" if reasons and reasons[-1] else "a stream without its end"
            else:
                await create(model=MODEL, messages=MESSAGES, max_tokens=TOKENS)
                began = time.monotonic()
        except openai.OpenAIError as error:
            failure = f"{type(error).__name__}: {error}"
        return CallEnd(kind="openai", began=began, failure=failure, port=port)

    async def _raw_call(self, url: str, stream: bool) -> CallEnd:
        call = RawCall(url, stream=stream, tokens=TOKENS)
        await call.end()
        failure = "" if call.answer.outcome == "ok" else f"{call.answer.outcome}: {call.answer.why}"
        return CallEnd(kind="raw", began=call.answer.first_byte, failure=failure, port=call.port)


class RawCall:
    """Call on a connection of its own, tried once."""

    def __init__(self, url: str, *, stream: bool, tokens: int) -> None:
        parts = urlsplit(url)
        self._host, self._to = parts.hostname or "", parts.port or 0
        self._request = chat(self._host, MODEL, "Why?", max_tokens=tokens, stream=stream)
        self._task = asyncio.create_task(self._run())
        self.answer = Answer(expected="stream" if stream else "json")
        self.port = NEVER  # of the client

    async def _run(self) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(LIMIT):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: Exchange(self._request, self.answer, over), self._host, self._to
                )
                self.port = transport.get_extra_info("sockname")[1]
                await over
        except TimeoutError:
            self.answer.timed_out = True
        except OSError as error:
            self.answer.error = str(error)
        finally:
            if transport is not None:
                transport.close()

    @property
    def open(self) -> bool:
        """Whether its end is still to come."""
        return not self._task.done()

    async def end(self) -> None:
        """Wait for its end."""
        await self._task

    async def leave(self) -> None:
        """Close its connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
