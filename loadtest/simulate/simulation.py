"""Run of a simulation: calls go out when they are due, engines work, faults strike, samples are taken.

A `Transport` stands between clients and engines: a gateway (`inprocess.py`) or a rival's rule (`rivals/`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loadtest.clients.calls import ClientCall, Transport, Try
from loadtest.clients.driver import Driver
from loadtest.clients.retries import Clients
from loadtest.load.workload import Planned
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.run_records import SAMPLE_EVERY, Fault, RunListener, RunResult, Sample

PROGRESS_EVERY = 5.0  # seconds


class Broken(Exception):
    """Something in the simulation, or in the gateway under it, raised what nobody caught: a bug."""


class SimulationRun:
    """Run of simulated engines and what calls them. `driver` begins the calls and ends them.

    With a `listener` nothing is kept, and the run is over when all calls have ended and none is to come.
    """

    def __init__(
        self,
        engines: Sequence[MemoryEngine],
        target: Transport,
        calls: Iterable[Planned],
        *,
        clients: Clients,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        closed: int = 0,
        progress: Callable[[float], None] | None = None,
        listener: RunListener | None = None,
    ) -> None:
        self.engines = engines
        self.tries: list[Try] = []
        self.samples: list[Sample] = []
        self._progress = progress
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._orphans = 0
        rng = random.Random(seed)  # noqa: S311 # clients' whims
        self.driver = Driver(target, calls, clients=clients, rng=rng, closed=closed, ended=self._ended)
        self._loop.set_exception_handler(self._break)
        for fault in faults:
            self._loop.call_at(fault.at, self._strike, fault)

    async def until(self, seconds: float, *, grace: float = 0.0) -> RunResult:
        """Send until `seconds`, let what is open end within `grace` seconds more; then whoever is left leaves.

        Raises Broken.
        """
        loop, driver = self._loop, self.driver
        self._sample()
        if self._progress is not None:
            self._tell()
        unfinished = await driver.run(seconds, grace)
        if self._listener is None:
            await driver.wait(max(0.0, seconds - loop.time()), driver.broken)
        self._over = True
        await driver.wait(0.001, driver.broken)  # what was cancelled gives back what it holds
        return RunResult(
            tries=self.tries,
            calls=driver.calls,
            samples=self.samples,
            preempted=sum(engine.preempted for engine in self.engines),
            posts=sum(engine.posts for engine in self.engines),
            seconds=loop.time(),
            unfinished=unfinished,
            orphans=max(self._orphans, sum(len(engine.open) for engine in self.engines)),
        )

    def _break(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.driver.broken.done():
            broken = Broken(f"at {loop.time():.3f} s: {context['message']}")
            broken.__cause__ = context.get("exception")
            self.driver.broken.set_exception(broken)

    def _ended(self, client_call: ClientCall) -> None:
        if self._listener is None:
            self.tries += client_call.tries
        else:
            self._listener.ended(client_call)

    # -- watching -----------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        self._orphans = max(self._orphans, sum(len(engine.open) for engine in self.engines) - len(self.driver.open))
        sample = self._loop.time(), [engine.reading() for engine in self.engines]
        if self._listener is None:
            self.samples.append(sample)
        else:
            self._listener.sampled(sample)
        if not self._over:
            self._loop.call_later(SAMPLE_EVERY, self._sample)

    def _tell(self) -> None:
        if self._progress is not None and not self._over:
            self._progress(self._loop.time())
            self._loop.call_later(PROGRESS_EVERY, self._tell)

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
