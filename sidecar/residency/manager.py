"""Manager of one machine's engines: the loop around the scheduler, and its reports.

The scheduler decides which models are resident (scheduler.py, planner.py). Operations carry that out (operations.py,
engine_steps.py). Orders of people and gateways only note what is wanted (orders.py). Whatever ends, fails or is heard
leads to another turn, until `run` is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence

import msgspec

from gateway.shared.protocol import CapacityReport, DemandReport, GPUReport, ModelReport
from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import EngineFailed, EngineRecord
from sidecar.core.host_memory import HostMemory
from sidecar.core.inventory import Resident
from sidecar.core.lifecycle import RUNNING, SLEEPING, STARTING, Lifecycle
from sidecar.core.model_state import ModelState
from sidecar.core.sleep import note
from sidecar.core.step_times import StepTimes
from sidecar.gpus.monitor import GpuMonitor
from sidecar.residency.demand import GatewayDemand
from sidecar.residency.effects import Engine, Engines
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.file_changes import FileChanges
from sidecar.residency.gpu_tasks import GpuTasks
from sidecar.residency.liveness import LivenessProbes
from sidecar.residency.operations import Operations
from sidecar.residency.orders import Orders
from sidecar.residency.planner import Planner
from sidecar.residency.report import gpu_report, model_report
from sidecar.residency.scheduler import Scheduler
from sidecar.residency.shared import SharedState
from sidecar.residency.sleep_steps import LEAST_FREED, SleepSteps
from sidecar.residency.state_file import SavedState, StateFile

SAMPLE_EVERY = 1.0  # seconds between two looks at the GPUs
KEPT_WITHIN = 5.0  # seconds for the state file, less than whoever has ordered something waits
# Times the seconds to have a model back, for which it is kept after its last use. By `make residency`: with more, calls
# wait longer than under plain LRU (four times as long with 10); with none, models that take turns are loaded all day.
HOT = 0.25
BLIND = (
    "NVML does not list the sidecar's own engines, as in a container with process numbers of its own: their memory is "
    "told by the GPUs' totals, and what neighbours take and give back is taken for theirs"
)


class Manager:
    """`state` None: nothing is kept; `known` is what it said. `host_memory`, `hot`: see `Planner`. `changed`
    is set at every change worth a report. `say` takes one line for the operator."""

    def __init__(
        self,
        config: SidecarConfig,
        engines: Engines,
        monitor: GpuMonitor,
        state: StateFile | None,
        *,
        known: SavedState,
        host_memory: int,
        hot: float = HOT,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._engines, self._state, self._known, self._clock = engines, state, known, clock
        self._key = known.key or secrets.token_urlsafe(32)  # by which gateways know this sidecar's reports
        self._due, self.changed = asyncio.Event(), asyncio.Event()
        self.monitor, self.demand = monitor, GatewayDemand(clock)
        self.tasks, self.host, times = GpuTasks(self._due.set), HostMemory(host_memory), dict[str, StepTimes]()
        self.entries = {name: ModelState(name, each, clock(), times) for name, each in config.models.items()}
        self._shared = shared = SharedState(
            models=self.entries, times=times, engines=engines, monitor=monitor, demand=self.demand, tasks=self.tasks,
            host=self.host, known=known, changed=self.changed, touch=self._touch, keep=self._keep, clock=clock, say=say,
        )  # fmt: skip
        self.steps = steps = EngineSteps(shared)
        self._probes = LivenessProbes(shared, steps)
        self.planner = Planner(shared, config, steps.memory, hot)
        operations = Operations(shared, steps, SleepSteps(shared, steps), self.planner.has_room)
        self._scheduler = Scheduler(shared, self.planner, operations)
        self.orders = Orders(shared, self._scheduler, self.planner, steps, self.model)
        self.file = FileChanges(shared, config, self.planner, self._scheduler, steps)

    # -- its life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find the GPUs, the size of each model, and engines that an earlier sidecar has left. A model that cannot be
        run says so in its report and harms no other."""
        await self.monitor.look()
        for name, times in self._known.times.items():
            if name in self.entries:
                self.entries[name].times.seen = msgspec.structs.replace(times)
        for name in self._known.off:
            if name in self.entries:
                self.entries[name].off = True
        await asyncio.gather(*(self.steps.sizes.size(model) for model in self.entries.values()))
        for name, record in self._known.engines.items():
            known = self.entries.get(name)
            await _take_over(name, record, self._shared, self.steps)
            if known is not None and known.off and known.serves():
                self.steps.transition(known, "drain")
        records = [self.steps.record(model) for model in self.entries.values()]
        await self._engines.sweep({record.process.engine for record in records if record is not None})
        self._keep()

    async def run(self) -> None:
        """Until cancelled. Operations under way are cancelled with it: `close` sees to their engines."""
        try:
            self.tasks.spawn(self._sample())
            while True:
                for model in self.entries.values():
                    self._probes.look_after(model)
                self.file.turn()
                at = self._scheduler.turn()
                self._due.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(at):
                        await self._due.wait()
                self.tasks.reap()
        finally:
            await self.tasks.aclose()

    async def _sample(self) -> None:
        while True:
            known = self.monitor.totals
            await self.monitor.look()
            if self.monitor.totals != known:  # GPUs that could not be read before: what fits there is known only now
                for model in self.entries.values():
                    self.orders.size_anew(model)
            await asyncio.sleep(SAMPLE_EVERY)
            self._due.set()

    async def close(self, *, end_engines: bool) -> None:
        """After `run`: end all engines, or let them go on and be adopted; one that is not ready yet nobody could."""
        ending = [e for e in self.entries.values() if end_engines or e.lifecycle.state is STARTING]
        await asyncio.gather(*(self.steps.end_anyway(model) for model in ending))
        self._keep()
        await self.steps.leave()

    def _touch(self) -> None:
        self._due.set()
        self.changed.set()

    def _keep(self) -> None:
        """Save the state that the next sidecar needs."""
        if self._state is None:
            return
        records = {name: self.steps.record(model) for name, model in self.entries.items()}
        engines = {name: record for name, record in records.items() if record is not None}
        known = self._known
        self._state.save(
            SavedState(
                origin=known.origin,
                key=self._key,
                engines=engines,
                measured={name: each for name, each in known.measured.items() if name in self.entries},
                lessons={name: each for name, each in known.lessons.items() if name in self.entries},
                sleeps={name: each for name, each in known.sleeps.items() if name in self.entries},
                times={name: model.times.seen for name, model in self.entries.items()},
                off=tuple(name for name, model in self.entries.items() if model.off),
            )
        )

    async def wait_saved(self) -> str:
        """Wait until the state file has what was ordered; why it has not, empty if it has."""
        if self._state is None:
            return ""
        return "" if await self._state.flush(KEPT_WITHIN) else self._state.error or "the disk does not answer"

    # -- demand and reports -----------------------------------------------------------------------------------------

    def heard(self, gateway: DemandReport) -> None:
        """A gateway's answer to a report of ours."""
        if self.demand.take(gateway):
            now = self._clock()
            for demand in gateway.demands:
                model = self.entries.get(demand.profile)
                if model is not None and demand.idle is not None:
                    model.used(now - demand.idle)
                if model is not None and model.busy and not self.demand.in_flight(model.name):
                    self._probes.look_now(model)  # its last look is from before its calls have ended
            self._due.set()

    def requests_active(self, profile: str) -> int:
        """Calls in flight, by the gateways or by the engine's own gauges, whichever are more."""
        model = self.entries[profile]
        return max(self.demand.in_flight(model.name), model.busy)

    def troubles(self) -> tuple[str, ...]:
        """Warnings for the operator about GPUs, sleep and preloading, in words."""
        notes = {name: note(model.profile, model.slept, unified=model.unified) for name, model in self.entries.items()}
        sleep = [f"{name}: {words}" for name, words in notes.items() if words]
        blind = BLIND if self.steps.memory.blind else ""
        preloads = [model.not_preloaded for model in self.entries.values()]
        return tuple(filter(None, (self.monitor.error, blind, *sleep, *preloads)))

    def lines(self, profile: str, most: int) -> list[str]:
        """The last lines that its engine has written. Raises KeyError."""
        model = self.entries[profile]
        return self.steps.lines(model, most)

    def report(self, sidecar: str, boot: str, control: str) -> CapacityReport:
        """The next report, for one gateway."""
        return CapacityReport(
            sidecar=sidecar,
            boot=boot,
            sequence=self.demand.next_report(),
            control=control,
            key=self._key,
            gpus=self.gpus(),
            models=self.models(),
        )

    def gpus(self) -> tuple[GPUReport, ...]:
        """Each GPU as last read, and why it is refused, if it is."""
        return tuple(gpu_report(gpu, self.monitor.refused(gpu)) for gpu in self.monitor.gpus)

    def models(self) -> tuple[ModelReport, ...]:
        """A report of each model."""
        there = self.planner.residents()
        return tuple(self.model(name, there) for name in self.entries)

    def model(self, profile: str, there: Sequence[Resident] = ()) -> ModelReport:
        """`there`: what holds memory now, where that is known. Raises KeyError."""
        model, now = self.entries[profile], self._clock()
        engine = self.steps.running.get(profile)
        return model_report(
            model,
            self.file.config.served_name(profile),
            engine.url if engine else "",
            self.steps.facts.get(profile),
            self.planner.forecast(model, now, there),
            now,
            copy_in=self.planner.copy_in(model, now, there),
        )


# -- engines that an earlier sidecar has left -------------------------------------------------------------------------


async def _take_over(name: str, record: EngineRecord, shared: SharedState, steps: EngineSteps) -> None:
    """Take over an engine by its record. The engine is ended instead if the file no longer has its model, if its
    profile has changed, if it was in the middle of waking (its weights may then be missing), or if it has fallen asleep
    since its record and still holds its memory."""
    model, engines, host, say, now = shared.models.get(name), shared.engines, shared.host, shared.say, shared.clock()
    try:
        engine = await engines.adopt(name, record)
    except EngineFailed as error:
        say(f"{name} is not taken over: {error}")
        return
    why = "the file no longer has it"
    if model is not None:
        why = await _adopted(model, engine, record, steps, changed=record.settings != engines.settings(name))
    if model is None or why:
        say(f"{name}, which runs already, is ended: {why}")
        with contextlib.suppress(EngineFailed):
            await engine.stop()
        return
    model.lifecycle = Lifecycle(now, SLEEPING if model.level else RUNNING)
    model.gpus, model.size, model.first_residue = engine.gpus, record.size, record.first_residue
    model.host_pinned = model.level == 1 or record.host > 0
    host.keep(name, record.size.pools)
    host.adopt(name, max(record.host, record.size.host if model.level == 1 else 0))
    model.sized, model.unusable = True, ""
    model.used(now)
    steps.running[name] = engine
    steps.adopted(model)
    steps.facts[name] = record.told
    say(f"{name} runs already and is taken over{f', asleep at level {model.level}' if model.level else ''}")


async def _adopted(
    model: ModelState, engine: Engine, record: EngineRecord, steps: EngineSteps, *, changed: bool
) -> str:
    """The reason why it cannot be adopted; empty: it can, and sleeps at the model's level."""
    if changed:
        return "its profile has changed"
    try:
        level = await engine.awake()
        await engine.alive()
    except EngineFailed as error:
        return str(error)
    if record.level == 2 and not level:
        return "it was in the middle of waking, and its weights may not be there"
    if level and not record.level and not await steps.memory.given_back(engine, 1 - LEAST_FREED, record.size.claim):
        return "it was in the middle of falling asleep, and its memory has not come back"
    model.level = level
    return ""
