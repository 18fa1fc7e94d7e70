"""Machine with its sidecar and the gateways over it, in virtual time, for tests and figures of residency.

The manager is the sidecar's own, as `sidecar serve` builds it; engines, GPUs and gateways are simulated. While it runs,
what must hold at every moment is looked at, and what does not is kept in `wrong`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from gateway.shared.protocol import ModelReport
from loadtest.lab.residency.callers import ModelCallers
from loadtest.lab.residency.machine import Listing, Machine
from loadtest.lab.residency.residents import Model, ResidentEngines
from sidecar.core.config import decode
from sidecar.core.lifecycle import ERROR, RUNNING, SLEEPING, STOP, WAKE
from sidecar.core.model_state import ModelState
from sidecar.core.reload import Changes
from sidecar.gpus.monitor import GpuMonitor
from sidecar.residency import machine as managed
from sidecar.residency.manager import Manager
from sidecar.residency.report import model_report
from sidecar.residency.sleep_steps import UNSURE
from sidecar.residency.state_file import SavedState

GIB = 1 << 30
ENDED_WITHIN = 60.0  # seconds, of them 30 for the step itself, for an engine that hangs as it sleeps or wakes
LOOK_EVERY = 0.25  # seconds between two looks at what must hold, unless told otherwise


class Site:
    """Machine that runs for an `async with`, which ends its engines.

    `text`: the sidecar's file; `hot`: see Manager. `log`: what was said, with its time; `asked`: the models that people
    wanted ready, and when: all of them, where they begin another sidecar. `shares_with`: the sidecar with which this
    machine shares its GPUs."""

    def __init__(
        self,
        text: str,
        models: Mapping[str, Model],
        *totals: int,
        gateways: int = 1,
        host_memory: int = 1 << 50,
        hot: float = managed.HOT,
        look_every: float = LOOK_EVERY,
        listing: Listing = "own",
        unified: bool = False,
        shares_with: Site | None = None,
    ) -> None:
        made = None if shares_with is None else shares_with.machine
        self.machine: Machine = made or Machine(*totals, listing=listing, unified=unified)
        self.engines = ResidentEngines(self.machine, models)
        self.text = text
        self.log: list[tuple[float, str]] = []
        self.wrong: list[str] = []
        self.asked: list[tuple[float, str]] = []
        self._host_memory = host_memory
        self._hot = hot
        self._look_every = look_every
        self._tasks: list[asyncio.Task[None]] = []
        self.manager = self._made(SavedState())
        self.gateways = [ModelCallers(self.manager, self.engines, f"gateway{number}") for number in range(gateways)]

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def say(self, line: str) -> None:
        self.log.append((self.now, line))

    def entry(self, name: str) -> ModelState:
        return self.manager.entries[name]

    def report(self, name: str) -> ModelReport:
        return model_report(self.manager.machine, name)

    def state(self) -> str:
        """Return the states of all models in one line: `a running, b sleeping/wake`."""
        lives = {name: entry.lifecycle for name, entry in self.manager.entries.items()}
        return ", ".join(
            f"{name} {life.state.value}{f'/{life.pending.value}' if life.pending else ''}"
            for name, life in lives.items()
        )

    def _made(self, known: SavedState) -> Manager:
        loop = asyncio.get_running_loop()
        self.lessons = known.lessons
        self.sleeps = known.sleeps
        config = decode(self.text.encode())
        self.engines.apply(config)
        monitor = GpuMonitor(self.machine.sample, self.say)
        machine = managed.Machine(
            config, self.engines, monitor, None, known=known, host_memory=self._host_memory, hot=self._hot,
            clock=loop.time, say=self.say,
        )  # fmt: skip
        return Manager(machine)

    async def __aenter__(self) -> Site:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- its life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self.manager.open()
        for gateway in self.gateways:
            gateway.away = False
        work = [self.manager.run(), self._look(), *(gateway.run() for gateway in self.gateways)]
        self._tasks = [asyncio.ensure_future(each) for each in work]
        await asyncio.sleep(0)

    async def _stop(self) -> None:
        for gateway in self.gateways:
            gateway.away = True  # until another listens
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self._tasks = []

    async def close(self, *, end_engines: bool = True) -> None:
        """End everything. Raises what broke the manager or a gateway meanwhile."""
        await self._stop()
        await self.manager.close(end_engines=end_engines)

    async def restart(self, text: str | None = None, *, killed: bool = False) -> None:
        """Replace this sidecar by another, on the same engines; `text`: with another file. `killed`: the old sidecar
        had no time to let go of anything."""
        manager, self.text = self.manager, self.text if text is None else text
        await self._stop()
        records = {name: manager.machine.record(entry) for name, entry in manager.entries.items()}
        if not killed:
            await manager.close(end_engines=False)
        times = {name: entry.times.seen for name, entry in manager.entries.items()}
        engines = {name: each for name, each in records.items() if each is not None}
        off = tuple(name for name, entry in manager.entries.items() if entry.off)
        known = SavedState(engines=engines, times=times, lessons=self.lessons, sleeps=self.sleeps, off=off)
        self.manager = self._made(known)
        self.asked += [(self.now, name) for name in manager.entries]  # who restarts it wants every model tried again
        for gateway in self.gateways:
            gateway.manager = self.manager
        await self.open()

    def reload(self, text: str, host_memory: int | None = None) -> Changes:
        """A newer file, while it runs; `host_memory`: bytes for models asleep at level 1, if others."""
        self._host_memory = self._host_memory if host_memory is None else host_memory
        self.text, config = text, decode(text.encode())
        return self.manager.file.take(config, config, self._host_memory)

    # -- waiting ----------------------------------------------------------------------------------------------------

    async def until(self, model: str, state: str, within: float = 300.0) -> float:
        """Wait until it is in this state with nothing pending; when that was. Raises TimeoutError."""
        async with asyncio.timeout(within):
            while True:
                life = self.entry(model).lifecycle
                if life.state.value == state and life.pending is None:
                    return self.now
                await asyncio.sleep(0.05)

    # -- invariants -------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            for gpu, (held, total) in enumerate(zip(self._promised(), self.machine.totals, strict=True)):
                if held > total:
                    self.wrong.append(f"{self.now:.1f} s: {held / GIB:.1f} GiB are held on GPU {gpu}: {self.state()}")
            machine = self.manager.machine
            leaving = [entry.host_held for entry in self.manager.entries.values() if entry.lifecycle.pending is STOP]
            if machine.host_total - sum(leaving) > machine.host_bound:
                self.wrong.append(
                    f"{self.now:.1f} s: {machine.host_total / GIB:.1f} GiB of host memory: {self.state()}"
                )
            for name, entry in self.manager.entries.items():
                waits = entry.off or entry.replaced  # for calls to end
                if entry.lifecycle.pending is not None and not waits and name not in self.manager.machine.tasks:
                    self.wrong.append(f"{self.now:.1f} s: nobody sees to {name}: {self.state()}")
            for name, engine in self.engines.all.items():
                if (
                    engine.alive_now
                    and self.now > engine.stuck_at + UNSURE * _longest_step(self.entry(name)) + ENDED_WITHIN
                ):
                    self.wrong.append(f"{self.now:.1f} s: {name} hangs since {engine.stuck_at:.1f} s: {self.state()}")
            await asyncio.sleep(self._look_every)

    def _promised(self) -> list[int]:
        """Bytes of each GPU that engines have, by the ledger; of one that takes what nobody foresaw, what it really
        holds once it serves."""
        running, models = self.manager.machine.running, self.engines.models
        held = [0] * len(self.machine.totals)
        for name, entry in self.manager.entries.items():
            if not entry.gpus or name not in running:
                continue
            there = self.machine.held.get(_pid(self.engines, name), {})
            # One that has failed takes nothing more until it has ended.
            settled = entry.lifecycle.state in (RUNNING, SLEEPING, ERROR) and entry.lifecycle.pending is not WAKE
            booked = entry.size.residue if entry.level else entry.size.claim
            unforeseen = settled and models[name].true is not None
            for gpu in entry.gpus:
                held[gpu] += there.get(gpu, 0) if unforeseen else booked
        return held

    def left_over(self) -> list[str]:
        """Find what should not be there once nobody does anything: memory of nobody, engines nobody knows, calls."""
        engines = self.manager.machine.running
        found = list(self.wrong)
        running = {engine.url: name for name, engine in engines.items()}
        owners = {int(url.rpartition(":")[2]): name for url, name in running.items()}
        for pid, held in self.machine.held.items():
            life = self.entry(owners[pid]).lifecycle if pid in owners else None
            if life is None or life.state not in (RUNNING, SLEEPING):
                found.append(f"{sum(held.values()) / GIB:.1f} GiB are held by engine {pid}: {self.state()}")
        for name, entry in self.manager.entries.items():
            if entry.host_held != (entry.host_taken if name in engines else 0):
                found.append(f"{name} has {entry.host_held} bytes of host memory booked")
            if entry.lifecycle.pending is not None:
                found.append(f"{name} has a {entry.lifecycle.pending.value} pending")
            holds = sum(self.machine.held.get(_pid(self.engines, name), {}).values())
            foreseen = entry.size.residue if entry.level else entry.size.claim if entry.gpus else 0
            if name in engines and not self.engines.models[name].true and holds != foreseen * len(entry.gpus):
                found.append(f"{name} holds {holds}, by the ledger {foreseen} on each of {entry.gpus}")
        for gateway in self.gateways:
            found += [f"{gateway.name} has {+each}" for each in (gateway.in_flight, gateway.waiting) if +each]
        return found


def _pid(engines: ResidentEngines, name: str) -> int:
    return engines.all[name].pid if name in engines.all else 0


def file(names: Sequence[str], gpus: int = 1, **fields: str) -> str:
    """A sidecar's file with these models; `fields`: what each has besides, by name, in YAML's short form."""
    lines = [f"gpus: [{', '.join(map(str, range(gpus)))}]" if gpus else "gpus: []", "models:"]
    for name in names:
        more = f", {fields[name]}" if fields.get(name) else ""
        lines.append(f"  {name}: {{model_path: /m/{name}{more}}}")
    return "\n".join(lines) + "\n"


def counted(site: Site, event: str) -> Counter[str]:
    """Count this event of each model: ready, woken, slept, stopped, failed, out_of_memory."""
    return Counter({name: entry.counts[event] for name, entry in site.manager.entries.items() if entry.counts[event]})


def _longest_step(entry: ModelState) -> float:
    """Seconds of falling asleep or of waking, whichever is expected to take longer."""
    return max(entry.sleep_seconds, *entry.wake_seconds)
