"""The control port's listener: Hypercorn in the gateway's own loop, bounded in header size and in time.

The socket is bound here and handed over listening, so that an address in use is an OSError of `start` and port 0 has
a number to announce. Hypercorn handles no signals: the gateway's drain decides when this ends, which is last.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket

from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.applications import Starlette

HEADERS = 16 * 1024  # bytes
READ_TIMEOUT = 10  # seconds for the next bytes of a client
GRACE = 1.0  # seconds for answers in flight when it ends


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
    """Serves one application on one address. `address` is its URL once started."""

    def __init__(self, app: Starlette, listen: str) -> None:
        self.address = ""
        self._app = app
        self._listen = listen
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError, ValueError."""
        host, port = split_address(self._listen)
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound = listener.getsockname()[1]
        self.address = f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"
        config = Config()
        config.bind = [f"fd://{listener.detach()}"]
        config.h11_max_incomplete_size = HEADERS
        config.h2_max_header_list_size = HEADERS
        config.read_timeout = READ_TIMEOUT
        config.graceful_timeout = GRACE
        config.include_server_header = False
        config.errorlog = logging.getLogger("weir.control")  # tracebacks of our own bugs; no greeting, no access log
        config.loglevel = "WARNING"
        self._task = asyncio.get_running_loop().create_task(self._serve(config))

    async def _serve(self, config: Config) -> None:
        await serve(self._app, config, shutdown_trigger=self._end.wait)  # type: ignore[arg-type]  # Starlette is ASGI

    async def aclose(self) -> None:
        """End it, giving answers in flight a moment; a client that does not finish its request is left behind."""
        if self._task is None:
            return
        self._end.set()
        _, late = await asyncio.wait((self._task,), timeout=2 * GRACE)
        if late:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
