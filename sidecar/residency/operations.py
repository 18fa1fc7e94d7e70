"""What is done to one engine at a time: make room and start or wake it, put it to sleep, end it, watch it.

Each operation begins with its orders given already (`pending` says what for) and ends with the facts that answer them,
on every path: an engine that fails is ended, and its memory is waited for, before anything else may count on it. An
engine that gateways still use is never put to sleep or ended to make room: the operation gives up and everything stays
as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from sidecar.core.engine_records import EngineFacts, EngineFailed, EngineRecord, Unusable
from sidecar.core.gpus import GPU, returned
from sidecar.core.lifecycle import DRAIN, ERROR, RUNNING, SLEEP, SLEEPING, STARTING, STOP, STOPPED, WAKE, Event
from sidecar.core.measured import Measured
from sidecar.core.model_state import ModelState
from sidecar.core.plan import Plan
from sidecar.gpus.monitor import GpuMonitor
from sidecar.residency.demand import GatewayDemand
from sidecar.residency.effects import Engine, Engines

DRAIN_WITHIN = 15.0  # seconds for gateways and engine to have ended what runs, where it makes room
ORDERED_WITHIN = 60.0  # seconds, where somebody has ordered it
LOOK_EVERY = 0.05  # seconds between two looks at an engine that is being drained
SAMPLE_EVERY = 1.0  # seconds between two looks at a starting engine's memory
KEPT = 200  # lines of an engine that has ended


class Operations:
    """`touch` is called after every change of an entry; `keep` when what the state file has to know has changed."""

    def __init__(
        self,
        engines: Engines,
        machine: GpuMonitor,
        demand: GatewayDemand,
        clock: Callable[[], float],
        say: Callable[[str], None],
        *,
        measured: dict[str, Measured],
        touch: Callable[[], None],
        keep: Callable[[], None],
    ) -> None:
        self.running: dict[str, Engine] = {}
        self.told: dict[str, EngineFacts] = {}
        self.counts: dict[tuple[str, str], int] = {}
        self._last_lines: dict[str, list[str]] = {}
        self._measured = measured
        self._grown: dict[str, dict[int, int]] = {}  # by how much each GPU's use grew while the engine started
        self._engines = engines
        self._machine = machine
        self._demand = demand
        self._clock = clock
        self._say = say
        self._touch = touch
        self._keep = keep
        self._stopping: dict[str, asyncio.Event] = {}  # for engines that start: somebody wants them ended

    def record(self, entry: ModelState) -> EngineRecord | None:
        """What the state file is to know of an engine; None where there is none, or none that is ready."""
        engine = self.running.get(entry.name)
        if engine is None or entry.lifecycle.state is STARTING:
            return None
        return engine.record(level=entry.level, told=self.told.get(entry.name, EngineFacts()))

    # -- whole operations -------------------------------------------------------------------------------------------

    async def carry_out(
        self, entry: ModelState, plan: Plan, victims: Mapping[str, ModelState], after: int, *, patient: bool = False
    ) -> None:
        """Make room as planned, then start or wake. All of them have their orders: see `Manager`. `after`: the number
        of the last report that was made before they had. `patient`: calls of victims are waited for; where they take
        too long, those go on for as long again as this one has waited."""
        within = ORDERED_WITHIN if patient else DRAIN_WITHIN
        steps: list[tuple[ModelState, Literal[1, 2] | None]] = [
            (victims[each.profile], each.level) for each in plan.sleep
        ]
        steps += [(victims[name], None) for name in plan.stop if name != entry.name]
        for number, (victim, level) in enumerate(steps):
            self._say(f"{victim.name} {f'goes to sleep at level {level}' if level else 'ends'} for {entry.name}")
            if not await self.evict(victim, level, after, within):
                if patient:
                    entry.wanted_since = self._clock()
                self._give_up([entry, *(each for each, _ in steps[number:])])
                return
        if entry.lifecycle.pending is STOP:  # it sleeps where it cannot wake
            if not await self.end(entry):
                return
            entry.gpus = plan.gpus
            self._step(entry, "start")
        if entry.lifecycle.pending is WAKE:
            await self.wake(entry)
        else:
            await self.start(entry)

    def _give_up(self, entries: Sequence[ModelState]) -> None:
        """Whatever nothing was done about yet stays as it is."""
        for entry in entries:
            if entry.lifecycle.pending not in (None, STOP, SLEEP):
                if entry.name not in self.running:
                    entry.gpus = ()
                self._step(entry, "cancel")

    async def evict(self, entry: ModelState, level: Literal[1, 2] | None, after: int, within: float) -> bool:
        """Put it to sleep at `level`, or end it if None. False: it is still used, or its memory has not come back."""
        try:
            if entry.lifecycle.pending is DRAIN and not await self._drained(entry, after, within):
                return False
        except EngineFailed as error:
            return await self.fail(entry, error)
        began = self._clock()
        made_room = await (self.end(entry) if level is None else self.sleep(entry, level))
        if made_room and entry.lifecycle.state is (STOPPED if level is None else SLEEPING):
            entry.made_room(level or 0, self._clock() - began)
        return made_room

    async def retire(self, entry: ModelState, level: Literal[1, 2] | None, after: int, *, ordered: bool) -> None:
        """One that is idle, or that somebody wants to sleep or end: an order to end one is obeyed in any case. `after`:
        as in `carry_out`."""
        if not await self.evict(entry, level, after, ORDERED_WITHIN if ordered else DRAIN_WITHIN):
            if ordered and level is None and entry.lifecycle.pending is DRAIN:
                await self.end(entry)
            else:
                self._give_up([entry])

    async def _drained(self, entry: ModelState, after: int, within: float) -> bool:
        """Until no gateway sends it calls any more and it has none; False: not in time, or it has just got one."""
        engine = self.running[entry.name]
        patient = within == ORDERED_WITHIN
        end = self._clock() + within
        while True:
            drained = self._demand.drained(entry.name, after)
            if drained:
                entry.busy = await engine.busy()
                if not entry.busy:
                    return True
            if self._clock() >= end or (drained is False and not patient):
                return False
            await asyncio.sleep(LOOK_EVERY)

    # -- one engine -------------------------------------------------------------------------------------------------

    async def start(self, entry: ModelState) -> None:
        """Start its engine on the GPUs that are its own now, until it serves or has failed."""
        gpus = await self._machine.look()
        room = min((gpu.free for gpu in gpus if gpu.index in entry.gpus), default=0)
        entry.began = began = self._clock()
        self._say(f"{entry.name} starts on {_places(entry.gpus)}")
        stopping = self._stopping[entry.name] = asyncio.Event()
        try:
            try:
                engine = await self._engines.start(entry.name, entry.gpus, entry.size)
            finally:
                self._step(entry, "launched")
            self.running[entry.name] = engine
            told = await self._ready(entry, engine, stopping, {gpu.index: gpu.used for gpu in gpus})
        except EngineFailed as error:
            entry.least_room = room if error.out_of_memory else 0
            await self.fail(entry, error)
            return
        finally:
            del self._stopping[entry.name]
        if told is None or entry.lifecycle.pending is STOP:
            await self.end(entry)
            return
        self.told[entry.name] = told
        entry.loaded(self._clock() - began)
        self._serves(entry, "ready")
        self._say(f"{entry.name} is ready after {self._clock() - began:.1f} s on {_places(entry.gpus)}")

    async def _ready(
        self, entry: ModelState, engine: Engine, stopping: asyncio.Event, before: Mapping[int, int]
    ) -> EngineFacts | None:
        """What it says once it serves; None: somebody wants it ended before that. `before`: bytes used by GPU."""
        ready = asyncio.ensure_future(engine.ready())
        stop = asyncio.ensure_future(stopping.wait())
        peak = 0
        try:
            while True:
                await asyncio.wait((ready, stop), timeout=SAMPLE_EVERY, return_when=asyncio.FIRST_COMPLETED)
                gpus = await self._machine.look()
                self._grown[entry.name] = {
                    gpu.index: max(0, gpu.used - before.get(gpu.index, gpu.used))
                    for gpu in gpus
                    if gpu.index in entry.gpus
                }
                held = self._held(entry, engine, gpus)
                peak = max(peak, *held.values(), 0)
                if ready.done():
                    told = ready.result()
                    self._measure(entry, told, peak, max(held.values(), default=0))
                    return told
                if stop.done():
                    return None
        finally:
            for task in (ready, stop):
                task.cancel()
            await asyncio.gather(ready, stop, return_exceptions=True)

    def stop_starting(self, entry: ModelState) -> bool:
        """End one that starts; False: it does not."""
        stopping = self._stopping.get(entry.name)
        if stopping is not None:
            stopping.set()
        return stopping is not None

    async def wake(self, entry: ModelState) -> None:
        """Wake it where it sleeps."""
        engine, level = self.running[entry.name], entry.level
        entry.began = began = self._clock()
        try:
            if level:
                await engine.wake(level, self.told.get(entry.name, EngineFacts()))
        except EngineFailed as error:
            await self.fail(entry, error)
            return
        if level:
            entry.woke(level, self._clock() - began)
        entry.level = 0
        self._serves(entry, "woken")
        self._say(f"{entry.name} is awake after {self._clock() - began:.2f} s")

    def _serves(self, entry: ModelState, event: Literal["ready", "woken"]) -> None:
        now = self._clock()
        if entry.wanted_since is not None:
            entry.used(now)  # by the calls that wait for it, though none of them is there yet
        entry.wanted_since, entry.infeasible, entry.least_room, entry.busy = None, None, 0, 0
        entry.idle_since = now
        self._step(entry, event)
        self._keep()

    async def sleep(self, entry: ModelState, level: Literal[1, 2]) -> bool:
        """Put it to sleep, and see its memory come back. One that cannot is ended, which gives it back too."""
        engine = self.running[entry.name]
        before = await self._machine.look()
        held = self._held(entry, engine, before)
        self._step(entry, "sleep")
        began = self._clock()
        try:
            await engine.sleep(level)
            freed = {gpu: max(0, size - entry.size.residue) for gpu, size in held.items()}
            back = await self._machine.back(before, freed)
            kept = self._seen(entry, engine, self._machine.gpus)
            # A neighbour that ended meanwhile looks like its memory, unless its processes are told.
            if not back or (any(kept.values()) and not all(returned(held[i], kept[i], freed[i]) for i in kept)):
                raise EngineFailed(f"it sleeps at level {level}, and its memory has not come back")
        except EngineFailed as error:
            return await self.fail(entry, error)
        entry.level = level
        entry.size = msgspec.structs.replace(entry.size, residue=max([entry.size.residue, *kept.values()]))
        self._step(entry, "slept")
        self._keep()
        self._say(f"{entry.name} sleeps at level {level} after {self._clock() - began:.2f} s")
        return True

    async def end(self, entry: ModelState) -> bool:
        """End it; False: its memory has not come back."""
        if entry.lifecycle.pending is not STOP:
            self._step(entry, "stop")
        back = await self._ended(entry)
        self._step(entry, "stopped")
        self._keep()
        self._say(f"{entry.name} is stopped")
        return back

    async def end_anyway(self, entry: ModelState) -> None:
        """End it, whatever was pending: nobody waits for its memory any more."""
        engine = self.running.pop(entry.name, None)
        if engine is None:
            return
        try:
            await engine.stop()
        except EngineFailed as error:
            self._say(f"{entry.name}: {error}")
        if entry.lifecycle.pending is not STOP:
            self._step(entry, "stop")
        entry.gpus, entry.level = (), 0
        self._step(entry, "stopped")

    async def fail(self, entry: ModelState, error: EngineFailed) -> bool:
        """It has failed: gateways are told at once, then what is left of it is ended. As `end`."""
        self._step(entry, "out_of_memory" if error.out_of_memory and entry.lifecycle.pending else "failed", str(error))
        self._say(f"{entry.name} failed: {error}")
        back = await self._ended(entry)
        self._keep()
        if entry.lifecycle.pending is STOP:  # somebody wanted it ended
            self._step(entry, "stopped")
        return back

    async def _ended(self, entry: ModelState) -> bool:
        """End what runs of it; from then on it has no GPUs. False: its memory has not come back."""
        back = await self._memory_back(entry)
        entry.gpus, entry.level = (), 0
        return back

    async def _memory_back(self, entry: ModelState) -> bool:
        engine = self.running.get(entry.name)
        if engine is None:
            return True
        before = await self._machine.look()
        held = self._held(entry, engine, before)
        try:
            await engine.stop()
        except EngineFailed as error:
            self._say(f"{entry.name}: {error}")  # what it holds will not come back, which is quarantine
        self._last_lines[entry.name] = engine.lines(KEPT)
        del self.running[entry.name]
        self._grown.pop(entry.name, None)
        back = await self._machine.back(before, held)
        await self.size(entry)  # by what was measured
        return back

    async def size(self, entry: ModelState) -> None:
        """Find out what its engine will take."""
        try:
            entry.size = await self._engines.size(entry.name, self._machine.smallest, len(self._machine.gpus))
            entry.sized, entry.unusable = True, ""
        except Unusable as error:
            if str(error) != entry.unusable:
                self._say(f"{entry.name} cannot be run: {error}")
            entry.sized, entry.unusable = False, str(error)
        self._touch()

    def settle(self, entry: ModelState) -> None:
        """One that has failed, and of which nothing is left, is not tried again by itself."""
        if entry.lifecycle.state is ERROR:
            self._step(entry, "stop")
            self._step(entry, "stopped")

    def lines(self, entry: ModelState, most: int) -> list[str]:
        """The last lines of its engine, or of the one that has ended last."""
        engine = self.running.get(entry.name)
        return self._last_lines.get(entry.name, [])[-most:] if engine is None else engine.lines(most)

    # -- small ------------------------------------------------------------------------------------------------------

    def _held(self, entry: ModelState, engine: Engine, gpus: Sequence[GPU]) -> dict[int, int]:
        """Bytes that it holds now, by GPU: by its processes, or, where these are not told (in a container), by what
        the GPU's use grew while it started."""
        held = self._seen(entry, engine, gpus)
        own = [gpu for gpu in gpus if gpu.index in held]
        if not any(held.values()) and any(gpu.processes_hidden or not gpu.processes for gpu in own):
            grown = self._grown.get(entry.name, {})
            most = entry.size.residue if entry.level else entry.size.claim
            foreseen = {gpu.index: (min(grown.get(gpu.index, 0), most), gpu.used) for gpu in own}
            return {index: size if size <= used else 0 for index, (size, used) in foreseen.items()}  # 0: it is back
        return held

    def _seen(self, entry: ModelState, engine: Engine, gpus: Sequence[GPU]) -> dict[int, int]:
        """Bytes that its processes hold by NVML, by GPU; 0 where NVML does not tell."""
        return {gpu.index: engine.held(gpu.processes) for gpu in gpus if gpu.index in entry.gpus}

    def unseen(self, entry: ModelState) -> int:
        """Bytes that it is taking and NVML does not show yet, on the GPU where that is most."""
        if entry.lifecycle.state is RUNNING or entry.lifecycle.pending is None:
            return 0
        engine = self.running.get(entry.name)
        target = entry.size.claim
        if entry.lifecycle.pending in (DRAIN, SLEEP, STOP):
            return 0
        if engine is None:
            return target
        return max((target - size for size in self._held(entry, engine, self._machine.gpus).values()), default=0)

    def _measure(self, entry: ModelState, told: EngineFacts, peak: int, settled: int) -> None:
        measured = self._engines.measurement(entry.name, told, peak=peak, settled=settled)
        if measured is not None:
            self._measured[entry.name] = measured

    def _step(self, entry: ModelState, event: Event, error: str = "") -> None:
        entry.lifecycle.step(event, self._clock(), error)
        if event in ("ready", "woken", "slept", "stopped", "failed", "out_of_memory"):
            key = (entry.name, event)
            self.counts[key] = self.counts.get(key, 0) + 1
        self._touch()

    async def leave(self) -> None:
        """All engines go on without us."""
        for engine in list(self.running.values()):
            with contextlib.suppress(EngineFailed):
                await engine.leave()
        self.running.clear()


def _places(gpus: tuple[int, ...]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "CPU"
