"""gRPC server of the picker: external processing, and the standard health checks.

grpc.aio runs on the gateway's own event loop, so that streams ask the decider without a hop between threads.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.outcome import error_body
from gateway.relay.epp import messages
from gateway.relay.epp.endpoints import Endpoints
from gateway.relay.epp.stream import Misordered, Picker, PickerStream
from gateway.relay.pipeline import Pipeline
from gateway.relay.wire.messages import ServerSettings
from gateway.shared.certificate import Certificate
from gateway.shared.tasks import lasting

READINESS: Final = ("", "readiness", messages.SERVICE)  # services of the health check that need the decider
LOOK_EVERY: Final = 0.5  # seconds between two looks at the decider for the health check
SLACK: Final = 1024 * 1024  # bytes of a message beside its body
GRACE: Final = 1.0  # seconds for proxies to read the last messages
_BUSY = ((b"content-type", b"application/json"), (b"retry-after", b"2"), (b"x-weir-reason", b"connections"))
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class PickerServer:
    """Server of a picker at HOST:PORT. `ready`: whether proxies should ask it."""

    def __init__(
        self,
        pipeline: Pipeline,
        bodies: BodyMemory,
        endpoints: Endpoints,
        settings: Callable[[], ServerSettings],
        ready: Callable[[], bool],
        *,
        trusted: bool,
    ) -> None:
        self._picker = Picker(pipeline, bodies, endpoints, settings, grpc.aio.EOF, trusted)
        self._settings = settings
        self._ready = ready
        self._health = health.aio.HealthServicer()
        self._server: Any = None
        self._looking: asyncio.Task[None] | None = None
        self.streams = 0
        self.address = ""

    async def listen(self, host: str, port: int, certificate: Certificate | None) -> None:
        """Take streams from now on. Raises OSError."""
        settings = self._settings()
        self._server = server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", settings.max_body + SLACK),
                ("grpc.max_send_message_length", settings.max_body + SLACK),
                ("grpc.max_concurrent_streams", settings.max_connections),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._process, messages.Incoming.FromString, messages.Outgoing.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE, {"Process": handler}),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                bound = server.add_insecure_port(where)
            else:
                bound = server.add_secure_port(where, _credentials(certificate))
        except RuntimeError as error:  # gRPC's only error for an address
            raise OSError(0, str(error)) from error
        await self._health.set("liveness", _SERVING)
        await self._look()
        await server.start()
        self._looking = lasting("the endpoint picker's health", self._looks)
        self.address = f"{host}:{bound}"

    async def stop(self) -> None:
        """End all streams."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(GRACE)

    async def _process(self, _: object, context: Any) -> None:
        settings = self._settings()
        if self.streams >= settings.max_connections:
            message = "Too many calls wait and run through this endpoint picker. Try again in 2 s."
            body = error_body(message, "server_error", "server_is_overloaded")
            await context.write(messages.immediate(503, _BUSY, body))
            return
        self.streams += 1
        try:
            await PickerStream(self._picker, context).run()
        except Misordered as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self.streams -= 1

    async def _looks(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            await self._look()

    async def _look(self) -> None:
        status = _SERVING if self._ready() else _NOT_SERVING
        for name in READINESS:
            await self._health.set(name, status)


def _credentials(certificate: Certificate) -> Any:
    """Return credentials that show the certificate of now at each connection. Raises OSError, ValueError."""

    def configuration() -> Any:
        certificate.context(Path.read_bytes)  # refuses what is no certificate and its key
        chain, key = certificate.chain.read_bytes(), certificate.private.read_bytes()
        trust = None if certificate.client_ca is None else certificate.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=trust)

    def renewed() -> Any:
        """Run in a thread of gRPC's."""
        try:
            return configuration()
        except (OSError, ValueError, ssl.SSLError):
            return None  # the one before: the data port's watch of the same files tells why

    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, certificate.client_ca is not None)
