"""Pool of simulated engines that a scaler starts and stops, behind one gateway, in virtual time.

An engine is paid for from the moment it is ordered until its last call has ended; calls it gets `start` seconds after
the order. One that does not run is known to the gateway and drained, so that it gets none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.core.engines.fleet import Engine
from gateway.serve.assembly import Gateway

SYNC = 15.0  # seconds between two decisions, as Kubernetes' HorizontalPodAutoscaler has it
LOOK = 1.0  # seconds between two looks at engines that are about to end

Scaler = Callable[[float], int]  # engines wanted at a time


class Pool:
    """`first` engines run from the start. `start`: seconds from an order until calls may come; `paid`: engine-seconds
    so far; `highest`: most engines at once."""

    def __init__(self, gateway: Gateway, scaler: Scaler, first: int, start: float) -> None:
        self._gateway = gateway
        self._scaler = scaler
        self._start = start
        self._engines: Sequence[Engine] = tuple(gateway.fleet)
        self._running = set(self._engines[:first])
        self._starting: dict[Engine, asyncio.TimerHandle] = {}
        self._ending: dict[Engine, None] = {}  # the last ordered is the last: a set has no order
        self._loop = asyncio.get_running_loop()
        self.paid = 0.0
        self.highest = first
        self._at = self._loop.time()
        for engine in self._engines[first:]:
            gateway.drain_engine(engine, wanted=True)
        self._loop.call_soon(self._sync)
        self._loop.call_later(LOOK, self._look)

    def _pay(self) -> None:
        now = self._loop.time()
        count = len(self._running) + len(self._starting) + len(self._ending)
        self.paid += count * (now - self._at)
        self.highest = max(self.highest, count)
        self._at = now

    def _sync(self) -> None:
        self._pay()
        wanted = max(1, min(len(self._engines), self._scaler(self._loop.time())))
        while len(self._running) + len(self._starting) > wanted:
            self._stop()
        while len(self._running) + len(self._starting) < wanted:
            self._order()
        self._loop.call_later(SYNC, self._sync)

    def _order(self) -> None:
        """One more: an engine that is about to end goes on, else one is started."""
        if self._ending:
            engine, _ = self._ending.popitem()
            self._running.add(engine)
            self._gateway.drain_engine(engine, wanted=False)
            return
        idle = next((e for e in self._engines if e not in self._running and e not in self._starting), None)
        if idle is not None:
            self._starting[idle] = self._loop.call_later(self._start, self._ready, idle)

    def _ready(self, engine: Engine) -> None:
        self._pay()
        del self._starting[engine]
        self._running.add(engine)
        engine.ready(self._loop.time())
        self._gateway.drain_engine(engine, wanted=False)

    def _stop(self) -> None:
        """One fewer: the last that was ordered, else the one with the fewest calls."""
        if self._starting:
            self._starting.popitem()[1].cancel()
            return
        engine = min(self._running, key=lambda each: (each.in_flight, each.id))
        self._running.discard(engine)
        self._ending[engine] = None
        self._gateway.drain_engine(engine, wanted=True)

    def _look(self) -> None:
        self._pay()
        self._ending = {engine: None for engine in self._ending if engine.in_flight}
        self._loop.call_later(LOOK, self._look)
