"""Run of a simulation: calls go out when they are due, engines work, faults strike, samples are taken.

The event loop decides between virtual and real time. A `Transport` stands between clients and engines: a gateway
(`inprocess.py`) or a rival's rule (`rivals/`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from loadtest.clients.retries import Clients
from loadtest.load.trace import TraceError
from loadtest.load.workload import OpenConversations, Planned
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.run_records import SAMPLE_EVERY, Fault, FleetSample, RunListener, RunResult
from loadtest.simulate.simulated_client import ClientCall, Transport, Try

PROGRESS_EVERY = 5.0  # seconds


class Broken(Exception):
    """Something in the simulation, or in the gateway under it, raised what nobody caught: a bug."""


class SimulationRun:
    """Everything one run keeps. `closed`: so many clients, each with its next call, or conversation, as soon as the one
    before has ended.

    With a `listener` nothing is kept, and the run is over when all calls have ended and none is to come. `failed`: what
    ended the calls before their time (a row of a trace that cannot be used).
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
        self.failed: Exception | None = None
        self.tries: list[Try] = []
        self.calls = 0
        self.samples: list[FleetSample] = []
        self._target = target
        self._planned: Iterator[Planned] = iter(calls)
        self._clients = clients
        self._rng = random.Random(seed)  # noqa: S311 # clients' whims
        self._closed = closed
        self._progress = progress
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._turns = 0  # of conversations, whose time has not come
        self._conversations = OpenConversations()
        self._all = False  # no call is left that begins of itself
        self._waits = True
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._open: dict[ClientCall, None] = {}
        self._over = False
        self._orphans = 0
        self._empty: asyncio.Future[None] = self._loop.create_future()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._loop.set_exception_handler(self._break)
        for fault in faults:
            self._loop.call_at(fault.at, self._strike, fault)

    async def until(self, seconds: float, *, grace: float = 0.0) -> RunResult:
        """Send until `seconds`, let what is open end within `grace` seconds more; then whoever is left leaves.

        Raises Broken.
        """
        loop = self._loop
        self._sample()
        if self._progress is not None:
            self._tell()
        for _ in range(self._closed):
            self._begin_next()
        if not self._closed:
            self._arm()
        await self._wait(seconds - loop.time(), self._stopped)
        self._over = True
        if self._open and self._waits:
            await self._wait(grace, self._empty)
        unfinished = len(self._open)
        for client_call in list(self._open):
            client_call.leave("unfinished")
        await self._wait(0.001, self._broken)  # what was cancelled gives back what it holds
        return RunResult(
            tries=self.tries,
            calls=self.calls,
            samples=self.samples,
            preempted=sum(engine.preempted for engine in self.engines),
            posts=sum(engine.posts for engine in self.engines),
            seconds=loop.time(),
            unfinished=unfinished,
            orphans=max(self._orphans, sum(len(engine.open) for engine in self.engines)),
        )

    def stop(self) -> None:
        """Send no more, and wait for nothing."""
        self._waits = False
        self._end()

    def _end(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def _wait(self, seconds: float, sooner: asyncio.Future[None]) -> None:
        await asyncio.wait({sooner, self._broken}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            self._broken.result()

    def _break(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._broken.done():
            broken = Broken(f"at {loop.time():.3f} s: {context['message']}")
            broken.__cause__ = context.get("exception")
            self._broken.set_exception(broken)

    # -- sending ------------------------------------------------------------------------------------------------

    def _next(self) -> Planned | None:
        try:
            planned = next(self._planned, None)
        except (TraceError, OSError) as error:
            self.failed, planned = error, None
        if planned is None:
            self._all = True
            self._check_end()
        return planned

    def _check_end(self) -> None:
        if self._all and self._listener is not None and not (self._open or self._turns):
            self._end()

    def _arm(self) -> None:
        planned = self._next()
        if planned is not None:
            self._loop.call_at(planned.at, self._due, planned)

    def _due(self, planned: Planned) -> None:
        if not self._over:
            self._begin(planned)
            self._arm()

    def _begin_next(self) -> None:
        planned = self._next()
        if planned is not None:
            now = self._loop.time()
            if planned.at > now:
                self._turn_at(planned)
            else:
                planned.at = now
                self._begin(planned)

    def _begin(self, planned: Planned) -> None:
        self.calls += 1
        client_call = ClientCall(planned, self._target, self._clients, self._rng, self._ended)
        self._open[client_call] = None
        client_call.send()

    def _turn_at(self, planned: Planned) -> None:
        self._turns += 1
        self._loop.call_at(planned.at, self._turn, planned)

    def _turn(self, planned: Planned) -> None:
        self._turns -= 1
        if not self._over:
            self._begin(planned)

    def _ended(self, client_call: ClientCall) -> None:
        del self._open[client_call]
        if self._listener is None:
            self.tries += client_call.tries
        else:
            self._listener.ended(client_call)
        if self._over:
            if not self._open and not self._empty.done():
                self._empty.set_result(None)
            return
        session = client_call.call.session
        following: list[Planned] = []
        if session is not None and client_call.tried.outcome == "ok":
            following = session.follow(client_call.answer, self._loop.time())
            for planned in following:
                self._turn_at(planned)
        if self._closed and self._conversations.end(client_call.call, len(following)):
            self._loop.call_soon(self._begin_next)
        self._check_end()

    # -- watching -----------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        self._orphans = max(self._orphans, sum(len(engine.open) for engine in self.engines) - len(self._open))
        readings = [engine.reading() for engine in self.engines]
        sample = FleetSample(
            self._loop.time(),
            tuple([kv for kv, _, _ in readings]),
            tuple([running for _, running, _ in readings]),
            tuple([waiting for _, _, waiting in readings]),
        )
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
