"""Listener of the control API.

It binds the socket itself and hands it over listening. So an address in use is an OSError of `start`, and port 0 has a
number to announce. The bounds on clients are those of the gateway's control port. The sidecar ends it last.
"""

from __future__ import annotations

import socket

from starlette.applications import Starlette

from gateway.shared.control.http1 import Http1Listener
from sidecar.core.addresses import Address


class ControlPort:
    """Serves one application on one address. `address` has the port that was bound, once started."""

    def __init__(self, app: Starlette, listen: Address) -> None:
        self.address = listen
        self._http = Http1Listener(app, "weir.sidecar")

    async def start(self) -> None:
        """Listen. Raises OSError."""
        host = self.address.host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, self.address.port), family=family, backlog=128)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = Address(self.address.host, listening.getsockname()[1])
        await self._http.start(listening)

    async def aclose(self) -> None:
        """End it, giving answers in flight a moment; a client that does not finish its request is left behind."""
        await self._http.aclose()
