"""HTTP client of a gateway's control port: one connection, a bound on time and on bytes.

There are two kinds of failure. `NoAnswer` may pass if the gateway is asked again. `Unfit` will not: the token is wrong,
or the server is not a gateway.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import TypeVar

import httpx

from gateway.control.calls import CallsView
from gateway.control.cluster import ClusterView
from gateway.control.view import FleetView
from gateway.shared.control.http_client import AnswerTooLarge, exchange, request_headers, transport_to
from gateway.shared.vllm.answers import AnswerError
from gateway.top.sample import Point, Sample, Summary, counts_from, read, targets_from

T = TypeVar("T")
WITHIN = 5.0  # seconds for all the answers of one sample
MOST = 64 * 1024 * 1024  # bytes of one answer; the metrics of a large gateway are a few MiB
GONE = ("Server disconnected", "peer closed")  # in h11's words: it ended meanwhile, and may come back
NOBODY = "no connection: no gateway has its control port there"


class NoAnswer(Exception):
    """There is no answer now; the message says why."""


class Unfit(Exception):
    """What answers is not a gateway, or not one that answers us; the message says why, and what to do."""


class ControlClient:
    """Client of the control port at `url`. `clock` gives monotonic seconds; `within` and `most`
    are WITHIN and MOST."""

    def __init__(
        self, url: str, token: str | None, clock: Callable[[], float], *, within: float = WITHIN, most: int = MOST
    ) -> None:
        self.url = url.rstrip("/")
        self._within = within
        self._most = most
        self._clock = clock
        self._headers = request_headers("weir-top", token)
        self._has_token = token is not None
        self._targets: dict[str, float | None] = {}
        self._policy: tuple[int, str] | None = None  # the version that the targets are of
        self._transport = transport_to(url, limits=httpx.Limits(max_connections=1))

    async def sample(self) -> Sample:
        """Everything there is to know now. Raises NoAnswer, Unfit."""
        return await self._in_time(self._sample())

    async def cluster(self) -> ClusterView:
        """The cluster that it is a member of. Raises NoAnswer, Unfit."""
        return read(await self._in_time(self._get("/cluster")), ClusterView)

    async def _in_time(self, answer: Coroutine[object, object, T]) -> T:
        try:
            async with asyncio.timeout(self._within):
                return await answer
        except TimeoutError:
            raise NoAnswer(f"no answer within {self._within:g} s") from None
        except AnswerError as error:
            raise Unfit(f"this is not the control port of a gateway of this version: {error}") from None
        except httpx.RemoteProtocolError as error:
            if str(error).startswith(GONE):
                raise NoAnswer("it hung up") from None
            raise Unfit(f"this is not the control port of a gateway: {error}") from None
        except httpx.TransportError as error:
            if _is_tls(error):
                raise Unfit(f"TLS: {error}") from None
            raise NoAnswer(NOBODY if isinstance(error, httpx.ConnectError) else _told(error)) from None

    async def _sample(self) -> Sample:
        summary = read(await self._get("/summary"), Summary)
        policy = (summary.policy.version, summary.policy.loaded_at)
        if policy != self._policy:
            self._targets = targets_from(await self._get("/policy?format=json"))
            self._policy = policy
        counts = counts_from(await self._get("/metrics"))
        point = Point(self._clock(), counts)
        fleet = read(await self._get("/fleet"), FleetView)
        calls = read(await self._get("/calls"), CallsView)
        return Sample(point, summary, fleet, calls, self._targets)

    async def _get(self, path: str) -> bytes:
        request = httpx.Request("GET", self.url + path, headers=self._headers)
        try:
            status, body = await exchange(self._transport, request, self._most)
        except AnswerTooLarge:
            raise Unfit(f"{path} answers with more than {self._most} bytes") from None
        self._judge(path, status)
        return body

    def _judge(self, path: str, status: int) -> None:
        match status:
            case 200:
                return
            case 401 if self._has_token:
                raise Unfit("it refuses the token")
            case 401:
                raise Unfit("it wants its admin token: give --token-file FILE or set WEIR_ADMIN_TOKEN")
            case 403:
                raise Unfit("it answers 403: the token is for its control port, and not a key of its users")
            case 421:
                raise Unfit("it answers only to loopback names: localhost, 127.0.0.1, [::1]")
            case 404 if path == "/cluster":
                raise Unfit("it is alone: its policy has no cluster")
            case _ if status >= 500:
                raise NoAnswer(f"it answers {status} to {path}")
            case _:
                raise Unfit(f"this is not the control port of a gateway: it answers {status} to {path}")

    async def aclose(self) -> None:
        await self._transport.aclose()


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__


def _is_tls(error: BaseException | None) -> bool:
    """Whether it comes of an SSLError; httpx and httpcore tell it as one of theirs."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None
