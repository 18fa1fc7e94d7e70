"""Decides which models are resident: one synchronous turn whenever anything has changed.

A turn looks at everything there is (what is wanted, what idles, what failed, what the GPUs have), gives orders, and
begins the operations that carry them out; it waits for nothing. Operations are tasks, one at a time on each GPU, since
vLLM takes memory that a neighbour frees meanwhile for its own. Whatever ends, fails or is heard leads to another turn.

Orders of people and gateways only note what is wanted; `run` does the rest, until it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Callable
from typing import Literal

import msgspec

from gateway.shared.protocol import CapacityReport, DemandReport, GPUReport, ModelReport
from sidecar.core.config import SidecarConfig
from sidecar.core.inventory import PlanSettings, Resident
from sidecar.core.lifecycle import DRAIN, ERROR, RUNNING, SLEEPING, START, STARTING, STOP, STOPPED, WAKE
from sidecar.core.model_state import ModelState
from sidecar.core.plan import Infeasible, Plan, plan
from sidecar.gpus.monitor import GpuMonitor
from sidecar.residency.demand import GatewayDemand
from sidecar.residency.effects import Engines
from sidecar.residency.gpu_tasks import GpuTasks
from sidecar.residency.liveness import LivenessProbes
from sidecar.residency.operations import Operations
from sidecar.residency.report import explained, gpu_report, model_report
from sidecar.residency.state_file import SavedState, StateFile, Times
from sidecar.residency.takeover import take_over

SAMPLE_EVERY = 1.0  # seconds between two looks at the GPUs
LEAST, MOST = 0.001, 60.0  # seconds between two turns that nothing but the clock leads to
RETRY = 1.0  # seconds until what could not be had is planned once more
ASK = 0.2  # seconds between two reports while somebody waits for calls to end: their answers tell of that
FRESH = 1.0  # seconds that the gateways have to tell of their calls before a model moves because of them
# Times the seconds to have a model back, for which it is kept after its last use. By `make residency`: with more, calls
# wait longer than under plain LRU (four times as long with 10); with none, models that take turns are loaded all day.
HOT = 0.25

Order = Literal["sleep", "wake", "stop", "drain"]


class Refused(Exception):
    """An order that cannot be obeyed now, and why. `retry_in`: seconds after which it may be otherwise, if known."""

    def __init__(self, why: str, retry_in: float | None = None) -> None:
        super().__init__(why)
        self.retry_in = retry_in


class Manager:
    """Of one machine. `state` None: nothing is kept; `known` is what it said. `host_memory`: bytes for models asleep at
    level 1. `hot`: see core.plan. `warmth`: by which models are ordered, the least to be evicted first. `changed` is
    set at every change worth a report. `say` takes one line for the operator."""

    def __init__(
        self,
        config: SidecarConfig,
        engines: Engines,
        machine: GpuMonitor,
        state: StateFile | None,
        *,
        known: SavedState,
        host_memory: int,
        hot: float = HOT,
        warmth: Callable[[ModelState, float], float] = ModelState.warmth,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        now = clock()
        self.config = config
        self.machine = machine
        self.demand = GatewayDemand(clock)
        self.changed = asyncio.Event()
        self.sequence = 0  # of the last report
        self.entries = {name: ModelState(name, profile, now) for name, profile in config.models.items()}
        self.operations = Operations(
            engines,
            machine,
            self.demand,
            clock,
            say,
            measured=known.measured,
            touch=self._touch,
            keep=self._keep,
        )
        self._engines = engines
        self._state = state
        self._known = known
        self._key = known.key or secrets.token_urlsafe(32)  # by which gateways know this sidecar's reports
        self._host_memory = host_memory
        self._hot = hot
        self._warmth = warmth
        self._clock = clock
        self._say = say
        self._asked_at = -math.inf  # when gateways were asked to tell of their calls
        self._due = asyncio.Event()
        self._works = GpuTasks(self._due.set)
        self._watch = LivenessProbes(self.operations, self._works, clock)

    # -- its life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """See what there is: GPUs, what each model will take, and engines that an earlier sidecar has left. A model
        that cannot be run says so in its report and harms no other."""
        await self.machine.look()
        for name, times in self._known.times.items():
            if name in self.entries:
                entry = self.entries[name]
                entry.load_seconds = times.load or entry.load_seconds
                entry.sleep_seconds = times.sleep or entry.sleep_seconds
                entry.stop_seconds = times.stop or entry.stop_seconds
                first, second = entry.wake_seconds
                entry.wake_seconds = (times.wake1 or first, times.wake2 or second)
        await asyncio.gather(*(self.operations.size(entry) for entry in self.entries.values()))
        for name, record in self._known.engines.items():
            known = self.entries.get(name)
            await take_over(name, record, known, self._engines, self.operations, self._clock(), self._say)
        records = [self.operations.record(entry) for entry in self.entries.values()]
        await self._engines.sweep({record.process.engine for record in records if record is not None})
        self._keep()

    async def run(self) -> None:
        """Until cancelled. Operations under way are cancelled with it: `close` sees to their engines."""
        try:
            self._works.spawn(self._sample())
            while True:
                for entry in self.entries.values():
                    self._watch.look_after(entry)
                at = self._turn()
                self._due.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(at):
                        await self._due.wait()
                self._works.reap()
        finally:
            await self._works.aclose()

    async def close(self, *, end_engines: bool) -> None:
        """After `run`: end all engines, or let them go on and be adopted; one that is not ready yet nobody could."""
        ending = [e for e in self.entries.values() if end_engines or e.lifecycle.state is STARTING]
        await asyncio.gather(*(self.operations.end_anyway(entry) for entry in ending))
        self._keep()
        await self.operations.leave()

    def _touch(self) -> None:
        self._due.set()
        self.changed.set()

    def _keep(self) -> None:
        """Write down what another sidecar has to know."""
        if self._state is None:
            return
        records = {name: self.operations.record(entry) for name, entry in self.entries.items()}
        times = {name: Times(**entry.times()) for name, entry in self.entries.items()}
        engines = {name: record for name, record in records.items() if record is not None}
        self._state.save(SavedState(key=self._key, engines=engines, measured=self._known.measured, times=times))

    # -- the turn ---------------------------------------------------------------------------------------------------

    def _turn(self) -> float:
        """Give every order that is due and can be carried out now. When the next is due, at the latest."""
        now = self._clock()
        for entry in self.entries.values():
            self._hear(entry, now)
        idle = [self._let_idle(entry, now) for entry in self.entries.values()]
        first_wanted = sorted(self.entries.values(), key=lambda entry: (entry.wanted_since or now, entry.name))
        start = [self._let_start(entry, now) for entry in first_wanted]
        return max(now + LEAST, min(now + MOST, *idle, *start))

    def _let_idle(self, entry: ModelState, now: float) -> float:
        """Put it to sleep or end it if it has idled for long enough. When to look again."""
        step = entry.idle_step()
        if step is None or not self._idle(entry):
            return math.inf
        idle_until, what = step
        if idle_until <= now and self._works.free(entry.gpus):
            self._begin_idle(entry, what)
        return idle_until if idle_until > now else math.inf

    def _let_start(self, entry: ModelState, now: float) -> float:
        """Start or wake it if it is to be and can be. When to look again."""
        at = entry.starts_at(now)
        if at is None or entry.name in self._works:
            return math.inf
        if at > now:
            return at
        decision = self.decide(entry, now)
        if isinstance(decision, Plan) and self._moves_unasked(entry, decision, now):
            return self._ask(now)
        starved = isinstance(decision, Infeasible) and entry.starved(now) and not decision.waits
        if starved:  # nobody else is ever idle: one of them is withdrawn, and makes room once its calls have ended
            decision = self.decide(entry, now, idle=True)
        if isinstance(decision, Infeasible):
            if entry.infeasible is None or entry.infeasible.why != decision.why:
                self.changed.set()
            entry.infeasible = decision
            if decision.retry_at is not None and any(map(self.in_flight, self.entries.values())):
                return self._ask(now)
            return min(now + RETRY, decision.retry_at or math.inf)
        # One that has failed comes back by itself, but nobody makes room for what nobody wants.
        if entry.wanted(now) or entry.asked or not (decision.sleep or decision.stop):
            self._begin(entry, decision, patient=starved)
        return now + RETRY

    def _ask(self, now: float) -> float:
        """Have the gateways tell of their calls, not too often. When to look again."""
        if now >= self._asked_at + ASK:
            self._asked_at = now
            self.changed.set()
        return self._asked_at + ASK

    def _moves_unasked(self, entry: ModelState, decision: Plan, now: float) -> bool:
        """Whether it would be stopped where it sleeps and started elsewhere for calls that may be over: no gateway has
        told of them since it was wanted."""
        if entry.lifecycle.state is not SLEEPING or decision.start is None or entry.wanted_since is None:
            return False
        return now < entry.wanted_since + FRESH and not self.demand.all_heard_since(entry.wanted_since)

    def _hear(self, entry: ModelState, now: float) -> None:
        if self.demand.waiting(entry.name) and not entry.serves():
            entry.want(now)
        in_flight = self.in_flight(entry)
        entry.has_calls(now, in_flight)
        if in_flight:
            entry.used(now)

    def in_flight(self, entry: ModelState) -> int:
        return self.demand.in_flight(entry.name)

    def _idle(self, entry: ModelState) -> bool:
        return not self.in_flight(entry) and not entry.busy and entry.name not in self._works

    def decide(
        self, entry: ModelState, now: float, *, since: float | None = None, ended: bool = False, idle: bool = False
    ) -> Plan | Infeasible:
        """What would be done now to have it run; `since`: from when on it is taken to be wanted, where nobody wants it
        yet; `ended`, `idle`: see `residents`."""
        if self.config.engine_of(entry.name).device == "cpu":
            wakes = entry.lifecycle.state is SLEEPING
            return Plan(start=None if wakes else entry.name, wake=entry.name if wakes else None)
        settings = PlanSettings(
            host_memory=self._host_memory, hot=self._hot, max_starvation=entry.profile.max_starvation
        )
        since = now if since is None else since
        target, devices = entry.target(since), self.machine.devices()
        residents = self.residents(ended=ended, idle=idle)
        decision = plan(target, residents, devices, now, settings)
        if isinstance(decision, Infeasible) and entry.least_room:
            # Nothing more can be evicted for it: with what there is.
            target = msgspec.structs.replace(target, need=entry.size.start_needs)
            return plan(target, residents, devices, now, settings)
        return decision

    def residents(self, *, ended: bool = False, idle: bool = False) -> list[Resident]:
        """Everything that holds memory or is about to. Calls that wait for one that serves already are about to reach
        it. `ended`: as if all calls and operations that are under way were over; `idle`: as if all calls were."""
        now = self._clock()
        found = [
            entry.resident(
                now,
                self.in_flight(entry) + (self.demand.waiting(entry.name) if entry.serves() else 0),
                self.operations.unseen(entry),
                self._warmth(entry, now),
            )
            for entry in self.entries.values()
            if entry.gpus
        ]
        if idle:
            return [msgspec.structs.replace(each, ref_count=0) for each in found]
        return [each.after_all() for each in found] if ended else found

    def _begin(self, entry: ModelState, decision: Plan, *, patient: bool = False) -> None:
        """Give the orders of a plan and begin to carry them out; not now, if something is under way on these GPUs.
        `patient`: its victims may have calls that have to end first."""
        victims = {each.profile: self.entries[each.profile] for each in decision.sleep}
        victims |= {name: self.entries[name] for name in decision.stop if name != entry.name}
        gpus = {*decision.gpus, *entry.gpus, *(gpu for victim in victims.values() for gpu in victim.gpus)}
        if not self._works.free(gpus):
            return
        now = self._clock()
        entry.infeasible, entry.asked, entry.began = None, False, now + self._makes_room(decision)
        if decision.wake is not None:
            entry.lifecycle.step("wake", now)
        elif entry.lifecycle.state in (STOPPED, ERROR):
            entry.gpus = decision.gpus
            entry.lifecycle.step("start", now)
        else:
            entry.lifecycle.step("stop", now)  # it sleeps where it cannot wake
        for victim in victims.values():
            victim.lifecycle.step("drain" if victim.lifecycle.state is RUNNING else "stop", now)
        names = [entry.name, *victims]
        carried_out = self.operations.carry_out(entry, decision, victims, self.sequence, patient=patient)
        self._works.begin(names, gpus, carried_out)
        self._touch()

    def _begin_idle(self, entry: ModelState, what: Literal["sleep", "stop"], *, ordered: bool = False) -> None:
        now = self._clock()
        if entry.lifecycle.state is SLEEPING:
            entry.lifecycle.step("stop", now)
        elif entry.lifecycle.pending is not DRAIN:
            entry.lifecycle.step("drain", now)
        level = self._level(entry) if what == "sleep" else None
        retired = self.operations.retire(entry, level, self.sequence, ordered=ordered)
        self._works.begin([entry.name], entry.gpus, retired)
        self._touch()

    def _level(self, entry: ModelState) -> Literal[1, 2] | None:
        """How deep it should sleep: at level 1 only while host memory has room for its weights."""
        if entry.profile.sleep is None:
            return None
        asleep = sum(each.size.host for each in self.entries.values() if each.level == 1)
        return 1 if entry.profile.sleep.level == 1 and asleep + entry.size.host <= self._host_memory else 2

    # -- what goes on beside it -------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            known = self.machine.totals
            await self.machine.look()
            if self.machine.totals != known:  # GPUs that could not be read before: what fits there is known only now
                for entry in self.entries.values():
                    self._size_again(entry)
            await asyncio.sleep(SAMPLE_EVERY)
            self._due.set()

    def _size_again(self, entry: ModelState) -> None:
        """What was wrong with a model that could not be run may be mended."""
        if entry.unusable and entry.name not in self._works:
            self._works.begin([entry.name], (), self.operations.size(entry))

    # -- what others ask --------------------------------------------------------------------------------------------

    def heard(self, gateway: DemandReport) -> None:
        """A gateway's answer to a report of ours."""
        if self.demand.take(gateway):
            now = self._clock()
            for demand in gateway.demands:
                entry = self.entries.get(demand.profile)
                if entry is not None and demand.idle is not None:
                    entry.used(now - demand.idle)
                if entry is not None and entry.busy and not self.in_flight(entry):
                    self._watch.look_now(entry)  # its last look is from before its calls have ended
            self._due.set()

    def ensure(self, profile: str) -> ModelReport:
        """It is wanted: start or wake it as soon as that can be. Raises KeyError."""
        entry, now = self.entries[profile], self._clock()
        entry.off = entry.held_back = False
        life = entry.lifecycle
        self._size_again(entry)
        if life.pending is DRAIN and profile not in self._works:
            life.step("cancel", now)
        if not entry.serves():
            entry.want(now, ordered=True)
            entry.asked = life.state is ERROR and life.given_up
            self._turn()  # so that the answer is what is being done
        self._touch()
        return self.model(profile)

    def order(self, profile: str, what: Order) -> ModelReport:
        """What somebody wants done with a model. Raises KeyError, and Refused with nothing changed."""
        entry, life = self.entries[profile], self.entries[profile].lifecycle
        if what == "wake":
            if life.state is STOPPED:
                raise Refused(f"{profile} does not sleep, it is stopped: `ensure` starts it")
            return self.ensure(profile)
        if what == "stop" and life.state is STARTING:
            entry.off, entry.wanted_since = True, None
            if life.pending is not STOP:
                life.step("stop", self._clock())
                self.operations.stop_starting(entry)
        elif entry.name in self._works:
            doing = life.pending.value if life.pending else "change"
            raise Refused(f"{profile} has a {doing} under way", self._ready_in(entry))
        elif what == "stop":
            self._stop(entry)
        elif life.state is not RUNNING:
            raise Refused(f"{profile} is {life.state.value}, not running")
        elif what == "drain":
            entry.held_back = True
            if life.pending is None:
                life.step("drain", self._clock())
        elif entry.profile.sleep is None:
            raise Refused(f"{profile} does not sleep: its profile has `sleep: null`")
        elif not self._works.free(entry.gpus):
            raise Refused("something else is under way on its GPUs", 1.0)
        else:
            self._begin_idle(entry, "sleep", ordered=True)
        self._touch()
        return self.model(profile)

    def _stop(self, entry: ModelState) -> None:
        entry.off, entry.wanted_since, entry.held_back = True, None, False
        state = entry.lifecycle.state
        if state is ERROR:
            self.operations.settle(entry)
        elif state is not STOPPED:
            self._begin_idle(entry, "stop", ordered=True)

    def requests_active(self, profile: str) -> int:
        """Calls in flight, by the gateways or by the engine's own gauges, whichever are more."""
        entry = self.entries[profile]
        return max(self.in_flight(entry), entry.busy)

    def lines(self, profile: str, most: int) -> list[str]:
        """The last lines that its engine has written. Raises KeyError."""
        entry = self.entries[profile]
        return self.operations.lines(entry, most)

    # -- what it tells ----------------------------------------------------------------------------------------------

    def report(self, sidecar: str, boot: str, control: str) -> CapacityReport:
        """The next report, for one gateway."""
        self.sequence += 1
        return CapacityReport(
            sidecar=sidecar,
            boot=boot,
            sequence=self.sequence,
            control=control,
            key=self._key,
            gpus=self.gpus(),
            models=self.models(),
        )

    def gpus(self) -> tuple[GPUReport, ...]:
        return tuple(gpu_report(gpu, self.machine.refused(gpu)) for gpu in self.machine.gpus)

    def models(self) -> tuple[ModelReport, ...]:
        return tuple(self.model(name) for name in self.entries)

    def model(self, profile: str) -> ModelReport:
        """Raises KeyError."""
        entry, now = self.entries[profile], self._clock()
        engine = self.operations.running.get(profile)
        told = self.operations.told.get(profile)
        return model_report(
            entry, self.config.served_name(profile), engine.url if engine else "", told, self._foreseen(entry, now), now
        )

    def _foreseen(self, entry: ModelState, now: float) -> Plan | Infeasible | None:
        """What the plan would do with one that is not on its way, were it wanted; None: it is, or runs.

        Where it is only too soon to evict, or calls or operations have to end first, that is a plan for later: one that
        is refused until it is wanted, and wanted by nobody since it is refused, would never come to be had.
        """
        if entry.lifecycle.pending is not None or entry.lifecycle.state in (RUNNING, STARTING) or not entry.sized:
            return None
        decision = later = self.decide(entry, now)
        at, pause = now, 0.0
        while isinstance(later, Infeasible) and later.retry_at is not None and at - now <= entry.profile.max_starvation:
            at, pause = max(at + pause, later.retry_at), RETRY
            later = self.decide(entry, at, since=now, ended=True)
        if isinstance(later, Infeasible):
            return decision
        victims = [self.entries[name] for name in (*(each.profile for each in later.sleep), *later.stop)]
        coming = [each.ready_in(now, None) or 0.0 for each in victims if each.lifecycle.pending in (START, WAKE)]
        return msgspec.structs.replace(later, after=max(at - now, *coming, 0.0), makes_room=self._makes_room(later))

    def _makes_room(self, decision: Plan) -> float:
        """Seconds until its victims are gone, one after the other."""
        sleep = sum(self.entries[each.profile].sleep_seconds for each in decision.sleep)
        return sleep + sum(self.entries[name].stop_seconds for name in decision.stop)

    def _ready_in(self, entry: ModelState) -> float | None:
        now = self._clock()
        return entry.ready_in(now, self._foreseen(entry, now))

    def explain(self, profile: str) -> str:
        """What it takes and what would be done now to have it, for a person. Raises KeyError."""
        entry, now = self.entries[profile], self._clock()
        return explained(
            entry, self.residents(), self.machine.devices(), self.decide(entry, now) if entry.sized else None
        )
