"""The control API's listener: Hypercorn in the sidecar's own loop, bounded in header size and in time.

The socket is bound here and handed over listening, so that an address in use is an OSError of `start` and port 0 has a
number to announce. Hypercorn handles no signals: the sidecar decides when this ends, which is last.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.applications import Starlette

from sidecar.core.addresses import Address

HEADERS = 16 * 1024  # bytes
READ_TIMEOUT = 10  # seconds for the next bytes of a client
GRACE = 1.0  # seconds for answers in flight when it ends


class ControlPort:
    """Serves one application on one address. `address` has the port that was bound, once started."""

    def __init__(self, app: Starlette, listen: Address) -> None:
        self.address = listen
        self._app = app
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError."""
        host = self.address.host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, self.address.port), family=family, backlog=128)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = Address(self.address.host, listener.getsockname()[1])
        config = Config()
        config.bind = [f"fd://{listener.detach()}"]
        config.h11_max_incomplete_size = HEADERS
        config.h2_max_header_list_size = HEADERS
        config.read_timeout = READ_TIMEOUT
        config.graceful_timeout = GRACE
        config.include_server_header = False
        config.errorlog = logging.getLogger("weir.sidecar")  # tracebacks of our own bugs; no greeting, no access log
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
