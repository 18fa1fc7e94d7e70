"""Events of admission, for a test that watches it: the deterministic simulation checks its invariants by them.

A witness only looks: it changes nothing and raises nothing. Without one an event costs a comparison with None. Events
named `...ing` come before the change, so that a witness sees what was decided upon.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

import msgspec

from gateway.core.admission.queues import Queues, Ticket
from gateway.core.engines.choice import Choice
from gateway.core.engines.hold import Hold
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused


class DispatchWitness(Protocol):
    """Queues and grants."""

    def applying(self, policy: Policy) -> None:
        """A reload is about to take effect."""

    def entering(self, call: Call, exclude: frozenset[str], *, front: bool) -> None:
        """The call was not granted at once: it will wait, or be refused."""

    def refused(self, call: Call, refused: Refused) -> None:
        """The call may not wait."""

    def pushing(self, queues: Queues, ticket: Ticket, *, front: bool) -> None:
        """The call begins to wait."""

    def popping(self, model: str, queues: Queues, now: float, paused: Container[str]) -> None:
        """The next call is about to be looked for."""

    def popped(self, model: str, ticket: Ticket | None) -> None:
        """The ticket's call goes next; None: no call may go."""

    def granting(self, call: Call, choice: Choice, now: float, ticket: Ticket | None) -> None:
        """The call gets this engine. `ticket`: its ticket, if it waited."""

    def granted(self, call: Call, hold: Hold) -> None:
        """The call holds its cost on the engine's ledger."""

    def prefilling(self, call: Call, hold: Hold) -> None:
        """The call holds its prompt on the engine that reads it for another, too."""

    def prefilled(self, call: Call, hold: Hold) -> None:
        """The prompt's hold came back."""

    def moved_free(self, call: Call) -> None:
        """The call has lost its engine and may move from there at no cost to the retry budget."""

    def retried(self, call: Call) -> None:
        """A further attempt of the call was taken from the retry budget."""

    def correcting(self, ticket: Ticket, prompt_tokens: int, completion_tokens: int) -> None:
        """Real usage is about to replace the charge of the call's tenant in its queue."""

    def corrected(self, ticket: Ticket) -> None:
        """Real usage has replaced the charge of the call's tenant in its queue."""


class LimitWitness(Protocol):
    """Charges of one book of limits; each is a `limits.Charge`."""

    def arrived(self, charge: LimitCharge) -> None:
        """A request was counted, before it was parsed."""

    def charged(self, charge: LimitCharge, arrived: LimitCharge | None) -> None:
        """A call was charged, in place of what it took as it arrived."""


class LimitCharge(Protocol):
    """A charge, as a witness sees it. `settled`: tokens, once they are known."""

    live: bool
    refunded: bool
    settled: int | None


class BatchWitness(Protocol):
    """Calls that share one request to an engine."""

    def joining(self, call: Call) -> None:
        """The call may be merged with others."""

    def sending(self, calls: Sequence[Call]) -> None:
        """Calls that have waited for each other are about to be sent. Calls that have left are not among them."""

    def merging(self, calls: Sequence[Call], items: int) -> None:
        """Calls are about to become one request of so many items."""

    def merged(self, calls: Sequence[Call], status: int, prompt_tokens: Sequence[int | None]) -> None:
        """Calls receive one answer: all its status, and each its share of the prompt's tokens."""


class Witnesses(msgspec.Struct, frozen=True, kw_only=True):
    """Witnesses of one gateway."""

    dispatch: DispatchWitness | None = None
    limits: LimitWitness | None = None
    batches: BatchWitness | None = None


NOBODY_WATCHES = Witnesses()
