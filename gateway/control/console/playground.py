"""Playground of the console: calls sent to this gateway's own data port, and their answers as events.

They go through everything that a client's call goes through. A browser cannot send them itself: the data port is
another origin, and is closed to pages. One playground at a time; it ends with whoever watches it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta

from gateway.shared.addresses import reachable
from gateway.shared.control.http_client import transport_to
from gateway.shared.tasks import cancel

BODY = 64 * 1024  # bytes of a request
WITHIN = 120.0  # seconds for all calls
EVENTS = 100  # that wait to be taken
TOLD = ("retry-after", "x-request-id")  # headers, beside all that begin with x-weir- or x-ratelimit-
LONGEST = 256 * 1024  # bytes of one answer


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Request of a person to the playground. `key`: an API key of the data port; empty: none."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt: Annotated[str, Meta(max_length=32_000)]
    class_name: Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    key: Annotated[str, Meta(max_length=4096, pattern=r"^[!-~]*$")] = ""
    max_tokens: Annotated[int, Meta(ge=1, le=4096)] = 128
    calls: Annotated[int, Meta(ge=1, le=20)] = 1


class Playground:
    """`busy` while its calls run."""

    def __init__(self) -> None:
        self.busy = False

    async def run(self, trial: Trial, address: str) -> AsyncGenerator[bytes, None]:
        """The events of all calls, as they come: `head`, `text`, `end`; each names its call, from 1."""
        self.busy = True
        told: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue(EVENTS)
        tasks = [asyncio.create_task(_call(number, trial, address, told)) for number in range(1, trial.calls + 1)]
        try:
            ended = 0
            while ended < trial.calls:
                name, data = await told.get()
                ended += name == "end"
                yield b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
        finally:
            self.busy = False
            await cancel(*tasks)


async def _call(number: int, trial: Trial, address: str, told: asyncio.Queue[tuple[str, dict[str, Any]]]) -> None:
    """Send one call and put its events into `told`. The last event is `end`, also when the call fails."""
    began, words = time.monotonic(), ""
    try:
        async with asyncio.timeout(WITHIN):
            await _exchange(number, trial, address, told, began)
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        words = str(error) or type(error).__name__
    await told.put(("end", {"call": number, "seconds": round(time.monotonic() - began, 3), "error": words}))


async def _exchange(
    number: int, trial: Trial, address: str, told: asyncio.Queue[tuple[str, dict[str, Any]]], began: float
) -> None:
    uds = address.removeprefix("unix:") if address.startswith("unix:") else None
    url = "http://localhost" if uds else reachable(address)
    transport = transport_to(url, uds=uds)
    if url.startswith("https:"):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is this very process, or its relay
        transport = httpx.AsyncHTTPTransport(verify=context)
    headers = {"content-type": "application/json", "user-agent": "weir-console", "accept-encoding": "identity"}
    headers |= {"authorization": f"Bearer {trial.key}"} if trial.key else {}
    headers |= {"x-weir-class": trial.class_name} if trial.class_name else {}
    messages = [{"role": "user", "content": trial.prompt}]
    body = {"model": trial.model, "max_tokens": trial.max_tokens, "stream": True, "messages": messages}
    request = httpx.Request("POST", f"{url}/v1/chat/completions", headers=headers, content=msgspec.json.encode(body))
    async with transport, aclosing(await transport.handle_async_request(request)) as answer:
        shown = {
            name: value
            for name, value in answer.headers.items()
            if name.startswith(("x-weir-", "x-ratelimit-")) or name in TOLD
        }
        seconds = round(time.monotonic() - began, 3)
        head = {"call": number, "status": answer.status_code, "headers": shown, "seconds": seconds}
        await told.put(("head", head))
        if answer.status_code != httpx.codes.OK:
            text = (await _whole(answer)).decode("utf-8", "replace")
            await told.put(("text", {"call": number, "text": text}))
            return
        pending = b""
        async for chunk in answer.aiter_raw():
            *lines, pending = (pending + chunk)[-LONGEST:].split(b"\n")
            text = "".join([_written(line) for line in lines])
            if text:
                await told.put(("text", {"call": number, "text": text}))


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = _Delta()


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


def _written(line: bytes) -> str:
    """The text in one line of a stream; empty: it has none."""
    if not line.startswith(b"data: {"):
        return ""
    try:
        chunk = msgspec.json.decode(line[6:], type=_Chunk)
    except msgspec.MsgspecError:
        return ""
    return "".join([choice.delta.content or "" for choice in chunk.choices])


async def _whole(answer: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in answer.aiter_raw():
        body += chunk
        if len(body) > LONGEST:
            break
    return bytes(body[:LONGEST])
