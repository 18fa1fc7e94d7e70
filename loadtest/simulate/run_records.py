"""Records of a simulated run: faults, samples of its engines, its result; and the listener to it."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from loadtest.clients.calls import ClientCall, Try

SAMPLE_EVERY = 0.5  # seconds


class FleetSample(msgspec.Struct, frozen=True, gc=False):
    """The engines at one moment: `kv` used (0..1), calls `running` and `waiting` inside, of each."""

    at: float
    kv: tuple[float, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]


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
    samples: list[FleetSample]
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

    def sampled(self, sample: FleetSample) -> None:
        """The engines, every SAMPLE_EVERY seconds."""
