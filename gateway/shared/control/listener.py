"""The control port's address: what may be one, whether only this machine can reach it, and who listens there.

The socket is bound here and handed over listening, so that an address in use is an OSError of `start` and port 0 has
a number to announce. What bounds its clients is in http1.py. The gateway's drain decides when it ends, which is last.
"""

from __future__ import annotations

import ipaddress
import socket

from starlette.applications import Starlette

from gateway.shared.control.http1 import CONNECTIONS, Http1Listener


def split_address(listen: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[V6]:PORT`. Raises ValueError."""
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ValueError(f"{listen!r} is not HOST:PORT")
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
        raise ValueError(f"{listen!r} is not [IPV6]:PORT")
    return host.strip("[]"), int(port)


def is_loopback(listen: str) -> bool:
    """Whether only this machine can reach the address. A name other than localhost may be anything."""
    host, _ = split_address(listen)
    return is_loopback_name(host)


def is_loopback_name(host: str) -> bool:
    """Whether a host, as an address or by name and without a port, is certainly this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class ControlPort:
    """Serves one application on one address. `address` is its URL once started. At most `connections` at once."""

    def __init__(self, app: Starlette, listen: str, connections: int = CONNECTIONS) -> None:
        self.address = ""
        self._listen = listen
        self._http = Http1Listener(app, "weir.control", connections)

    async def start(self) -> None:
        """Listen. Raises OSError, ValueError."""
        host, port = split_address(self._listen)
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound = listening.getsockname()[1]
        self.address = f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"
        await self._http.start(listening)

    async def aclose(self) -> None:
        """End it, giving answers in flight a moment; a client that does not finish its request is left behind."""
        await self._http.aclose()
