"""Data port as the process that decides sees it: its own, or that of relays which are processes of their own."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from gateway.control.calls import CallView
from gateway.control.processes import ProcessView
from gateway.decider.loading import Configuration
from gateway.frames.messages import RelayCounts
from gateway.serve.assembly import Gateway
from gateway.serve.starting import Options


class DataPort(Protocol):
    """Where clients connect. `addresses` are known once it listens."""

    @property
    def addresses(self) -> list[str]: ...

    async def listen(self, context: ssl.SSLContext | None) -> None:
        """Take connections from now on. Raises OSError."""

    def apply(self, configuration: Configuration) -> None:
        """Go by this policy from now on. Raises ApplyError, and then nothing has changed."""

    async def drain(self, within: float) -> None:
        """Finish what is under way within so many seconds; back when no connection is left."""

    def totals(self) -> Sequence[RelayCounts]:
        """The counts of relays."""

    async def count(self) -> None:
        """Have relays tell their counts of now."""

    def calls(self) -> Iterable[CallView]:
        """What waits and runs now."""

    def processes(self) -> list[ProcessView]:
        """The processes of this gateway."""

    async def aclose(self) -> None:
        """End it."""


class OwnDataPort:
    """The data port of a gateway in one process."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._listen = options.listen
        self._started = time.time()

    @property
    def addresses(self) -> list[str]:
        return self._gateway.server.addresses

    async def listen(self, context: ssl.SSLContext | None) -> None:
        server = self._gateway.server
        if self._listen.startswith("unix:"):
            await server.listen(None, None, path=self._listen.removeprefix("unix:"), ssl=context)
        else:
            host, _, port = self._listen.rpartition(":")
            await server.listen(host.strip("[]"), int(port), ssl=context)

    def apply(self, configuration: Configuration) -> None:
        self._gateway.apply(configuration)

    async def drain(self, within: float) -> None:
        await self._gateway.server.drain(within)

    def totals(self) -> Sequence[RelayCounts]:
        return ()

    async def count(self) -> None:
        """All is counted here."""

    def calls(self) -> Iterable[CallView]:
        return self._gateway.calls()

    def processes(self) -> list[ProcessView]:
        calls, connections = self._gateway.metrics.counts.calls, self._gateway.server.connections
        return [ProcessView("decider", os.getpid(), self._started, calls, connections)]

    async def aclose(self) -> None:
        """It ends by its drain."""
