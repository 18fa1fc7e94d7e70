"""HTTP client of control ports and engines: one request, one answer that is bounded in size.

It works on httpx's transports, not on httpx's client. The client would take proxies from the environment, follow a
redirect to wherever it leads, and keep cookies, of which one with bytes beyond ASCII makes every later request raise.
There is no time-out either: httpx's are per read, so the caller bounds each exchange as a whole.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import httpx


class AnswerTooLarge(Exception):
    """The answer has more bytes than were allowed."""


def request_headers(agent: str, token: str | None = None) -> dict[str, str]:
    """The headers of every request of `agent`: no compression, and the bearer token where there is one."""
    headers = {"accept-encoding": "identity", "user-agent": agent}
    return headers if token is None else headers | {"authorization": f"Bearer {token}"}


def transport_to(
    url: str, *, uds: str | None = None, limits: httpx.Limits | None = None, ca: str | None = None
) -> httpx.AsyncHTTPTransport:
    """Connections to the origin of `url`, over the unix socket `uds` if any. `ca`: who signs its certificate, in PEM;
    None: the system's authorities. The caller closes it."""
    # The CA store is read for https alone: reading it takes 20 ms of the event loop.
    verify = ssl.create_default_context(cadata=ca) if url.startswith("https:") else False
    return httpx.AsyncHTTPTransport(verify=verify, uds=uds, limits=limits or httpx.Limits())


async def exchange(transport: httpx.AsyncBaseTransport, request: httpx.Request, most: int) -> tuple[int, bytes]:
    """Status and body of the answer. Raises AnswerTooLarge for a body of more than `most` bytes, httpx.HTTPError for a
    connection that fails."""
    answer = bytearray()
    async with (
        aclosing(await transport.handle_async_request(request)) as response,
        aclosing(cast(AsyncGenerator[bytes, None], response.aiter_raw())) as chunks,
    ):
        async for chunk in chunks:
            answer += chunk
            if len(answer) > most:
                raise AnswerTooLarge
    return response.status_code, bytes(answer)
