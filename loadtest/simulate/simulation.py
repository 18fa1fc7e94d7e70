"""Run of a simulation: calls go out when they are due, engines work, faults strike, samples are taken.

A `Transport` stands between clients and engines: a gateway (`inprocess.py`) or a rival's rule (`rivals/`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from loadtest.clients.calls import ClientCall, Transport, Try
from loadtest.clients.driver import Driver
from loadtest.clients.retries import Clients
from loadtest.load.workload import Planned
from loadtest.simulate.memory_engine import MemoryEngine, Reading

SAMPLE_EVERY = 0.5  # seconds
Sample = tuple[float, Sequence[Reading]]  # a moment, and what each engine does then


class Broken(Exception):
    """Something in the simulation, or in the gateway under it, raised what nobody caught: a bug."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Fault of engines (all of them, where none are named) at a time. `value`: of slow and errors."""

    at: float
    what: Literal["die", "stop", "stall", "recover", "slow", "errors"]
    engines: tuple[int, ...] = ()
    value: float = 1.0
    status: int = 503


class SimulationRun:
    """Run of simulated engines and what calls them. `driver` begins the calls and ends them.

    `ended` hears of each call after its last try, `sampled` of the engines every SAMPLE_EVERY seconds. Without them all
    tries are kept in `tries`, and all samples in `samples`. `unfinished`: calls that the end of the run cut off;
    `orphans`: the most requests open at engines at one moment beyond the calls that clients still wait for.
    """

    def __init__(
        self, engines: Sequence[MemoryEngine], target: Transport, calls: Iterable[Planned], *, clients: Clients,
        seed: int = 0, faults: Sequence[Fault] = (), closed: int = 0,
        ended: Callable[[ClientCall], None] | None = None, sampled: Callable[[Sample], None] | None = None,
    ) -> None:  # fmt: skip
        self.engines = engines
        self.tries: list[Try] = []
        self.samples: list[Sample] = []
        self.unfinished = self.orphans = 0
        self._sampled = sampled or self.samples.append
        self._loop = asyncio.get_running_loop()
        self._over = False
        rng = random.Random(seed)  # noqa: S311 # clients' whims
        self.driver = Driver(target, calls, clients=clients, rng=rng, closed=closed, ended=ended or self._keep)
        self._loop.set_exception_handler(self._break)
        for fault in faults:
            self._loop.call_at(fault.at, self._strike, fault)

    async def until(self, seconds: float, *, grace: float = 0.0) -> SimulationRun:
        """Send until `seconds`, let what is open end within `grace` seconds more; then whoever is left leaves. The run
        is over when all calls have ended and none is to come. Raises Broken."""
        self._sample()
        self.unfinished = await self.driver.run(seconds, grace)
        self._over = True
        await self.driver.wait(0.001, self.driver.broken)  # what was cancelled gives back what it holds
        self.orphans = max(self.orphans, sum(len(engine.open) for engine in self.engines))
        return self

    def _break(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.driver.broken.done():
            broken = Broken(f"at {loop.time():.3f} s: {context['message']}")
            broken.__cause__ = context.get("exception")
            self.driver.broken.set_exception(broken)

    def _keep(self, client_call: ClientCall) -> None:
        self.tries += client_call.tries

    def _sample(self) -> None:
        self.orphans = max(self.orphans, sum(len(engine.open) for engine in self.engines) - len(self.driver.open))
        self._sampled((self._loop.time(), [engine.reading() for engine in self.engines]))
        if not self._over:
            self._loop.call_later(SAMPLE_EVERY, self._sample)

    def _strike(self, fault: Fault) -> None:
        for number in fault.engines or range(len(self.engines)):
            strike(self.engines[number], fault)


def strike(memory: MemoryEngine, fault: Fault) -> None:
    """A fault befalls an engine."""
    match fault.what:
        case "slow":
            memory.slow = fault.value
        case "errors":
            memory.errors, memory.status = fault.value, fault.status
        case befalls:
            getattr(memory, befalls)()
