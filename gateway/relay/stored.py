"""Interface to the routes of files and batches, whose answers come from the gateway's storage."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from gateway.core.request.routes import Route
from gateway.core.request.tenants import Account
from gateway.relay.wire.server import Request, Responder


class Stored(Protocol):
    """Files and batches, as the pipeline needs them."""

    def route_of(self, path: bytes) -> Route | None:
        """The route of a path; None: it is none of these."""

    def head(self, request: Request, account: Account) -> None:
        """Bound the request's body by its head. Raises Refused."""

    def begin(self, answer: Coroutine[Any, Any, None]) -> None:
        """Run what answers a request, which ends with the storage at the latest."""

    async def answer(self, request: Request, responder: Responder, account: Account) -> None:
        """Answer a request, whole. Raises Refused."""
