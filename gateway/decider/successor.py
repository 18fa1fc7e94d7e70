"""Successor of a decider: another gateway, which decides from now on for the calls that this one still carries."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

from gateway.core.engines.hold import Hold
from gateway.core.request.call import Call

if TYPE_CHECKING:
    from gateway.decider.grant import LocalGrant


class Successor(Protocol):
    """Gateway that grants from now on. It gets a report of what calls hold here, and a question for every further
    grant."""

    def holds(self, grant: LocalGrant) -> None:
        """The grant's call has its hold."""

    def began(self, hold: Hold, now: float) -> None:
        """The engine has read the prompt."""

    def finished(
        self, hold: Hold, now: float, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None
    ) -> None:
        """The call has used these tokens, as its engine has counted them; see Grant.finished."""

    def wrote(self, hold: Hold, tokens: int) -> None:
        """The call has used so many tokens; see Grant.wrote."""

    def released(self, hold: Hold) -> None:
        """The hold came back."""

    def grant(self, call: Call, exclude: frozenset[str], *, front: bool) -> Awaitable[LocalGrant]:
        """A grant by the successor, as of Dispatch.enter. Raises Refused."""


class HandedOver(Exception):
    """A call that waits is for the successor to grant."""

    def __init__(self, successor: Successor) -> None:
        super().__init__()
        self.successor = successor
