"""Endpoint picker of a gateway, beside its data port: Envoy and others ask it where a request goes."""

from __future__ import annotations

from gateway.relay.epp.endpoints import Endpoints
from gateway.relay.epp.server import PickerServer
from gateway.serve.assembly import Gateway
from gateway.serve.lent_calls import LentCalls
from gateway.serve.starting import StartError
from gateway.shared.addresses import is_loopback, split_address
from gateway.shared.certificate import Certificate


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
