"""Body of a request to a control port: bounded in bytes and in time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request


class TooLarge(Exception):
    """The body has more bytes than were allowed."""


async def body_of(request: Request, most: int, within: float) -> bytes:
    """The body of at most `most` bytes, sent within so many seconds. Raises TooLarge, TimeoutError, and
    ClientDisconnect."""
    body = bytearray()
    async with asyncio.timeout(within):
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise TooLarge
    return bytes(body)
