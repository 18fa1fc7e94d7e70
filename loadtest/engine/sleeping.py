"""Sleep, wake-up and reload of weights of an engine that serves: EngineCore's side of these routes.

EngineCore does one thing after the other, and nothing while it hangs. On simulated GPUs each takes the time, and gives
back or takes the memory, that `memory_stages` says. Without them it is done at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from loadtest.engine.api.checks import BROKEN, ApiError
from loadtest.engine.api.generate import Generation
from loadtest.engine.engine import TAGS, SleepMode
from loadtest.engine.memory_stages import reload_seconds, sleep_seconds, wake_cache_seconds, wake_weights_seconds
from loadtest.engine.sequence import Sequence
from sidecar.gpus.simulated import OutOfMemory

if TYPE_CHECKING:
    from loadtest.engine.server import SimServer


class Sleeping:
    """`when_idle`: number of sleeps that wait until the engine has run dry. What is sent meanwhile is taken up after
    them. `healed`: set while EngineCore does not hang."""

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self.when_idle = 0
        self.healed = asyncio.Event()
        self.healed.set()
        self._dry = asyncio.Event()
        self._order = asyncio.Lock()
        self._late: list[tuple[Sequence, float]] = []

    def __bool__(self) -> bool:
        """Whether the engine sleeps, or takes up nothing new since it is about to."""
        return self._server.engine.asleep is not None or bool(self.when_idle)

    def add(self, sequence: Sequence, now: float) -> None:
        """Into the engine, or in line until it sleeps."""
        if self.when_idle:
            self._late.append((sequence, now))
        else:
            self._server.engine.add(sequence, now)

    def forget(self, answer: Generation) -> None:
        """Forget the late work of a client that has left."""
        if self._late:
            self._late = [entry for entry in self._late if entry[0].owner.answer is not answer]

    def ran_dry(self) -> None:
        """Nothing is unfinished any more."""
        self._dry.set()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """EngineCore's next call, once those before it are over."""
        async with self._order:
            await self.healed.wait()
            yield

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """Put the engine to sleep, in mode `wait` once it has run dry."""
        while True:
            async with self.turn():
                if mode == "abort" or not self._server.engine.busy:
                    await self._sleep(level)
                    return
                self.when_idle += 1
                self._dry.clear()
            await self._dry.wait()
            self.when_idle -= 1

    async def _sleep(self, level: int) -> None:
        engine, resident = self._server.engine, self._server.resident
        falls_asleep = engine.asleep is None
        for sequence in engine.sleep(level):
            sequence.owner.answer.aborted(sequence.owner)
        for sequence, at in self._late:
            engine.add(sequence, at)
        self._late.clear()
        if resident is not None and falls_asleep:
            await self._takes(sleep_seconds(resident.weights, 1 if level == 1 else 2))
            resident.sleep()

    async def wake(self, tags: list[str] | None) -> bool:
        """Wake the engine, and take up what was sent to it meanwhile. Return whether it is awake. For want of memory it
        dies: raises ApiError."""
        async with self.turn():
            engine, resident = self._server.engine, self._server.resident
            if resident is not None and engine.asleep:
                chosen = TAGS if tags is None else tags
                away = engine.weights in ("offloaded", "discarded")
                weights, cache = not away or "weights" in chosen, engine.cache_ready or "kv_cache" in chosen
                seconds = wake_cache_seconds() if cache and not engine.cache_ready else 0.0
                if away and weights:
                    seconds += wake_weights_seconds(resident.weights, 1 if engine.weights == "offloaded" else 2)
                try:
                    resident.hold(loaded=float(weights), cache=cache)
                except OutOfMemory as error:
                    self._server.die()
                    raise ApiError(500, str(error), type=BROKEN) from None
                await self._takes(seconds)
            awake = engine.wake(tags)
            for sequence in engine.unfinished() if awake else ():
                sequence.owner.answer.garbled = engine.garbage
            self._server.work()
            return awake

    async def reload_weights(self) -> None:
        """Read the weights again. Raises ApiError where there is no memory for them yet."""
        async with self.turn():
            resident = self._server.resident
            try:
                self._server.engine.reload_weights()
            except RuntimeError as error:
                raise ApiError(500, str(error), type=BROKEN) from None
            await self._takes(0.0 if resident is None else reload_seconds(resident.weights))

    async def _takes(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._server.config.speed)
