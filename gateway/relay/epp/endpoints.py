"""Endpoints of engines, as proxies name them: `ADDRESS:PORT`.

An engine behind a unix socket has no endpoint, so that a proxy cannot reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from gateway.core.engines.origin import Origin
from gateway.shared.addresses import is_address
from gateway.upstream.failures import UnknownName
from gateway.upstream.names import Names


class Endpoints:
    """Endpoints of a fleet. `origins` are the engines' addresses by id."""

    def __init__(self, origins: Callable[[], Iterable[tuple[str, Origin]]], names: Names) -> None:
        self._origins = origins
        self._names = names
        self._literal = lru_cache(4096)(_literal)

    async def of(self, origin: Origin) -> str:
        """First endpoint of an engine. Raises UnknownName."""
        return (await self._all(origin))[0]

    async def allowed(self, subset: frozenset[str] | None) -> frozenset[str] | None:
        """Ids of the engines that a proxy can reach and that its `subset` allows; None: all engines."""
        origins = list(self._origins())
        reached = [(id, origin) for id, origin in origins if origin.unix is None]
        if subset is None:
            return None if len(reached) == len(origins) else frozenset(id for id, _ in reached)
        allowed = set()
        for id, origin in reached:
            try:
                found = self._literal(origin) or await self._all(origin)
            except UnknownName:
                continue  # the health check says so
            if not subset.isdisjoint(found):
                allowed.add(id)
        return frozenset(allowed)

    async def _all(self, origin: Origin) -> list[str]:
        return [_endpoint(each, origin.port) for each in await self._names.addresses(origin.host)]


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _literal(origin: Origin) -> tuple[str, ...]:
    """Endpoint of an engine whose host is an address, known without a wait; empty: it is a name."""
    return (_endpoint(origin.host, origin.port),) if is_address(origin.host) else ()
