"""Records of a simulated run: faults, samples of its engines, its result; and the listener to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from loadtest.clients.calls import ClientCall, Try
from loadtest.simulate.memory_engine import Reading

SAMPLE_EVERY = 0.5  # seconds
Sample = tuple[float, Sequence[Reading]]  # a moment, and what each engine does then


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Fault of engines (all of them, where none are named) at a time. `value`: of slow and errors."""

    at: float
    what: Literal["die", "stop", "stall", "recover", "slow", "errors"]
    engines: tuple[int, ...] = ()
    value: float = 1.0
    status: int = 503


class RunResult(msgspec.Struct):
    """Result of a run: every try of every call, the engines over time. `preempted`: sequences since the start."""

    tries: list[Try]
    calls: int
    samples: list[Sample]
    preempted: int
    posts: int
    seconds: float  # of the loop's time
    unfinished: int  # calls that the end of the run cut off
    orphans: int  # the most requests open at engines at one moment beyond the calls that clients still wait for


class RunListener(Protocol):
    """Listener to a run while it lasts. Nothing is kept then of its calls: a run of any length has its place in
    memory."""

    def ended(self, client_call: ClientCall) -> None:
        """A call has ended, after its last try."""

    def sampled(self, sample: Sample) -> None:
        """The engines, every SAMPLE_EVERY seconds."""
