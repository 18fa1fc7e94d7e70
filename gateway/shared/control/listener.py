"""Listener of a control port, a gateway's or a sidecar's.

It binds the socket itself and hands it over listening. So an address in use is an OSError of `start`, and port 0 has a
number to announce. The bounds on clients are in http1.py. The process ends it last.
"""

from __future__ import annotations

import socket
import ssl

from starlette.applications import Starlette

from gateway.shared.addresses import split_address
from gateway.shared.control.http1 import CONNECTIONS, Http1Listener


class ControlPort:
    """Serves one application on one address, over `tls` if any, to `connections` at once at most. `address` is its URL
    once started."""

    def __init__(
        self,
        app: Starlette,
        listen: str,
        connections: int = CONNECTIONS,
        tls: ssl.SSLContext | None = None,
        log: str = "weir.control",
    ) -> None:
        self.address = ""
        self.port = 0
        self._listening: socket.socket | None = None
        self._tls = tls
        self._listen = listen
        self._http = Http1Listener(app, log, connections)

    async def start(self, bound: socket.socket | None = None) -> None:
        """Listen, on a socket that is `bound` where there is one. Raises OSError, ValueError."""
        host, _ = split_address(self._listen)
        listening = bound_to(self._listen) if bound is None else bound
        self._listening, self.port = listening, listening.getsockname()[1]
        port = self.port
        scheme = "http" if self._tls is None else "https"
        self.address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        await self._http.start(listening, self._tls)

    def sockets(self) -> list[int]:
        """The file descriptor of the listening socket."""
        return [] if self._listening is None else [self._listening.fileno()]

    def stop_accepting(self) -> None:
        """Take no connection any more; those that are there stay."""
        self._http.stop_accepting()

    async def aclose(self) -> None:
        """End it, giving answers in flight a moment; a client that does not finish its request is left behind."""
        await self._http.aclose()


def bound_to(listen: str) -> socket.socket:
    """A listening socket at HOST:PORT. Raises OSError, ValueError."""
    host, port = split_address(listen)
    listening = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
    )
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
