"""What a server and its connections know of each other."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.wire.messages import Request, ServerSettings
from gateway.wire.responder import Responder


class Handler(Protocol):
    """What the server hands requests to."""

    def head(self, request: Request) -> bytes | None:
        """Headers complete, body unread. None to go on, or a finished `answer(...)` that ends the request unread."""

    def call(self, request: Request, responder: Responder) -> None:
        """The request is complete. Synchronous; answers through the responder, now or later."""


class Member(Protocol):
    """A connection, as its server sees it."""

    def close_if_idle(self) -> None:
        """Draining: a connection without a request has no reason to stay."""

    def warn(self) -> None:
        """Draining is nearly over: tell whoever answers here."""

    def expel(self) -> None:
        """Draining is over."""


class Shared:
    """What all connections of one server share."""

    def __init__(self, handler: Handler, settings: ServerSettings) -> None:
        self.handler = handler
        self.settings = settings
        self.open: set[Member] = set()
        self.empty = asyncio.Event()
        self.empty.set()
        self.draining = False
        self.refusals: dict[int, int] = {}
