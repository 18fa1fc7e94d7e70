"""Body of a request to the console: bounded in bytes and in time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

BODY_WITHIN = 10.0  # seconds


async def body_of(request: Request, most: int) -> bytes:
    """Raises ValueError for one of more than `most` bytes, TimeoutError, ClientDisconnect."""
    body = bytearray()
    async with asyncio.timeout(BODY_WITHIN):
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise ValueError("too long")
    return bytes(body)
