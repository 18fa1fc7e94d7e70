"""Events of a decider for a test that watches it, such as the deterministic simulation.

A witness only looks. Without one an event costs a comparison with None.
"""

from __future__ import annotations

from typing import Protocol

from gateway.core.request.call import Call


class DispatchWitness(Protocol):
    """What a dispatch and its grants tell."""

    def moved_free(self, call: Call) -> None:
        """The call has lost its engine and may move from there at no cost to the retry budget."""
