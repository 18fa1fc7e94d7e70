"""Steps of one engine: start, end, fail. Each sees the memory come and go before it is over (sleep_steps.py: sleep).

A step begins with its order given already (`pending` says what for). It ends with the fact that answers the order, on
every path: an engine that fails is ended, and its memory is waited for, before anything else may count on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from gateway.shared.tasks import cancel
from sidecar.core.engine_records import EngineFacts, EngineFailed, EngineRecord
from sidecar.core.gpus import GPU
from sidecar.core.lesson import taken_by_others
from sidecar.core.lifecycle import ERROR, STARTING, STOP, Event
from sidecar.core.model_state import ModelState
from sidecar.core.step_times import StartClock
from sidecar.residency.effects import Engine
from sidecar.residency.engine_memory import EngineMemory
from sidecar.residency.engine_sizes import EngineSizes
from sidecar.residency.shared import SharedState

SIZE_EVERY = 5.0  # seconds between two looks for the files of a model that come with its start
SAMPLE_EVERY = 1.0  # seconds between two looks at a starting engine's memory
KEPT = 200  # lines of an engine that has ended
HEARD = 300  # of its last lines that are looked at each time, for the stage of its start
Reason = Literal["room", "idle", "order", "off"]  # why a model is put to sleep or ended


class _Sized(Exception):
    """A start with a guessed claim is to be repeated with the true one; the message says so."""


class EngineSteps:
    """`running`: the engines there are, by profile. `facts`: what each said of itself once it was ready.

    `counts`: by profile and event. `evictions`: by profile, `sleep` or `stop`, and reason. `starts`: by profile.
    `start_failures`: by profile and the diagnosis' kind, `other` where there is none.
    """

    def __init__(self, shared: SharedState) -> None:
        self.running: dict[str, Engine] = {}
        self.facts: dict[str, EngineFacts] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.evictions: Counter[tuple[str, Literal["sleep", "stop"], Reason]] = Counter()
        self.starts: Counter[str] = Counter()
        self.start_failures: Counter[tuple[str, str]] = Counter()
        self.memory = EngineMemory(shared.monitor, self.running)
        self.sizes = EngineSizes(shared)
        self._last_lines: dict[str, list[str]] = {}
        self._engines, self._monitor, self._host = shared.engines, shared.monitor, shared.host
        self._clock, self._say, self._touch, self.keep = shared.clock, shared.say, shared.touch, shared.keep
        self._stopping: dict[str, asyncio.Event] = {}  # for engines that start: somebody wants them ended

    def record(self, model: ModelState) -> EngineRecord | None:
        """Record of an engine for the state file; None where there is none, or none that is ready."""
        engine = self.running.get(model.name)
        if engine is None or model.lifecycle.state is STARTING:
            return None
        record = engine.record(level=model.level, told=self.facts.get(model.name, EngineFacts()))
        taken = self._host.taken(model.name)
        return msgspec.structs.replace(record, size=model.size, host=taken, first_residue=model.first_residue)

    def adopted(self, model: ModelState) -> None:
        """Note the memory of an engine that ran before this sidecar."""
        self.memory.adopted(model, self.running[model.name], self._monitor.gpus)

    # -- from start to end ------------------------------------------------------------------------------------------

    async def has_room(self, model: ModelState) -> bool:
        """Whether as much is free on its GPUs as its start or its waking takes. What made room may have kept more, and
        other processes may have taken it."""
        needs = model.size.claim - model.size.residue if model.level else model.size.start_needs
        return all(gpu.free >= needs for gpu in await self._monitor.look() if gpu.index in model.gpus)

    async def start(self, model: ModelState) -> None:
        """Start its engine on the GPUs that are its own now, until it serves or has failed."""
        stopping = self._stopping[model.name] = asyncio.Event()
        try:
            gpus = await self._monitor.look()
            room = min((gpu.free for gpu in gpus if gpu.index in model.gpus), default=0)
            model.began = began = self._clock()
            start = model.starting = StartClock(began)
            self._say(f"{model.name} starts on {_gpu_names(model.gpus)}")
            self.starts[model.name] += 1
            self._host.keep(model.name, model.size.pools)
            try:
                engine = await self._engines.start(model.name, model.gpus, model.size)
            finally:
                self.transition(model, "launched")
            self.running[model.name] = engine
            facts = await self._ready(model, engine, start, stopping, {gpu.index: gpu.used for gpu in gpus})
        except _Sized as sized:
            model.taught = True
            await self.fail(model, EngineFailed(str(sized)), taught=True, how="ends")
            return
        except EngineFailed as error:
            kind = error.found.kind if error.found else "other"
            full = error.out_of_memory and kind != "no_kv"
            told = 0 if error.found is None else taken_by_others(error.found, room)
            if full and room - max(told, await self._taken_since(model, gpus)) < model.size.start_needs:
                model.taught, room = True, 0  # others were faster: of this model it tells nothing
            else:
                model.taught = await self.sizes.learns(model, error, room)
                if not model.taught:
                    self.sizes.refuse(model, error)
            self.start_failures[model.name, kind] += 1
            model.least_room = room if full else 0
            others = self.memory.foreign(model) if full else ""
            more = "; ".join(filter(None, (self.sizes.lower_share(model, error), others)))
            await self.fail(model, error, more, taught=model.taught)
            return
        finally:
            del self._stopping[model.name]
            model.starting = None
        if facts is None or model.lifecycle.pending is STOP:
            await self.end(model)
            return
        self.facts[model.name] = facts
        now = self._clock()
        model.times.loaded(now - began, start.ready(now), model.size)
        self.serves(model, "ready")
        self._say(f"{model.name} is ready after {self._clock() - began:.1f} s on {_gpu_names(model.gpus)}")

    async def _ready(
        self,
        model: ModelState,
        engine: Engine,
        start: StartClock,
        stopping: asyncio.Event,
        before: Mapping[int, int],
    ) -> EngineFacts | None:
        """The engine's facts once it serves; None: somebody wants it ended before that. `before`: bytes used by GPU."""
        peak, sized_at = 0, self._clock()
        ready = asyncio.ensure_future(engine.ready(lambda: peak))
        stop = asyncio.ensure_future(stopping.wait())
        try:
            while True:
                await asyncio.wait((ready, stop), timeout=SAMPLE_EVERY, return_when=asyncio.FIRST_COMPLETED)
                gpus = await self._monitor.look()
                self.memory.starting(model, before, gpus)
                held = self.memory.held(model, engine, gpus)
                peak = max(peak, *held.values(), 0)
                start.heard(engine.lines(HEARD), self._clock())
                if model.size.guessed and (ready.done() or self._clock() >= sized_at + SIZE_EVERY):
                    sized_at = self._clock()
                    await self._sized_meanwhile(model)
                if ready.done():
                    facts = ready.result()
                    self.memory.ready(model, engine, gpus)
                    settled = 0 if self._monitor.error else max(held.values(), default=0)  # an old reading is none
                    claim = self.memory.claim(model, settled, before)
                    self.sizes.measure(model, facts, claim, peak=peak, settled=settled)
                    return facts
                if stop.done():
                    return None
        finally:
            await cancel(ready, stop)

    async def _sized_meanwhile(self, model: ModelState) -> None:
        """See whether the files of its model have come with its start. Raises _Sized where it claims less by them."""
        size = await self.sizes.smaller(model)
        if size is not None:
            raise _Sized(f"its model's files are here now, and it is started anew with {size.arithmetic}")

    def stop_starting(self, model: ModelState) -> None:
        """End one that starts, if it does."""
        if model.lifecycle.state is STARTING and model.lifecycle.pending is not STOP:
            self.transition(model, "stop")
        if model.name in self._stopping:
            self._stopping[model.name].set()

    def serves(self, model: ModelState, event: Literal["ready", "woken"]) -> None:
        """Mark an engine as serving, after it became ready or woke."""
        now = self._clock()
        if model.wanted_since is not None:
            model.used(now)  # by the calls that wait for it, though none of them is there yet
        model.wanted_since, model.infeasible, model.least_room, model.busy = None, None, 0, 0
        model.ordered = False
        model.idle_since = now
        self.transition(model, event)
        if model.off and model.serves():  # switched off meanwhile: no gateway may send it anything
            self.transition(model, "drain")
        self.keep()

    async def end(self, model: ModelState) -> bool:
        """End it; False: its memory has not come back."""
        if model.lifecycle.pending is not STOP:
            self.transition(model, "stop")
        back = await self._ended(model)
        self.transition(model, "stopped")
        self.keep()
        self._say(f"{model.name} is stopped")
        return back

    async def end_anyway(self, model: ModelState) -> None:
        """End it, whatever was pending: nobody waits for its memory any more."""
        engine = self.running.pop(model.name, None)
        if engine is None:
            return
        try:
            await engine.stop()
        except EngineFailed as error:
            self._say(f"{model.name}: {error}")
        if model.lifecycle.pending is not STOP:
            self.transition(model, "stop")
        model.gone()
        self._host.release(model.name)
        self.transition(model, "stopped")

    async def fail(
        self, model: ModelState, error: EngineFailed, more: str = "", *, taught: bool = False, how: str = "failed"
    ) -> bool:
        """Report a failed engine to gateways at once, then end its processes. Return False if its memory has not come
        back. `more`: what to do, and who else holds memory there. `taught`: the next start differs. `how`: the kind of
        end, in a word."""
        event: Event = "out_of_memory" if error.out_of_memory and model.lifecycle.pending else "failed"
        why = f"{error}; {more}" if more else str(error)
        self.transition(model, "taught" if taught else event, why)
        self._say(f"{model.name} {how}: {why}")
        back = await self._ended(model)
        self.keep()
        if model.lifecycle.pending is STOP:  # somebody wanted it ended
            self.transition(model, "stopped")
        return back

    async def _ended(self, model: ModelState) -> bool:
        """End its processes; from then on it has no GPUs. False: its memory has not come back."""
        back = await self._processes_ended(model)
        await self.sizes.size(model)  # by what was measured
        model.gone()
        self._host.release(model.name)
        return back

    async def _processes_ended(self, model: ModelState) -> bool:
        engine = self.running.get(model.name)
        if engine is None:
            return True
        before = await self._monitor.look()
        held = self.memory.held(model, engine, before)
        try:
            await engine.stop()
        except EngineFailed as error:
            self._say(f"{model.name}: {error}")  # what it holds will not come back, which is quarantine
        self._last_lines[model.name] = engine.lines(KEPT)
        del self.running[model.name]
        self.memory.forget(model)
        return await self._monitor.back(before, held)

    async def _taken_since(self, model: ModelState, before: Sequence[GPU]) -> int:
        """Bytes that others have taken since the reading `before`, on the one of its GPUs where that is most. It is
        ended first, and the GPUs' totals tell: in a container its own processes look like others'. What NVML still
        tells of them is none of others'. 0: nobody knows."""
        engine = self.running.get(model.name)
        await self._processes_ended(model)
        if self._monitor.error:
            return 0
        used = {gpu.index: gpu.used for gpu in before}
        late = {} if engine is None else self.memory.seen(model, engine, self._monitor.gpus)
        own = [gpu for gpu in self._monitor.gpus if gpu.index in model.gpus]
        now = {gpu.index: gpu.used - late.get(gpu.index, 0) for gpu in own}
        return max((size - used.get(index, size) for index, size in now.items()), default=0)

    def settle(self, model: ModelState) -> None:
        """Stop a failed engine whose processes are gone, so that the sidecar does not restart it by itself."""
        if model.lifecycle.state is ERROR:
            self.transition(model, "stop")
            self.transition(model, "stopped")

    async def leave(self) -> None:
        """All engines go on without us."""
        for engine in list(self.running.values()):
            with contextlib.suppress(EngineFailed):
                await engine.leave()
        self.running.clear()

    # -- output, counts ---------------------------------------------------------------------------------------------

    def forget(self, model: ModelState) -> None:
        """Drop the lines and counts of a profile that has no engine and will have none again."""
        self._last_lines.pop(model.name, None)
        del self.starts[model.name]
        for counts in (self.counts, self.evictions, self.start_failures):
            for key in [key for key in counts if key[0] == model.name]:
                del counts[key]

    def lines(self, model: ModelState, most: int) -> list[str]:
        """The last lines of its engine, or of the one that has ended last."""
        engine = self.running.get(model.name)
        return self._last_lines.get(model.name, [])[-most:] if engine is None else engine.lines(most)

    def transition(self, model: ModelState, event: Event, error: str = "") -> None:
        """Apply an event of `core.lifecycle` to its state, and count the facts. Raises IllegalTransition."""
        model.lifecycle.step(event, self._clock(), error)
        if event in ("ready", "woken", "slept", "stopped", "failed", "out_of_memory", "taught"):
            self.count(model, event)
        self._touch()

    def count(self, model: ModelState, event: str) -> None:
        """Count an event of its."""
        self.counts[model.name, event] += 1


def _gpu_names(gpus: tuple[int, ...]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "CPU"
