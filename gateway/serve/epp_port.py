"""Endpoint picker of a gateway, beside its data port: Envoy and others ask it where a request goes,
and it lends them grants for the calls that they forward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gateway.control.calls import CallView, active_calls
from gateway.relay.epp.endpoints import Endpoints
from gateway.relay.epp.lending import Lending
from gateway.relay.epp.server import PickerServer
from gateway.relay.pipeline import Pipeline
from gateway.serve.assembly import Gateway
from gateway.serve.starting import StartError
from gateway.shared.addresses import is_loopback, split_address
from gateway.shared.certificate import Certificate


class LentCalls:
    """Pipeline that lends its grants, in the decider's process. No relay knows of its calls."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        lending = Lending(gateway.decider, self._upstream, gateway.current, gateway.clock)
        own = gateway.pipeline
        self.pipeline = Pipeline(
            gateway.decider, gateway.attempts, own.endings.observe, gateway.rng, gateway.bodies,
            large=own.large, exchange=lending.exchange,
        )  # fmt: skip

    async def drain(self, within: float) -> None:
        """Take reports until no call is left, for `within` seconds at most, then give up the remaining calls."""
        tasks = self.pipeline.tasks
        if tasks and within > 0:
            await asyncio.wait(tasks, timeout=within)
        for live in list(tasks.values()):
            live.leave("drain")
        if tasks:
            await asyncio.wait(tasks)

    def calls(self) -> Iterable[CallView]:
        """Return the calls that wait and run now."""
        return active_calls(self.pipeline.tasks.values(), self._gateway.recorder.labels, self._gateway.clock())

    def _upstream(self, id: str) -> tuple[str, str | None]:
        """Return an engine's URL and the key to show."""
        engine = self._gateway.fleet.engines[id]
        return engine.url, self._gateway.engines.credentials(engine)[0]


class EppListener:
    """Endpoint picker at `where`, HOST:PORT; `certificate` None: without TLS."""

    def __init__(self, gateway: Gateway, where: str, certificate: Certificate | None) -> None:
        self._where = where
        self._certificate = certificate
        self._lent = lent = LentCalls(gateway)
        self.calls = lent.calls
        known = certificate is not None and certificate.client_ca is not None  # who asks
        trusted = known or is_loopback(split_address(where)[0])
        endpoints = Endpoints(
            lambda: ((id, client.origin) for id, client in gateway.engines.clients.items()), gateway.telemetry.names
        )
        self.server = PickerServer(
            lent.pipeline,
            gateway.bodies,
            endpoints,
            lambda: gateway.server.settings,
            lambda: gateway.decider.up,
            trusted=trusted,
        )

    async def listen(self) -> None:
        """Take streams from now on. Raises StartError."""
        host, port = split_address(self._where)
        try:
            await self.server.listen(host, port, self._certificate)
        except (OSError, ValueError) as error:
            raise StartError(f"--epp {self._where}: {error}") from error

    async def drain(self, within: float) -> None:
        """Finish the calls, then end the streams."""
        await self._lent.drain(within)
        await self.server.stop()

    async def aclose(self) -> None:
        """End the streams that are left."""
        await self.server.stop()
