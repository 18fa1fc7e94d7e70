"""Body of a request to the console: bounded in bytes and in time, and decoded."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.control.guard import error

T = TypeVar("T")

BODY_WITHIN = 10.0  # seconds


async def decoded(request: Request, form: type[T], most: int) -> T | Response:
    """The JSON body of at most `most` bytes, or the 400 for one that is of no such form, too long, or not sent in
    time."""
    try:
        return msgspec.json.decode(await _body(request, most), type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError) as mistake:
        return error(400, "bad_body", f"The body is no trial: {mistake}")
    except (ClientDisconnect, TimeoutError, ValueError):
        return error(400, "bad_body", f"The body is at most {most} bytes, sent within {BODY_WITHIN:g} s.")


async def _body(request: Request, most: int) -> bytes:
    """Raises ValueError for one of more than `most` bytes, TimeoutError, ClientDisconnect."""
    body = bytearray()
    async with asyncio.timeout(BODY_WITHIN):
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise ValueError("too long")
    return bytes(body)
