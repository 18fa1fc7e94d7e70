"""Client within the gateway: makes a call through the pipeline as a connection does, and takes the answer's bytes.

The answer is HTTP/1.0: its body ends with the connection, so nothing has to be decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from gateway.relay.wire.messages import Request
from gateway.relay.wire.responder import Responder


class InnerClient:
    """Transport and connection of one call's responder.

    `write` takes the answer, `answered` is called at its end, `abandoned` if it is broken off.
    """

    def __init__(
        self,
        request: Request,
        write: Callable[[bytes], object],
        answered: Callable[[], None],
        abandoned: Callable[[], None],
    ) -> None:
        self.write_paused = False
        self.write = write
        self.abandoned = abandoned
        self.responder = Responder(self, cast("asyncio.Transport", self), request)
        self._answered = answered

    def keeps_alive(self, _: Request) -> bool:
        return False

    def leave_by(self, _: float) -> bool:
        return False

    def answered(self, close: bool) -> None:
        self._answered()

    def leave(self) -> None:
        """Cancel the call if its answer is not whole."""
        if not self.responder.closed:
            self.responder.left("client_gone")


def inner_request(peer: str, path: str, fields: dict[bytes, bytes], body: bytes) -> Request:
    """Return a request that begins now. `peer` stands in place of a client's address."""
    request = Request(b"POST", path.encode(), b"", fields, 0, len(body), False)
    request.peer, request.body, request.at = peer, body, asyncio.get_running_loop().time()
    return request
