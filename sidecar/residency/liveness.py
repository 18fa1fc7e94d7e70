"""Liveness probes of engines that are ready: whether they live, answer, and have something to do.

The end of a process is noticed at once, a hang at the next probe. /health says 200 while EngineCore hangs, so the probe
asks EngineCore itself. Findings during an operation on the engine are left to that operation.
"""

from __future__ import annotations

import asyncio

from gateway.shared.tasks import cancel
from sidecar.core.engine_records import EngineFailed
from sidecar.core.lifecycle import RUNNING
from sidecar.core.model_state import ModelState
from sidecar.residency.effects import Engine
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.shared import SharedState

EVERY = 5.0  # seconds


class LivenessProbes:
    """Probes of all engines: call `look_after` for each new engine."""

    def __init__(self, shared: SharedState, steps: EngineSteps) -> None:
        self._steps, self._tasks, self._clock = steps, shared.tasks, shared.clock
        self._watched: dict[Engine, asyncio.Event] = {}

    def look_after(self, model: ModelState) -> None:
        """Probe the engine of a model from now on, if it has one and is not probed yet."""
        engine = self._steps.running.get(model.name)
        if engine is not None and engine not in self._watched:
            self._watched[engine] = asyncio.Event()
            self._tasks.spawn(self._look(model, engine))

    def look_now(self, model: ModelState) -> None:
        """Probe it now, before it is time: the last finding may not hold any more."""
        engine = self._steps.running.get(model.name)
        if engine in self._watched:
            self._watched[engine].set()

    async def _look(self, model: ModelState, engine: Engine) -> None:
        ended = asyncio.ensure_future(engine.ended())
        try:
            while self._steps.running.get(model.name) is engine:
                await self._time(ended, self._watched[engine])
                if model.name in self._tasks:
                    if ended.done():
                        await self._tasks.wait(model.name)
                    continue
                try:
                    await self._once(model, engine, ended)
                except EngineFailed as error:
                    if self._steps.running.get(model.name) is engine and model.name not in self._tasks:
                        self._tasks.begin([model.name], model.gpus, self._steps.fail(model, error))
                        await self._tasks.wait(model.name)
        finally:
            del self._watched[engine]
            await cancel(ended)

    async def _time(self, ended: asyncio.Future[str], now: asyncio.Event) -> None:
        """Until it is time to look."""
        asked = asyncio.ensure_future(now.wait())
        try:
            await asyncio.wait((ended, asked), timeout=EVERY, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            now.clear()

    async def _once(self, model: ModelState, engine: Engine, ended: asyncio.Future[str]) -> None:
        if ended.done():
            raise EngineFailed(f"its process ended: {ended.result()}")
        await engine.alive()
        model.busy = await engine.busy() if model.lifecycle.state is RUNNING else 0
        if model.busy:
            model.used(self._clock())
