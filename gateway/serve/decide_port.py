"""Data port with a decide port beside it. It is where the decider is, and none of its relays know of it."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterable, Sequence
from itertools import chain

from gateway.control.calls import CallView, active_calls
from gateway.control.processes import ProcessView
from gateway.decider.loading import Configuration
from gateway.frames.messages import RelayCounts
from gateway.relay.decide.held_calls import HeldCalls
from gateway.relay.decide.lending import Lending, Upstream
from gateway.relay.decide.port import DecidePort
from gateway.relay.pipeline import Pipeline
from gateway.relay.wire.messages import ServerSettings, with_token
from gateway.relay.wire.server import Server, unix_socket
from gateway.serve.assembly import Gateway
from gateway.serve.data_port import DataPort
from gateway.serve.starting import StartError
from gateway.serve.upgrade.receiver import Predecessor
from gateway.serve.upgrade.rendezvous import HandOffPayload, Offer

NOT_GIVEN = "its decide port cannot be handed over: restart it"
MODE = 0o660  # of a unix socket: whoever may write to it may ask


class WithDecidePort:
    """A DataPort, as in data_port.py. `where` is HOST:PORT or unix:PATH; `token` None: there is none to show."""

    def __init__(self, data: DataPort, gateway: Gateway, where: str, token: str | None) -> None:
        self._data = data
        self._gateway = gateway
        self._where = where
        self.held = HeldCalls()
        lending = Lending(gateway.decider, self.held, self._upstream, gateway.current, gateway.clock)
        own = gateway.pipeline
        self.pipeline = Pipeline(
            gateway.current,
            gateway.decider,
            gateway.attempts,
            own.observe,
            gateway.clock,
            gateway.rng,
            gateway.bodies,
            large=own.large,
            exchange=lending.exchange,
        )
        data_port = gateway.server
        self.handler = DecidePort(self.pipeline, self.held, token, lambda: data_port.settings.max_connections)
        self.server = Server(self.handler, self._settings(), gateway.bodies)

    def _settings(self) -> ServerSettings:
        """Those of the data port, but a proxy that has shown the token may have all connections."""
        return with_token(self._gateway.server.settings)

    def _upstream(self, id: str) -> Upstream:
        engine = self._gateway.fleet.engines[id]
        return Upstream(engine.url, self._gateway.shown(engine)[0])

    @property
    def addresses(self) -> list[str]:
        return self._data.addresses

    async def take_over(self, taken: Predecessor) -> None:
        await self._data.take_over(taken)

    def offer(self) -> tuple[Offer, list[int]]:
        return Offer(refused=NOT_GIVEN), []

    def hand_over(self, within: float, decider: str) -> HandOffPayload:
        raise AssertionError(NOT_GIVEN)  # it was never offered

    async def listen(self, context: ssl.SSLContext | None) -> None:
        """Both listen. Raises OSError for the data port, StartError for the decide port."""
        try:
            if self._where.startswith("unix:"):
                bound = unix_socket(self._where.removeprefix("unix:"), MODE)
                await self.server.listen(None, None, sock=bound, owner=True)
            else:
                host, _, port = self._where.rpartition(":")
                await self.server.listen(host.strip("[]"), int(port))
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise StartError(f"--decide {self._where}: {why}") from error
        await self._data.listen(context)

    def apply(self, configuration: Configuration) -> None:
        self._data.apply(configuration)
        self.server.settings = self._settings()

    async def drain(self, within: float, *, gently: bool = False) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._drain(within))
            await self._data.drain(within, gently=gently)  # begins at once: see gateway/serve/ending.py

    async def _drain(self, within: float) -> None:
        """Take reports until no call is left; then the rest is given up."""
        tasks = self.pipeline.tasks
        if tasks and within > 0:
            await asyncio.wait(tasks, timeout=within)
        for live in list(tasks.values()):
            live.leave("drain")
        if tasks:
            await asyncio.wait(tasks)
        await self.server.drain(0.0)

    def totals(self) -> Sequence[RelayCounts]:
        return self._data.totals()

    async def count(self) -> None:
        await self._data.count()

    def calls(self) -> Iterable[CallView]:
        return chain(self._data.calls(), active_calls(self.pipeline.tasks.values(), self._gateway.clock()))

    def processes(self) -> list[ProcessView]:
        return self._data.processes()

    async def aclose(self) -> None:
        self.server.stop_accepting()
        await self._data.aclose()
