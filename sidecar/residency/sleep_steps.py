"""Steps of one engine that sleeps and wakes, and what they teach: its residue, its host memory, a level that harms it.

An engine counts as asleep only where memory has come back, by its processes or by what the GPU's use fell. However much
it keeps then is its residue, and no reason to end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from gateway.shared.files.units import GIB
from sidecar.core.engine_records import EngineFacts, EngineFailed
from sidecar.core.gpus import GPU, SHARE
from sidecar.core.model_state import ModelState
from sidecar.core.sleep import LEAST_RESIDUE, Level, MeasuredSleep, residue_exceeded
from sidecar.residency.effects import Engine
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.shared import SharedState

LEAST_FREED = 0.25  # of what an engine held: who gives back less does not sleep, whatever it says
LATE = 30.0  # seconds beyond what was expected after which a step hangs, and its engine is ended
UNSURE = 3.0  # times what was foretold is expected of a step that was never measured
VARIES = 0.5  # seconds more than measured that waking may take: 0.4 and 0.6 s were measured of one engine
BELIEVED = 0.5  # of the host memory that was booked: growth below it shows that pinned memory is not told here


class SleepSteps:
    """`steps`: the others of the same engines."""

    def __init__(self, shared: SharedState, steps: EngineSteps) -> None:
        self._steps, self._sleeps, self._share = steps, shared.known.sleeps, shared.tasks.share
        self._engines, self._monitor, self._host = shared.engines, shared.monitor, shared.host
        self._clock, self._say = shared.clock, shared.say

    async def sleep(self, model: ModelState, level: Level) -> bool:
        """Put it to sleep, and see its memory come back. One that gives none back, or took more host memory than there
        is, is ended; False: its memory has not come back by that either."""
        engine = self._steps.running[model.name]
        before = await self._monitor.look()
        held = self._steps.memory.held(model, engine, before, alive=True)
        host = engine.host_held()
        self._steps.transition(model, "sleep")
        began = self._clock()
        try:
            pins = model.pins(level)
            sure = model.times.seen.sleep and not pins
            expected = model.times.sleep_seconds(model.size, level, first=pins) * (1.0 if sure else UNSURE)
            await self._in_time(engine.sleep(level), f"falling asleep at level {level}", expected + LATE)
            kept = await self._given_back(model, engine, before, held, level)
        except EngineFailed as error:
            return await self._steps.fail(model, error)
        first = not model.first_residue
        residue = max([*kept.values(), min(LEAST_RESIDUE, model.size.residue)])
        taken = self._host_taken(model, engine.host_held() - host) if level == 1 else 0
        self._learn(model, residue if first else 0, taken)
        if level == 1 and not self._host.take(model.name, taken):
            left = (self._host.room - self._host.total + self._host.held(model.name)) / GIB
            self._say(f"{model.name} took {taken / GIB:.1f} GiB of host memory asleep, {left:.1f} were left: it ends")
            return await self._steps.end(model)
        model.fell_asleep(level, residue)
        self._steps.transition(model, "slept")
        self._steps.keep()
        self._say(f"{model.name} sleeps at level {level} after {self._clock() - began:.2f} s")
        if residue_exceeded(model.first_residue, residue):
            grown = f"it kept {model.first_residue / GIB:.1f} GiB at first and {residue / GIB:.1f} now"
            self._say(f"{model.name} is stopped instead of its next sleep: {grown}")
        return True

    async def wake(self, model: ModelState) -> None:
        """Wake it where it sleeps. One that answers otherwise after level 2 is not put there again."""
        engine, level = self._steps.running[model.name], model.level
        model.began = began = self._clock()
        try:
            if level:
                await self._wake(model, engine, level)
        except EngineFailed as error:
            if error.wrong and level == 2:
                self._keep(model, wrong=True)
                self._say(f"{model.name} does not sleep at level 2 any more, while its settings stay as they are")
            await self._steps.fail(model, error)
            return
        if level:
            model.times.took("wake1" if level == 1 else "wake2", self._clock() - began)
        model.level = 0
        self._steps.serves(model, "woken")
        self._say(f"{model.name} is awake after {self._clock() - began:.2f} s")

    async def _wake(self, model: ModelState, engine: Engine, level: Level) -> None:
        """Wake it, alone on its GPUs for as long as is expected: whoever is late is not waited for. Raises
        EngineFailed."""
        expected = model.wake_seconds[level - 1] * (1.0 if getattr(model.times.seen, f"wake{level}") else UNSURE)
        before = await self._monitor.look()
        late = asyncio.get_running_loop().call_later(expected + VARIES, self._is_late, model, expected)
        try:
            waking = engine.wake(level, self._steps.facts.get(model.name, EngineFacts()))
            await self._in_time(waking, f"waking from level {level}", expected + LATE)
        finally:
            late.cancel()
        if self._clock() < late.when():  # else others have used its GPUs meanwhile
            self._steps.memory.woken(model, before, await self._monitor.look())

    def _is_late(self, model: ModelState, expected: float) -> None:
        self._say(f"{model.name} is late to wake, which takes {expected:.1f} s: others may use its GPUs meanwhile")
        self._share(model.name)

    async def _in_time(self, step: Coroutine[Any, Any, None], what: str, within: float) -> None:
        """Carry out a step of an engine. Raises EngineFailed, also where it takes longer than `within` seconds."""
        try:
            async with asyncio.timeout(within):
                await step
        except TimeoutError:
            raise EngineFailed(f"it hangs: {what} has taken {within:.0f} s") from None

    async def _given_back(
        self, model: ModelState, engine: Engine, before: Sequence[GPU], held: Mapping[int, int], level: Level
    ) -> dict[int, int]:
        """Bytes that it keeps on each GPU, once it has given back what is foreseen or had the time to. Raises
        EngineFailed where that is next to nothing."""
        memory, residue = self._steps.memory, model.size.residue

        def returned(gpus: Sequence[GPU]) -> bool:
            kept = memory.residue(model, engine, before, held, gpus)
            return all(size - kept[gpu] >= SHARE * (size - residue) for gpu, size in held.items())

        await self._monitor.until(returned)
        kept = memory.residue(model, engine, before, held, self._monitor.gpus)
        for gpu, size in held.items():
            if size - kept[gpu] < LEAST_FREED * size:
                freed = f"{(size - kept[gpu]) / GIB:.1f} of {size / GIB:.1f} GiB of GPU {gpu}"
                raise EngineFailed(f"it sleeps at level {level}, and its memory has not come back: {freed}")
        return kept

    def _host_taken(self, model: ModelState, grown: int) -> int:
        """Bytes of host memory that it has at level 1: what its processes grew by, where that shows pinned memory; what
        was booked otherwise. They keep it, so later sleeps take nothing."""
        before, booked = self._host.taken(model.name), model.size.host
        if before or not booked:
            return before
        return grown if grown >= BELIEVED * booked else booked

    def _learn(self, model: ModelState, residue: int, taken: int) -> None:
        """Note what it has kept, 0: nothing new, and what it has taken of host memory, if that was measured."""
        changes = {"residue": residue} if residue else {}
        changes |= {"host": taken} if taken not in (0, model.size.host) else {}
        if changes:
            self._keep(model, **changes)

    def _keep(self, model: ModelState, **changes: int) -> None:
        was = model.slept or MeasuredSleep(settings=self._engines.settings(model.name))
        model.slept = self._sleeps[model.name] = msgspec.structs.replace(was, **changes)
