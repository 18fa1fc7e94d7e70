"""Targets of a load: their servers, and a connection pool for each server.

A connection that has carried a whole answer waits for the next request. The last used goes first, so that a load keeps
no more of them busy than it needs. A connection idle for IDLE seconds is closed rather than used: servers close theirs
after a few seconds (uvicorn, and vLLM with it, after 5), and a request must not meet that.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from gateway.shared.certificate import authorities_in
from gateway.shared.files.plain_file import open_plain
from loadtest.clients.answer import Answer
from loadtest.clients.client import Exchange, ResponseListener
from loadtest.load.scenario import Mistake
from loadtest.load.workload import Planned

IDLE = 2.0  # seconds
CA_BYTES = 1 << 20
Spread = Literal["round_robin", "direct"]


class Address(msgspec.Struct, frozen=True):
    """A server, as a URL names it. `prefix`: what stands before `/v1` in its paths."""

    host: str
    port: int = 0
    tls: bool = False
    unix: str = ""
    prefix: bytes = b""

    @property
    def name(self) -> str:
        """For reports and the host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.unix or self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def request(self, method: bytes, path: bytes, headers: bytes = b"", body: bytes = b"") -> bytes:
        """The bytes of a request. `headers`: whole lines, beside those that every request has."""
        return b"%b %b%b HTTP/1.1\r\nhost: %b\r\nuser-agent: weir-bench\r\n%bcontent-length: %d\r\n\r\n%b" % (
            method, self.prefix, path, self.name.encode("ascii", "replace"), headers, len(body), body,
        )  # fmt: skip


def parse_url(text: str) -> Address:
    """The server at a base URL; a `/v1` at its end is taken off, for that is how clients are told of it. Raises
    ValueError."""
    if text.startswith("unix://"):
        if len(text) <= len("unix:///"):
            raise ValueError(f"{text!r}: write unix:///PATH")
        return Address("localhost", unix=text.removeprefix("unix://"))
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    # Keys in URLs end up in reports.
    odd = parts.username is not None or parts.query or parts.fragment or not text.isprintable() or " " in text
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or odd:
        raise ValueError(f"{text!r}: write http://HOST:PORT, https://HOST:PORT or unix:///PATH")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(parts.hostname, port or (443 if tls else 80), tls, prefix=prefix.encode())


class ServedModel(msgspec.Struct, frozen=True):
    """Model of a server, as much of its entry as a load needs: other fields are as each server likes."""

    id: str
    max_model_len: int | None = None


class ServedModels(msgspec.Struct, frozen=True):
    """Answer of any OpenAI-compatible server to GET /v1/models."""

    data: list[ServedModel]


def models_of(body: bytes) -> list[ServedModel]:
    """Read an answer to GET /v1/models. Raises ValueError."""
    try:
        return msgspec.json.decode(body, type=ServedModels).data
    except RecursionError:
        raise ValueError("an answer nested too deep") from None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Target of one run.

    `addresses`: of one server, or of several that requests are spread over: in turn, or `direct`: each conversation,
    and each request that is none, at one that chance has given it. `headers`: sent with each. `sources`: whose /metrics
    tell of it, by the names of their engines; ""'s metrics name engines themselves.
    """

    name: str
    addresses: Sequence[Address]
    spread: Spread = "round_robin"
    headers: Mapping[bytes, bytes] = {}
    sources: Sequence[tuple[str, Address]] = ()


def tls_of(ca: str | None, *, insecure: bool) -> ssl.SSLContext:
    """Rules for certificates: trust those in the file `ca` (PEM), or check none. Raises Mistake."""
    trusted = None
    try:
        if ca is not None:
            with open_plain(Path(ca)) as file:
                trusted = authorities_in(file.read(CA_BYTES))
        context = ssl.create_default_context(cadata=trusted)
    except OSError as error:
        raise Mistake(f"--ca {ca}: {error.strerror or 'no PEM certificates'}") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Server:
    """Server of a target during one run, and the connections to it that wait for a request."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None) -> None:
        self.address = address
        self.opened = 0  # connections, all told
        self._tls = tls if address.tls else None
        self._idle: deque[tuple[asyncio.Transport, float]] = deque()
        self._lent: set[Exchange] = set()  # whose connections have not been given back
        self._found: tuple[str, ...] = ()  # addresses of its name, the good one first
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, request: bytes, answer: Answer, listener: ResponseListener | None = None) -> Exchange:
        """Send a request now. Whoever has waited for its `over` gives it back to `done`."""
        loop = asyncio.get_running_loop()
        exchange = Exchange(request, answer, loop.create_future(), listener, keep=True)
        self._lent.add(exchange)
        answer.sent = answer.sent or time.monotonic()
        transport = self._take()
        if transport is not None:
            transport.set_protocol(exchange)
            exchange.connection_made(transport)
        else:
            task = loop.create_task(self._connect(exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return exchange

    def done(self, exchange: Exchange) -> None:
        """Keep its connection for the next request, or close it."""
        self._lent.discard(exchange)
        transport = exchange.transport
        if transport is None or transport.is_closing():
            return
        if exchange.reusable:
            transport.set_protocol(Parked(transport))
            self._idle.append((transport, time.monotonic()))
        else:
            transport.abort()

    async def resolve(self) -> None:
        """Look its name up once, since a load would be a load for name servers too. OSError."""
        address = self.address
        if not address.unix and not self._found:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            self._found = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

    def close(self) -> None:
        """Close every connection, also of a request whose caller has gone or is about to give it back, and give up
        what is about to connect."""
        for transport in [*(transport for transport, _ in self._idle), *(each.transport for each in self._lent)]:
            if transport is not None:
                transport.abort()
        self._idle.clear()
        self._lent.clear()
        for task in list(self._tasks):
            task.cancel()

    def _take(self) -> asyncio.Transport | None:
        while self._idle:
            transport, since = self._idle.pop()
            if not transport.is_closing():
                if time.monotonic() - since < IDLE:
                    return transport
                transport.abort()
        return None

    async def _connect(self, exchange: Exchange) -> None:
        try:
            await self._open(exchange)
            self.opened += 1
        except OSError as error:
            exchange.failed(what_happened(error))

    async def _open(self, exchange: Exchange) -> None:
        loop, address = asyncio.get_running_loop(), self.address
        if address.unix:
            await loop.create_unix_connection(lambda: exchange, address.unix)
            return
        await self.resolve()
        for number, host in enumerate(self._found):
            try:
                name = address.host if self._tls else None
                await loop.create_connection(lambda: exchange, host, address.port, ssl=self._tls, server_hostname=name)
            except OSError:
                if number + 1 == len(self._found):
                    raise
            else:
                self._found = (host, *(other for other in self._found if other != host))
                return


class Parked(asyncio.Protocol):
    """A connection between two requests: nothing may come."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.abort()


class Servers:
    """The servers of a target during one run, and whose turn it is. `tls`: how certificates are checked."""

    def __init__(self, target: Target, tls: ssl.SSLContext | None) -> None:
        self.servers = [Server(address, tls) for address in target.addresses]
        self._spread = target.spread
        self._next = 0

    def pick(self, planned: Planned) -> Server:
        """Choose the server of this request."""
        if len(self.servers) == 1:
            return self.servers[0]
        if self._spread == "direct":
            who = planned.conversation or str(planned.index)
            return self.servers[zlib.crc32(who.encode()) % len(self.servers)]
        self._next += 1
        return self.servers[(self._next - 1) % len(self.servers)]

    def close(self) -> None:
        """No connection is left open."""
        for server in self.servers:
            server.close()


def what_happened(error: OSError) -> str:
    """An error of a socket in a few words, without addresses: reports count by it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}"
    if isinstance(error, socket.gaierror):
        return f"name lookup: {error.strerror}"
    if error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
