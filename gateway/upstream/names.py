"""Addresses of engines' hosts: looked up rarely, beside the event loop, and believed while name servers are silent.

A look-up is a thread of its own, a daemon: `getaddrinfo` cannot be cancelled, and neither another host's look-up nor
the end of the process may wait for one that hangs. Each host has at most one, all together AT_ONCE; the rest wait in
line. An answer is good for TTL seconds. After that, and when its addresses do not answer (`doubt`), the host is asked
for again; until there is an answer the last good addresses serve. Only a name server that denies the name ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import threading
from collections import deque
from weakref import WeakValueDictionary

from gateway.shared.addresses import is_address
from gateway.upstream.failures import UnknownName, unknown_name
from gateway.upstream.trust import Trust

TTL = 10.0  # seconds
AGAIN = 2.0  # seconds between two look-ups of a host, whatever became of the first
PATIENCE = 0.1  # seconds that a new look-up is waited for where older addresses are known
AT_ONCE = 32  # look-ups
MOST = 4096  # hosts remembered
DENIED = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})  # there is no such name, or it has no address


class _Host:
    """Look-up state of one host. Times are the loop's."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self.error: UnknownName | None = None  # of the last look-up
        self.asked_at = -math.inf  # when that ended
        self.good_until = -math.inf
        self.wait_until = -math.inf  # how long the one under way is waited for, where addresses are known
        self.under_way: asyncio.Future[None] | None = None


class Names:
    """The addresses of hosts, and the authorities that certify them, for one event loop. `look_ups` counts those that
    were begun."""

    def __init__(self) -> None:
        self.look_ups = 0
        self._contexts: WeakValueDictionary[str | None, ssl.SSLContext] = WeakValueDictionary()  # by `Trust.ca`
        self._hosts: dict[str, _Host] = {}
        self._running = 0
        self._line: deque[tuple[asyncio.AbstractEventLoop, str]] = deque()

    def context(self, trust: Trust) -> ssl.SSLContext:
        """The context of all clients that trust these authorities, while one is used: to read the system's takes 20 ms
        and a megabyte. Raises ssl.SSLError where `ca` holds no certificate."""
        found = self._contexts.get(trust.ca)
        if found is None:
            found = self._contexts[trust.ca] = trust.context()
        return found

    async def addresses(self, host: str) -> tuple[str, ...]:
        """At least one address. Waits for the first look-up as long as the caller does. Raises UnknownName."""
        if is_address(host):
            return (host,)
        known = self._hosts.get(host)
        if known is None:
            if len(self._hosts) >= MOST:
                self._hosts.pop(next(iter(self._hosts)))
            known = self._hosts[host] = _Host()
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now < known.good_until:
            return known.addresses
        if known.under_way is None:
            if now - known.asked_at >= AGAIN:
                known.under_way = loop.create_future()
                known.wait_until = now + PATIENCE
                self._begin(loop, host)
            elif not known.addresses and known.error is not None:
                raise known.error
        if known.under_way is not None:
            if not known.addresses:
                await asyncio.shield(known.under_way)
            elif now < known.wait_until:
                await asyncio.wait((known.under_way,), timeout=known.wait_until - now)
        if not known.addresses:
            raise known.error or UnknownName(f"the name {host} does not resolve")
        return known.addresses

    def doubt(self, host: str) -> None:
        """Expire a host whose addresses all failed to connect, so that the next use looks it up again."""
        if host in self._hosts:
            self._hosts[host].good_until = -math.inf

    def _begin(self, loop: asyncio.AbstractEventLoop, host: str) -> None:
        if self._running >= AT_ONCE:
            self._line.append((loop, host))
            return
        self._running += 1
        self.look_ups += 1
        try:
            threading.Thread(target=self._look_up, args=(loop, host), name="weir-name", daemon=True).start()
        except RuntimeError as failed:  # the process may have no further thread
            loop.call_soon(self._answered, loop, host, (), OSError(str(failed)))

    def _look_up(self, loop: asyncio.AbstractEventLoop, host: str) -> None:
        """Look up a host. Runs in a thread."""
        found: tuple[str, ...] = ()
        error: OSError | UnicodeError | None = None
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = tuple(dict.fromkeys(str(info[4][0]) for info in infos))
        except (OSError, UnicodeError) as failed:  # without a descriptor left it is no gaierror
            error = failed
        with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever would hear it
            loop.call_soon_threadsafe(self._answered, loop, host, found, error)

    def _answered(
        self,
        loop: asyncio.AbstractEventLoop,
        host: str,
        found: tuple[str, ...],
        error: OSError | UnicodeError | None,
    ) -> None:
        self._running -= 1
        known, now = self._hosts.get(host), loop.time()
        if known is not None:
            known.asked_at = now
            if error is None:
                known.addresses, known.error, known.good_until = found, None, now + TTL
            else:
                known.error = unknown_name(host, error)
                if isinstance(error, UnicodeError) or (isinstance(error, socket.gaierror) and error.errno in DENIED):
                    known.addresses = ()
            if known.under_way is not None and not known.under_way.done():
                known.under_way.set_result(None)
            known.under_way = None
        if self._line:
            self._begin(*self._line.popleft())
