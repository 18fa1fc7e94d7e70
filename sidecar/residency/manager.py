"""Manager of one machine's engines: the loop around the scheduler, and its reports.

The scheduler decides which models are resident (scheduler.py, planner.py). Operations carry that out (operations.py,
engine_steps.py). Orders of people and gateways only note what is wanted (orders.py). Whatever ends, fails or is heard
leads to another turn, until `run` is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from gateway.shared.protocol import CapacityReport, DemandReport, GPUReport, ModelReport
from sidecar.core.engine_records import EngineFailed, EngineRecord
from sidecar.core.lifecycle import RUNNING, SLEEPING, STARTING, Lifecycle
from sidecar.core.model_state import ModelState
from sidecar.core.sleep import note
from sidecar.residency import engine_memory as memory
from sidecar.residency import engine_steps as steps
from sidecar.residency import operations, planner, scheduler
from sidecar.residency.file_changes import FileChanges
from sidecar.residency.machine import Engine, Machine
from sidecar.residency.orders import Orders
from sidecar.residency.report import gpu_report, model_report
from sidecar.residency.sleep_steps import LEAST_FREED

SAMPLE_EVERY = 1.0  # seconds between two looks at the GPUs
BLIND = (
    "NVML does not list the sidecar's own engines, as in a container with process numbers of its own: their memory is "
    "told by the GPUs' totals, and what neighbours take and give back is taken for theirs"
)


class Manager:
    """Manager of the engines of a `machine`. `changed` is set at every change worth a report."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.entries, self.changed = machine, machine.models, machine.changed
        self.orders, self.file = Orders(machine), FileChanges(machine)

    # -- its life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find the GPUs, the size of each model, and engines that an earlier sidecar has left. A model that cannot be
        run says so in its report and harms no other."""
        machine, known = self.machine, self.machine.known
        await machine.monitor.look()
        for name, model in self.entries.items():
            if name in known.times:
                model.times.seen = msgspec.structs.replace(known.times[name])
            model.off = name in known.off
        await asyncio.gather(*(memory.size(machine, model) for model in self.entries.values()))
        await asyncio.gather(*(_take_over(machine, name, record) for name, record in known.engines.items()))
        for model in self.entries.values():
            if model.off and model.serves():
                machine.transition(model, "drain")
        records = [machine.record(model) for model in self.entries.values()]
        await machine.engines.sweep({record.process.engine for record in records if record is not None})
        machine.keep()

    async def run(self) -> None:
        """Run until cancelled. Operations under way are cancelled with it: `close` sees to their engines."""
        machine = self.machine
        try:
            machine.tasks.spawn(self._sample())
            while True:
                for model in self.entries.values():
                    operations.look_after(machine, model)
                self.file.turn()
                at = scheduler.turn(machine)
                machine.due.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(at):
                        await machine.due.wait()
                machine.tasks.reap()
        finally:
            await machine.tasks.aclose()

    async def _sample(self) -> None:
        machine = self.machine
        while True:
            known = machine.monitor.totals
            await machine.monitor.look()
            read = machine.monitor.totals != known  # GPUs could not be read before: what fits there is known only now
            for model in self.entries.values():
                due = read or machine.clock() >= model.size_again_at
                if due and model.name not in machine.running and model.name not in machine.tasks:
                    machine.tasks.begin([model.name], (), memory.size(machine, model))
            await asyncio.sleep(SAMPLE_EVERY)
            machine.due.set()

    async def close(self, *, end_engines: bool) -> None:
        """After `run`: end all engines, or let them go on and be adopted; one that is not ready yet nobody could."""
        ending = [e for e in self.entries.values() if end_engines or e.lifecycle.state is STARTING]
        await asyncio.gather(*(steps.end_anyway(self.machine, model) for model in ending))
        self.machine.keep()
        await steps.leave(self.machine)

    # -- demand and reports -----------------------------------------------------------------------------------------

    def heard(self, gateway: DemandReport) -> None:
        """Take a gateway's answer to a report of ours."""
        machine = self.machine
        if machine.demand.take(gateway):
            now = machine.clock()
            for demand in gateway.demands:
                model = self.entries.get(demand.profile)
                if model is not None and demand.idle is not None:
                    model.used(now - demand.idle)
                if model is not None and model.busy and not machine.demand.in_flight(model.name):
                    operations.look_now(machine, model)  # its last look is from before its calls have ended
            machine.due.set()

    def requests_active(self, profile: str) -> int:
        """Calls in flight, by the gateways or by the engine's own gauges, whichever are more."""
        return max(self.machine.demand.in_flight(profile), self.entries[profile].busy)

    def troubles(self) -> tuple[str, ...]:
        """Warnings for the operator about GPUs and sleep, in words."""
        notes = {name: note(model.profile, model.slept, unified=model.unified) for name, model in self.entries.items()}
        sleep = [f"{name}: {words}" for name, words in notes.items() if words]
        blind = BLIND if self.machine.blind else ""
        return tuple(filter(None, (self.machine.monitor.error, blind, *sleep)))

    def lines(self, profile: str, most: int) -> list[str]:
        """The last lines that a profile's engine, or the one that has ended last, has written. Raises KeyError."""
        model, engine = self.entries[profile], self.machine.running.get(profile)
        return model.last_lines[-most:] if engine is None else engine.lines(most)

    def report(self, sidecar: str, boot: str, control: str) -> CapacityReport:
        """The next report, for one gateway."""
        return CapacityReport(
            sidecar=sidecar,
            boot=boot,
            sequence=self.machine.demand.next_report(),
            control=control,
            key=self.machine.key,
            gpus=self.gpus(),
            models=self.models(),
        )

    def gpus(self) -> tuple[GPUReport, ...]:
        """Each GPU as last read, and why it is refused, if it is."""
        return tuple(map(gpu_report, self.machine.monitor.gpus))

    def models(self) -> tuple[ModelReport, ...]:
        """A report of each model."""
        there = planner.residents(self.machine)
        return tuple(model_report(self.machine, name, there) for name in self.entries)


# -- engines that an earlier sidecar has left -------------------------------------------------------------------------


async def _take_over(machine: Machine, name: str, record: EngineRecord) -> None:
    """Take over an engine by its record. The engine is ended instead if the file no longer has its model, if its
    profile has changed, if it was in the middle of waking (its weights may then be missing), or if it has fallen asleep
    since its record and still holds its memory."""
    model, say = machine.models.get(name), machine.say
    try:
        engine = await machine.engines.adopt(name, record)
    except EngineFailed as error:
        say(f"{name} is not taken over: {error}")
        return
    why = "the file no longer has it" if model is None else await _adopted(machine, model, engine, record)
    if model is None or why:
        say(f"{name}, which runs already, is ended: {why}")
        with contextlib.suppress(EngineFailed):
            await engine.stop()
        return
    now = machine.clock()
    model.lifecycle = Lifecycle(now, SLEEPING if model.level else RUNNING)
    model.gpus, model.size, model.first_residue = engine.gpus, record.size, record.first_residue
    model.host_pinned = model.level == 1 or record.host > 0
    model.host_pools = record.size.pools
    model.host_taken = max(record.host, record.size.host if model.level == 1 else 0)
    model.sized, model.unusable, model.facts = True, "", record.told
    model.used(now)
    machine.running[name] = engine
    memory.adopted(machine, model)
    say(f"{name} runs already and is taken over{f', asleep at level {model.level}' if model.level else ''}")


async def _adopted(machine: Machine, model: ModelState, engine: Engine, record: EngineRecord) -> str:
    """Find the level at which an engine sleeps that is to be taken over; why it cannot be, empty: it can."""
    if record.settings != machine.engines.settings(model.name):
        return "its profile has changed"
    try:
        level = await engine.awake()
        await engine.alive()
    except EngineFailed as error:
        return str(error)
    if record.level == 2 and not level:
        return "it was in the middle of waking, and its weights may not be there"
    if level and not record.level and not await memory.given_back(machine, engine, 1 - LEAST_FREED, record.size.claim):
        return "it was in the middle of falling asleep, and its memory has not come back"
    model.level = level
    return ""
