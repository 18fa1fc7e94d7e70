"""Calls of the load test's own client, one on a connection of its own, and the bytes of one."""

from __future__ import annotations

import asyncio
import json
import time

from loadtest.clients.answer import Answer
from loadtest.clients.client import Exchange


async def exchange(host: str, port: int, request: bytes, answer: Answer, *, limit: float) -> None:
    """Send one request on a connection of its own and fill in `answer`. Gives up after `limit` seconds.

    Nothing is raised for what a server or a network does: `answer.outcome` says it.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(limit):
            transport, _ = await loop.create_connection(lambda: Exchange(request, answer, over), host, port)
            await over
    except TimeoutError:
        answer.timed_out = True
    except OSError as error:
        answer.error = str(error)
    finally:
        answer.finished = answer.finished or time.monotonic()
        if transport is not None:
            transport.close()


def chat(
    host: str,
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    stream: bool = True,
    usage: bool = True,
    class_name: str = "",
) -> bytes:
    """The bytes of one chat request that generates exactly `max_tokens` on vLLM (`ignore_eos`). `class_name`: the
    traffic class it asks the gateway for, if any."""
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream and usage:
        body["stream_options"] = {"include_usage": True}
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    if class_name:
        head += f"x-weir-class: {class_name}\r\n"
    return f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload
