"""Kubernetes' API server, as a pod's service account may use it: one object, one list, one watch.

The token is read anew for each request, because the kubelet renews its file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import cast
from urllib.parse import urlencode

import httpx
import msgspec

from gateway.shared.control.http_client import AnswerTooLarge, exchange, request_headers, transport_to

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WITHIN = 15.0  # seconds for an answer
SILENCE = 15.0  # seconds beyond a watch's own time-out without its end
MOST = 64 * 1024**2  # bytes of a list
LONGEST = 1024**2  # bytes of a line of a watch


class Unreachable(Exception):
    """The API server gives no usable answer; the message says why, `status` is that of an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServiceAccount(msgspec.Struct, frozen=True):
    """Address of the API server, and the folder with token, ca.crt and namespace of a service account."""

    url: str
    folder: Path = ACCOUNT

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ServiceAccount:
        """Read what Kubernetes tells every pod. Raises Unreachable outside of one."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise Unreachable("no KUBERNETES_SERVICE_HOST: this gateway does not run in a pod")
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    def text(self, name: str) -> str:
        """Content of a file of the account. Raises Unreachable."""
        try:
            return (self.folder / name).read_text().strip()
        except OSError as error:
            message = f"{self.folder / name}: {error.strerror}: the pod needs its service account's token mounted"
            raise Unreachable(message) from error


class KubernetesApi:
    """Client of the API server. `aclose` ends it."""

    def __init__(self, account: ServiceAccount) -> None:
        self.account = account
        self._transport: httpx.AsyncHTTPTransport | None = None

    async def get(self, path: str, **query: str) -> bytes:
        """Body of an object or a list. Raises Unreachable."""
        try:
            async with asyncio.timeout(WITHIN):
                status, body = await exchange(self._opened(), self._request(path, query), MOST)
        except TimeoutError as error:
            raise Unreachable(f"GET {path}: no answer within {WITHIN:.0f} s") from error
        except AnswerTooLarge as error:
            raise Unreachable(f"GET {path}: an answer of more than {MOST} bytes") from error
        except httpx.HTTPError as error:
            raise Unreachable(f"GET {path}: {error or type(error).__name__}") from error
        if status != 200:
            raise Unreachable(_words(path, status, body), status)
        return body

    async def watch(self, path: str, seconds: float, **query: str) -> AsyncIterator[bytes]:
        """Lines of a watch, until the server ends it after so many seconds. Raises Unreachable."""
        query |= {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": f"{seconds:.0f}"}
        held = b""
        try:
            async with asyncio.timeout(seconds + SILENCE):
                response = await self._opened().handle_async_request(self._request(path, query))
                async with aclosing(response), aclosing(cast("AsyncGenerator[bytes]", response.aiter_raw())) as chunks:
                    if response.status_code != 200:
                        raise Unreachable(_words(path, response.status_code, b""), response.status_code)
                    async for chunk in chunks:
                        *lines, held = (held + chunk).split(b"\n")
                        for line in lines:
                            yield line
                        if len(held) > LONGEST:
                            raise Unreachable(f"GET {path}: a line of more than {LONGEST} bytes")
        except TimeoutError as error:
            raise Unreachable(f"GET {path}: the watch does not end") from error
        except httpx.HTTPError as error:
            raise Unreachable(f"GET {path}: {error or type(error).__name__}") from error

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()

    def _request(self, path: str, query: Mapping[str, str]) -> httpx.Request:
        url = f"{self.account.url}{path}" + (f"?{urlencode(query)}" if query else "")
        return httpx.Request("GET", url, headers=request_headers("weir", self.account.text("token")))

    def _opened(self) -> httpx.AsyncHTTPTransport:
        if self._transport is None:
            self._transport = transport_to(self.account.url, ca=self.account.text("ca.crt"))
        return self._transport


def _words(path: str, status: int, body: bytes) -> str:
    hint = {
        401: ": the service account's token is not accepted",
        403: ": the service account may not read it: see the chart's Role",
        404: ": there is none; is the Gateway API Inference Extension installed?",
    }.get(status, "")
    said = body[:200].decode("utf-8", "replace") if not hint else ""
    return f"GET {path}: {status}{hint}{said and ': ' + said}"
