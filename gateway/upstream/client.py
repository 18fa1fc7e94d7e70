"""Connection pool of one engine. `connection.py` is one connection.

The pool is a deque used as a stack; it has no queue of its own, since the ledger bounds what is in flight. A reused
connection may have been closed by the engine a moment ago (vLLM keeps them 5 s): a send on it that fails before any
byte of the answer is repeated once on a fresh one, unless it went out whole and may cost money (`resends`). Leaving an
answer before its end closes the connection, and vLLM aborts the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl as tls
from collections import deque
from collections.abc import Callable, Sequence

from gateway.core.engines.origin import Origin, parse_origin
from gateway.native import Pump
from gateway.native.loan import ClientSide, Loan
from gateway.shared.addresses import is_private
from gateway.upstream.answer_reader import BodySink
from gateway.upstream.connection import ClientSettings, Done, EngineConnection, EngineError, Kind
from gateway.upstream.failures import ForbiddenAddress, reason_of
from gateway.upstream.names import Names
from gateway.upstream.trust import Trust
from gateway.upstream.unread import limited

__all__ = ["Client", "ClientSettings", "EngineError", "Origin", "Reply", "parse_origin"]

# The one provider that takes its key in x-api-key alone, on its own API; vLLM and others that speak that take Bearer.
ANTHROPIC, MESSAGES = "api.anthropic.com", b"/messages"


class Client:
    """The connections to one engine. `active` counts those with an answer under way, `idle` those in the pool. `names`
    knows the addresses of its host; clients of one gateway share it."""

    def __init__(
        self,
        origin: Origin,
        settings: ClientSettings,
        *,
        trust: Trust | None = None,
        api_key: str | None = None,
        names: Names | None = None,
    ) -> None:
        self.origin = origin
        self._names = names or Names()
        self.active = 0
        self._trust: Trust | None = None
        self._ssl: tls.SSLContext | None = None
        self._pool: deque[EngineConnection] = deque()
        self._unanswered: set[EngineConnection] = set()
        self._base = origin.base_path.encode()
        self._closed = False
        self.go_by(settings, api_key, trust)

    def go_by(self, settings: ClientSettings, api_key: str | None, trust: Trust | None = None) -> None:
        """Apply settings, key and trust to all further connections and requests. `trust` None: the system's
        authorities, and the host's own name. Raises ValueError for a key that is not printable ASCII."""
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("an engine's API key is printable ASCII")
        self.settings = settings
        trust = trust or Trust()
        if self.origin.tls and trust != self._trust:
            self._trust, self._ssl = trust, self._names.context(trust)
        host, key = self.origin.authority.encode(), (api_key or "").encode()
        line = b" HTTP/1.1\r\nhost: %b\r\n" % host
        self._static = self._static_to_messages = line + (b"authorization: Bearer %b\r\n" % key if key else b"")
        if key and self.origin.host == ANTHROPIC:
            self._static_to_messages = line + b"x-api-key: %b\r\n" % key

    def __repr__(self) -> str:
        return f"<Client {self.origin.url} {self.active} active {self.idle} idle>"

    @property
    def idle(self) -> int:
        return len(self._pool)

    async def send(
        self,
        method: bytes,
        path: bytes,
        headers: bytes,
        body: bytes,
        *,
        timeout: float,  # noqa: ASYNC109 # see the deadline below
        sends: Callable[[], None] | None = None,
    ) -> Reply:
        """Send a request; the reply, once its head and first body bytes (or the end of its body) are here.

        `headers` are preformatted lines; host, content-length and the engine's key are added. `timeout` seconds cover
        it all. `sends` is called when the first byte is written. Raises EngineError. Cancellation closes
        the connection.
        """
        if self._closed:
            raise EngineError("closed", "the client of this engine is closed", before_bytes=True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        length = b"content-length: %d\r\n\r\n" % len(body)
        static = self._static_to_messages if path == MESSAGES else self._static
        head = b"".join((method, b" ", self._base, path, static, headers, length))
        message = head + body if len(body) <= 65536 else None
        while True:
            connection = self._pool.pop() if self._pool else None
            reused = connection is not None
            self.active += 1
            try:
                if connection is None:
                    connection = await self._connect(deadline)
                self._unanswered.add(connection)
                answer = connection.exchange(message, head, body, deadline)
                if sends is not None:
                    sends()
                await answer
            except BaseException as error:  # raised again, but where the request goes once more
                self.active -= 1
                if connection is not None:
                    self._unanswered.discard(connection)
                    connection.abort()
                if not (reused and isinstance(error, EngineError) and self._again(error)):
                    raise
                self._drop_pool()  # its neighbours are as old: the engine has restarted or timed them out
            else:
                self._unanswered.discard(connection)
                return Reply(connection, self)

    def _again(self, error: EngineError) -> bool:
        """Whether a request that failed on a reused connection is sent once more."""
        return error.before_bytes and error.kind == "reset" and (self.settings.resends or not error.whole)

    def _drop_pool(self) -> None:
        while self._pool:
            self._pool.pop().abort()

    async def _connect(self, deadline: float) -> EngineConnection:
        loop, origin = asyncio.get_running_loop(), self.origin
        left = deadline - loop.time()
        within = min(self.settings.connect_timeout, left)

        def made() -> EngineConnection:
            return EngineConnection(self.settings, self, loop)

        resolving = False
        try:
            async with limited(within):
                if origin.unix is not None:
                    _, connection = await loop.create_unix_connection(
                        made, origin.unix, ssl=self._ssl, server_hostname=self._server_name
                    )
                    return connection
                resolving = True
                addresses = await self._names.addresses(origin.host)
                resolving = False
                return await self._connect_to(self._permitted(addresses), made)
        except TimeoutError:
            # A caller in a hurry is no proof that the engine is down.
            kind: Kind = "timeout" if within == left else "connect"
            self._names.doubt(origin.host)
            if resolving:
                words, reason = f"the name {origin.host} does not resolve: no answer", "name"
            else:
                words, reason = "no connection", "timeout"
            words += f" within {max(0.0, within):.1f} s"
            raise EngineError(kind, words, before_bytes=True, reason=reason, sent=False) from None
        except OSError as error:
            self._names.doubt(origin.host)
            reason, words = reason_of(error)
            raise EngineError("connect", f"cannot connect: {words}", before_bytes=True, reason=reason) from error

    async def _connect_to(self, addresses: Sequence[str], made: Callable[[], EngineConnection]) -> EngineConnection:
        """Connect to the first address that takes a connection. Raises OSError: that of the first TLS handshake that
        failed, else of the first address."""
        loop, origin = asyncio.get_running_loop(), self.origin
        name = self._server_name
        failed: OSError | None = None
        for address in addresses:
            try:
                _, connection = await loop.create_connection(
                    made, address, origin.port, ssl=self._ssl, server_hostname=name
                )
            except OSError as error:
                if failed is None or (isinstance(error, tls.SSLError) and not isinstance(failed, tls.SSLError)):
                    failed = error
            else:
                return connection
        raise failed or OSError("no address")

    def _permitted(self, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Return the addresses in the settings' network. Raises ForbiddenAddress without any: whoever owns the name may
        have it lead elsewhere after a check."""
        network = self.settings.network
        if network == "any":
            return addresses
        permitted = tuple([address for address in addresses if is_private(address) == (network == "private")])
        if not permitted:
            raise ForbiddenAddress(f"{self.origin.host} leads to {addresses[0]}, which is no {network} address")
        return permitted

    @property
    def _server_name(self) -> str | None:
        """Name that the server's certificate must have; None without TLS."""
        return None if self._trust is None else self._trust.name or self.origin.host

    def returned(self, connection: EngineConnection) -> None:
        """The answer is over, one way or the other."""
        self.active -= 1
        connection.let_go()
        if self._closed or not connection.reusable or len(self._pool) >= self.settings.max_idle:
            connection.abort()
        else:
            connection.rest()
            self._pool.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """See ConnectionPool."""
        with contextlib.suppress(ValueError):
            self._pool.remove(connection)

    def abandon(self) -> None:
        """The engine is taken for dead: what it has not begun to answer fails now, and the idle connections close."""
        self._drop_pool()
        for connection in list(self._unanswered):
            connection.give_up("the engine is taken for dead")

    def close(self) -> None:
        """Close the idle connections; those with an answer under way close when it ends."""
        self._closed = True
        self._drop_pool()

    async def aclose(self) -> None:
        """`close`, for those who close many things alike."""
        self.close()


class Reply:
    """An engine's answer: its head and first bytes are here. `close` it, whatever happens."""

    __slots__ = ("_client", "_connection", "_reading", "_was_complete", "framed", "headers", "length", "status")

    def __init__(self, connection: EngineConnection, client: Client) -> None:
        self._connection: EngineConnection | None = connection  # None once closed: it may have another answer by then
        self._client = client
        self._was_complete = False
        self._reading: asyncio.Future[None] | None = None
        answer = connection.answer
        self.status = answer.status
        self.headers = answer.headers
        self.length = answer.length
        self.framed = answer.framed

    @property
    def heard_at(self) -> float:
        """Time of the last bytes received, in seconds of the loop's clock; -inf once closed."""
        return -math.inf if self._connection is None else self._connection.heard_at

    @property
    def complete(self) -> bool:
        """The whole body is here."""
        return self._was_complete if self._connection is None else self._connection.complete

    def relay(
        self, data: BodySink, done: Done, whole: BodySink | None = None, sink: ClientSide | None = None
    ) -> Loan | None:
        """Hand over the body: what is here at once, the rest from the socket's own callback.

        `done` runs once, unless the reply is closed before. A read that is exactly one chunk goes to `whole`, if given,
        with its framing; every other to `data`, without. With a `sink` the loan is returned by which the pump may pass
        such reads on to it, if there is a pump.
        """
        connection = self._connection
        if connection is None:
            raise RuntimeError("the reply is closed")
        connection.relay(data, done, whole)
        return None if sink is None or Pump is None else Loan(connection, sink)

    def whole(self) -> bytes:
        """Take the body of a complete answer."""
        if self._connection is None:
            raise RuntimeError("the reply is closed")
        return self._connection.whole()

    def wait_until(self, at: float) -> None:
        """Bear any silence up to this time of the loop: the answer has begun before its prompt was read."""
        if self._connection is not None:
            self._connection.stalls_from = at

    def pause(self) -> None:
        """Stop reading the engine: whoever takes the bytes cannot take more."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self._connection is not None:
            self._connection.resume()

    async def read(self, limit: int) -> bytes:
        """The whole body, at most `limit` bytes. Raises EngineError."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        parts: list[bytes] = []
        size = 0

        def data(piece: bytes) -> None:
            nonlocal size
            size += len(piece)
            if size <= limit:
                parts.append(piece)
            elif not over.done():
                over.set_exception(EngineError("garbage", f"the answer is over {limit} bytes"))

        def done(error: EngineError | None) -> None:
            if not over.done():
                if error is None:
                    over.set_result(None)
                else:
                    over.set_exception(error)

        self._reading = over
        self.relay(data, done)
        await over
        return b"".join(parts)

    def close(self) -> None:
        """Idempotent. A whole answer's connection goes back to the pool; any other is closed, and vLLM aborts."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._was_complete = connection.complete
            self._client.returned(connection)
            if self._reading is not None and not self._reading.done():
                self._reading.set_exception(EngineError("closed", "the reply was closed before its end"))
