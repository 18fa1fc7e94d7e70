"""Interface to the routes of files and batches, whose answers come from the gateway's storage."""

from __future__ import annotations

from typing import Protocol

from gateway.core.request.routes import Route
from gateway.core.request.tenants import Account
from gateway.relay.wire.server import Request, Responder


class Stored(Protocol):
    """What the pipeline needs of them."""

    def route_of(self, path: bytes) -> Route | None:
        """The route of a path; None: it is none of these."""

    def head(self, request: Request, account: Account) -> bytes | None:
        """Bound the request's body by its head. None: read on; else the whole answer."""

    def call(self, request: Request, responder: Responder, account: Account) -> None:
        """A request, whole. It is answered once the storage has answered."""
