"""Sleep, wake-up and reload of weights of an engine that serves: EngineCore's side of these routes.

On simulated GPUs each takes the time, and gives back or takes the memory, that `memory_stages` says. Without them it is
done at once. A callback hears of the end, since the connection that asked has no coroutine.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """`when_idle`: sleeps that wait until the engine has run dry. What is sent meanwhile is taken up after them."""

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self.when_idle: list[Callable[[], None]] = []
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
        waiting, self.when_idle = self.when_idle, []
        for sleep in waiting:
            sleep()

    def sleep(self, level: int, mode: SleepMode, done: Callable[[], None]) -> None:
        """Put the engine to sleep; `done` is called when it is, in mode `wait` after it has run dry."""
        self._server.core.call(lambda: self._sleep(level, mode, done))

    def _sleep(self, level: int, mode: SleepMode, done: Callable[[], None]) -> None:
        server = self._server
        engine, resident = server.engine, server.resident
        if mode == "wait" and engine.busy:
            self.when_idle.append(lambda: self.sleep(level, "wait", done))
            return
        falls_asleep = engine.asleep is None
        for sequence in engine.sleep(level):
            sequence.owner.answer.aborted(sequence.owner)
        for sequence, at in self._late:
            engine.add(sequence, at)
        self._late.clear()
        if resident is None or not falls_asleep:
            done()
            return

        def freed() -> None:
            resident.sleep()
            done()

        self._occupy(sleep_seconds(resident.weights, 1 if level == 1 else 2), freed)

    def wake(self, tags: list[str] | None, done: Callable[[bool | ApiError], None]) -> None:
        """Wake the engine, and take up what was sent to it meanwhile. `done` hears whether it is awake, or what failed:
        for want of memory it dies."""
        self._server.core.call(lambda: self._wake(tags, done))

    def _wake(self, tags: list[str] | None, done: Callable[[bool | ApiError], None]) -> None:
        server = self._server
        engine, resident = server.engine, server.resident
        seconds = 0.0
        if resident is not None and engine.asleep:
            chosen = TAGS if tags is None else tags
            away = engine.weights in ("offloaded", "discarded")
            weights, cache = not away or "weights" in chosen, engine.cache_ready or "kv_cache" in chosen
            if away and weights:
                seconds += wake_weights_seconds(resident.weights, 1 if engine.weights == "offloaded" else 2)
            if cache and not engine.cache_ready:
                seconds += wake_cache_seconds()
            try:
                resident.hold(loaded=float(weights), cache=cache)
            except OutOfMemory as error:
                done(ApiError(500, str(error), type=BROKEN))
                server.die()
                return
        self._occupy(seconds, lambda: done(self._woken(tags)))

    def _woken(self, tags: list[str] | None) -> bool:
        engine = self._server.engine
        awake = engine.wake(tags)
        if awake:
            for sequence in engine.unfinished():
                sequence.owner.answer.garbled = engine.garbage
        self._server.work()
        return awake

    def reload_weights(self, done: Callable[[ApiError | None], None]) -> None:
        """Read the weights again; `done` hears what failed."""
        self._server.core.call(lambda: self._reload_weights(done))

    def _reload_weights(self, done: Callable[[ApiError | None], None]) -> None:
        resident = self._server.resident
        try:
            self._server.engine.reload_weights()
        except RuntimeError as error:
            done(ApiError(500, str(error), type=BROKEN))
            return
        self._occupy(0.0 if resident is None else reload_seconds(resident.weights), lambda: done(None))

    def _occupy(self, seconds: float, then: Callable[[], None]) -> None:
        self._server.core.occupy(seconds / self._server.config.speed, then)
