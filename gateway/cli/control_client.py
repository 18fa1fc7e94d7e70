"""Client of a gateway's control port: one question, one answer, bounded in time and size.

There are two kinds of failure. `NoAnswer` may pass if the gateway is asked again. `Unfit` will not: the token is wrong,
or the server is not a gateway.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import aclosing
from typing import TypeVar

import httpx
import msgspec

from gateway.shared.control.http_client import AnswerTooLarge, exchange, request_headers, transport_to

T = TypeVar("T")
WITHIN = 5.0  # seconds
MOST = 64 * 1024 * 1024  # bytes; the status of a thousand engines is 1 MiB
GONE = ("Server disconnected", "peer closed")  # in h11's words: it ended meanwhile, and may come back


class NoAnswer(Exception):
    """Error of a request without an answer now; the message says why."""


class Unfit(Exception):
    """No gateway answers there, or none that answers us; the message says why, and what to do."""


async def ask(url: str, path: str, token: str | None, shape: type[T], *, within: float = WITHIN, most: int = MOST) -> T:
    """The JSON answer to `GET path` of the control port at `url`. Raises NoAnswer, Unfit."""
    request = httpx.Request("GET", url.rstrip("/") + path, headers=request_headers("weir-cli", token))
    try:
        async with asyncio.timeout(within), aclosing(transport_to(url)) as transport:
            status, body = await exchange(transport, request, most)
    except AnswerTooLarge:
        raise Unfit(f"{path} answers with more than {most} bytes") from None
    except TimeoutError:
        raise NoAnswer(f"no answer within {within:g} s") from None
    except httpx.RemoteProtocolError as error:
        if str(error).startswith(GONE):
            raise NoAnswer("it hung up") from None
        raise Unfit(f"this is not the control port of a gateway: {error}") from None
    except httpx.TransportError as error:
        if _is_tls(error):
            raise Unfit(f"TLS: {error}") from None
        nobody = isinstance(error, httpx.ConnectError)
        why = "no connection: no gateway has its control port there" if nobody else str(error) or type(error).__name__
        raise NoAnswer(why) from None
    _judge(path, status, has_token=token is not None)
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise Unfit(f"this is not the control port of a gateway of this version: {error}") from None


def _judge(path: str, status: int, *, has_token: bool) -> None:
    match status:
        case 200:
            return
        case 401 if has_token:
            raise Unfit("it refuses the token")
        case 401:
            raise Unfit("it wants its admin token: give --token-file FILE or set WEIR_ADMIN_TOKEN")
        case 403:
            raise Unfit("it answers 403: the token is for its control port, and not a key of its users")
        case 421:
            raise Unfit("it answers only to loopback names: localhost, 127.0.0.1, [::1]")
        case _ if status >= 500:
            raise NoAnswer(f"it answers {status} to {path}")
        case _:
            raise Unfit(f"this is not the control port of a gateway: it answers {status} to {path}")


def _is_tls(error: BaseException | None) -> bool:
    """Whether it comes of an SSLError; httpx and httpcore tell it as one of theirs."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None
