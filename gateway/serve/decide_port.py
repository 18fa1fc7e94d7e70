"""Ports of a gateway whose calls others forward: the decide port, and what the endpoint picker shares with it.

They are where the decider is, and none of its relays know of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from gateway.control.calls import CallView, active_calls
from gateway.relay.decide.held_calls import HeldCalls
from gateway.relay.decide.lending import Lending, Upstream
from gateway.relay.decide.port import DecidePort
from gateway.relay.pipeline import Pipeline
from gateway.relay.wire.messages import ServerSettings, with_token
from gateway.relay.wire.server import Server, unix_socket
from gateway.serve.assembly import Gateway
from gateway.serve.starting import StartError

NOT_GIVEN = "its decide port or endpoint picker cannot be handed over: restart it"
MODE = 0o660  # of a unix socket: whoever may write to it may ask


class LentCalls:
    """Calls that a proxy forwards: a pipeline that lends its grants, and their holds."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.held = HeldCalls()
        lending = Lending(gateway.decider, self.held, self._upstream, gateway.current, gateway.clock)
        own = gateway.pipeline
        self.pipeline = Pipeline(
            gateway.current,
            gateway.decider,
            gateway.attempts,
            own.endings.observe,
            gateway.clock,
            gateway.rng,
            gateway.bodies,
            large=own.large,
            exchange=lending.exchange,
        )

    async def drain(self, within: float) -> None:
        """Take reports until no call is left, for `within` seconds at most, then give up the remaining calls."""
        tasks = self.pipeline.tasks
        if tasks and within > 0:
            await asyncio.wait(tasks, timeout=within)
        for live in list(tasks.values()):
            live.leave("drain")
        if tasks:
            await asyncio.wait(tasks)

    def views(self) -> Iterable[CallView]:
        """Return the calls that wait and run now."""
        return active_calls(self.pipeline.tasks.values(), self._gateway.recorder.labels, self._gateway.clock())

    def _upstream(self, id: str) -> Upstream:
        engine = self._gateway.fleet.engines[id]
        return Upstream(engine.url, self._gateway.engines.credentials(engine)[0])


class DecideListener:
    """Decide port beside a data port. `where` is HOST:PORT or unix:PATH; `token` None: there is none to show."""

    def __init__(self, gateway: Gateway, where: str, token: str | None) -> None:
        self._where = where
        self._lent = lent = LentCalls(gateway)
        self._data_port = data_port = gateway.server
        self.held, self.pipeline = lent.held, lent.pipeline
        self.handler = DecidePort(self.pipeline, self.held, token, lambda: data_port.settings.max_connections)
        self.server = Server(self.handler, self._settings(), gateway.bodies)

    def _settings(self) -> ServerSettings:
        """Return the settings of the data port, but a proxy that has shown the token may have all connections."""
        return with_token(self._data_port.settings)

    async def listen(self) -> None:
        """Take connections from now on. Raises StartError."""
        try:
            path = self._where.removeprefix("unix:")
            await self.server.listen(path if path == self._where else unix_socket(path, MODE))
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise StartError(f"--decide {self._where}: {why}") from error

    def apply(self) -> None:
        """Go by the data port's settings of now."""
        self.server.settings = self._settings()

    async def drain(self, within: float) -> None:
        """Finish the calls as `LentCalls.drain` does, then close the connections."""
        await self._lent.drain(within)
        await self.server.drain(0.0)

    def calls(self) -> Iterable[CallView]:
        """Return the calls that wait and run now."""
        return self._lent.views()

    async def aclose(self) -> None:
        """Take no more connections."""
        self.server.stop_accepting()
