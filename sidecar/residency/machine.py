"""State of one machine that all parts of its manager share: models, engines, GPUs, operations under way; its effects.

Side effects are asked of engines by an interface: start, sleep, wake, stop an engine; size a model. It decides nothing.
Two implementations: `sidecar.process.engine`, with real processes, and `loadtest.lab.residency`, in virtual time. Bytes
are per GPU, times are seconds.

vLLM measures the memory of its GPU while it starts and sleeps, so a neighbour must not change it meanwhile: one
operation at a time on each GPU, beside those that are late. A task that fails by a bug is not hidden: `reap` raises its
error.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, Literal, Protocol

import msgspec

from gateway.shared.tasks import cancel
from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import EngineFacts, EngineRecord
from sidecar.core.inventory import Size
from sidecar.core.lesson import Lesson, Measured
from sidecar.core.lifecycle import STARTING, Event
from sidecar.core.model_state import ModelState
from sidecar.core.sleep import Level
from sidecar.core.step_times import StepTimes
from sidecar.gpus.monitor import GpuMonitor
from sidecar.residency.demand import GatewayDemand
from sidecar.residency.state_file import SavedState, StateFile

ON_CPU = -1  # what engines without a GPU have to themselves: they start one after the other too
# Times the seconds to have a model back, for which it is kept after its last use. By `make residency`: with more, calls
# wait longer than under plain LRU (four times as long with 10); with none, models that take turns are loaded all day.
HOT = 0.25
KEPT_WITHIN = 5.0  # seconds for the state file, less than whoever has ordered something waits

Work = Coroutine[Any, Any, object]


# -- effects ----------------------------------------------------------------------------------------------------------


class Engine(Protocol):
    """Engine from its start to its end. Every method raises EngineFailed, and nothing else."""

    @property
    def url(self) -> str:
        """URL by which gateways reach the engine."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of its GPUs; empty on CPU."""

    def record(self, *, level: Literal[0, 1, 2], told: EngineFacts) -> EngineRecord:
        """For the state file."""

    def held(self, processes: dict[int, int]) -> int:
        """Bytes of this engine's processes together, by the bytes of each pid on one GPU."""

    def host_held(self) -> int:
        """Bytes of host memory of this engine's processes together; 0: not told."""

    def lines(self, most: int) -> list[str]:
        """The last lines it has written."""

    async def ready(self, gpu_bytes: Callable[[], int] = lambda: 0) -> EngineFacts:
        """Until it serves: healthy, its name served, warmed up, the canary recorded. `gpu_bytes`: the most that it has
        held of a GPU so far, whose growth is progress."""

    async def awake(self) -> Literal[0, 1, 2]:
        """Sleep level, by its own word; 0: awake. After adoption."""

    async def busy(self) -> int:
        """Requests running and waiting in it, by its own gauges."""

    async def alive(self) -> None:
        """Probe the process, and EngineCore itself."""

    async def sleep(self, level: Level) -> None:
        """Back once it does."""

    async def wake(self, level: Level, told: EngineFacts) -> None:
        """Back once it serves; after level 2 its canary must be `told`'s."""

    async def ended(self) -> str:
        """Until its process has ended, by itself or not: how, in words."""

    async def stop(self) -> None:
        """End it and all its processes, and wait for that."""

    async def leave(self) -> None:
        """Let it run and know nothing of it any more."""


class EngineSizing(Protocol):
    """Memory of engines by the files of their models."""

    async def size(
        self, name: str, total: int, present: int, measured: Measured | None, lesson: Lesson | None, *, unified: bool
    ) -> Size:
        """Memory of a profile's engine on GPUs of `total` bytes, of which there are `present`, by what engines with its
        settings have shown. `unified`: it is the host's too. Raises Unusable."""

    def kv_bytes(self, name: str, told: EngineFacts) -> int | None:
        """Bytes of an engine's KV cache on each GPU; None: that cannot be told."""


class Engines(Protocol):
    """Makes engines; the profile's name is all it takes."""

    @property
    def sizing(self) -> EngineSizing:
        """Sizes of the engines of the config in force."""

    def settings(self, profile: str, config: SidecarConfig | None = None) -> str:
        """A digest that changes when the profile's engine would be started otherwise; by another config than the one in
        force, where one is given. Raises KeyError."""

    def apply(self, config: SidecarConfig) -> None:
        """Size and start engines by this config from now on; those that there are stay as they are."""

    async def start(self, profile: str, gpus: tuple[int, ...], size: Size) -> Engine:
        """Start its process; it is not ready yet. Raises EngineFailed."""

    async def adopt(self, profile: str, record: EngineRecord) -> Engine:
        """Take over an engine that an earlier sidecar started. Raises EngineFailed where there is none."""

    async def sweep(self, keep: Collection[str]) -> None:
        """End the processes of an earlier sidecar's engines, but for these (`process.engine`)."""


# -- operations -------------------------------------------------------------------------------------------------------


class GpuTasks:
    """Tasks of a machine: operations, each with exclusive models and GPUs, and background work beside them. `done` is
    called at the end of every task."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._tasks: set[asyncio.Task[Any]] = set()
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._locked: Counter[int] = Counter()
        self._held: dict[asyncio.Task[Any], tuple[int, ...]] = {}  # GPUs that an operation has to itself

    def __contains__(self, name: str) -> bool:
        """Whether an operation on this model is under way."""
        return name in self._under_way

    def free(self, gpus: Iterable[int], names: Iterable[str] = ()) -> bool:
        """Whether nothing is under way on these GPUs, beside what shares them, nor on these models."""
        return not (any(name in self for name in names) or any(self._locked[gpu] for gpu in gpus or (ON_CPU,)))

    def spawn(self, work: Work) -> asyncio.Task[Any]:
        """Begin something that goes on beside the operations."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._done())
        return task

    def begin(self, names: Iterable[str], gpus: Iterable[int], work: Work) -> None:
        """Begin an operation on these models, with these GPUs to itself: the caller has seen that they are free."""
        names = tuple(names)
        task = self.spawn(work)
        self._under_way |= dict.fromkeys(names, task)
        held = self._held[task] = tuple(gpus) or (ON_CPU,)
        self._locked.update(held)

        def ended(_: asyncio.Task[Any]) -> None:
            self._locked.subtract(self._held.pop(task))
            for name in names:
                del self._under_way[name]

        task.add_done_callback(ended)

    def share(self, name: str) -> None:
        """Let other operations use the GPUs of the one on this model, which goes on."""
        task = self._under_way[name]
        self._locked.subtract(self._held[task])
        self._held[task] = ()
        self._done()

    async def wait(self, name: str) -> None:
        """Wait until no operation on this model is under way."""
        task = self._under_way.get(name)
        if task is not None:
            await asyncio.wait((task,))

    def reap(self) -> None:
        """Forget the tasks that have ended; a bug of one is raised."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            if not task.cancelled():
                task.result()

    async def aclose(self) -> None:
        """Cancel all tasks and wait for their ends."""
        await cancel(*self._tasks)


# -- state ------------------------------------------------------------------------------------------------------------


class Machine:
    """State of one machine. `config`: the file in force, with the old profiles of engines that have to end first.
    `state`: where `keep` saves; None: nowhere. `known`: measurements, lessons and sleeps, read and written. `hot`: see
    core.plan. `say` takes one line for the operator; `clock` gives monotonic seconds.

    `due`: set when the scheduler is to take another turn; `changed`: at every change worth a report.
    """

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
        self.config, self.engines, self.monitor, self.known = config, engines, monitor, known
        self.hot, self.clock, self.say = hot, clock, say
        self.due, self.changed = asyncio.Event(), asyncio.Event()
        self.demand, self.tasks = GatewayDemand(clock), GpuTasks(self.due.set)
        self.host_bound = host_memory  # bytes for models asleep at level 1 and for pools of engines
        self.times: dict[str, StepTimes] = {}
        self.models = {name: ModelState(name, each, clock(), self.times) for name, each in config.models.items()}
        self.running: dict[str, Engine] = {}  # the engines there are, by profile
        self.stopping: dict[str, asyncio.Event] = {}  # for engines that start: somebody wants them ended
        self.watched: dict[Engine, asyncio.Event] = {}  # engines that are probed; set: probe it now
        self.told = False  # NVML has told a process of one of the engines
        self.blind = False  # NVML did not list a ready engine among its processes
        self.asked_at = -math.inf  # when gateways were asked to tell of their calls
        self.key = known.key or secrets.token_urlsafe(32)  # by which gateways know this sidecar's reports
        self._state = state

    def touch(self) -> None:
        """Have the scheduler take a turn and a report made: an order was given, or a model's state has changed."""
        self.due.set()
        self.changed.set()

    def transition(self, model: ModelState, event: Event, error: str = "") -> None:
        """Apply an event of `core.lifecycle` to a model, and count the facts. Raises IllegalTransition."""
        model.lifecycle.step(event, self.clock(), error)
        if event in ("ready", "woken", "slept", "stopped", "failed", "out_of_memory", "taught"):
            model.counts[event] += 1
        self.touch()

    @property
    def host_room(self) -> int:
        """Bytes of host memory for all that sleep."""
        return max(0, self.host_bound - sum(model.host_pools for model in self.models.values()))

    @property
    def host_total(self) -> int:
        """Bytes of host memory that all have for their sleep. An engine that was taken over may exceed the room."""
        return sum(model.host_held for model in self.models.values())

    def host_fits(self, model: ModelState, size: int) -> bool:
        """Whether a model can have `size` bytes of host memory in all."""
        return size <= model.host_held or self.host_left(model) >= size

    def host_left(self, model: ModelState) -> int:
        """Bytes of host memory that the others leave to a model."""
        return self.host_room - self.host_total + model.host_held

    def record(self, model: ModelState) -> EngineRecord | None:
        """Record of an engine for the state file; None where there is none, or none that is ready."""
        engine = self.running.get(model.name)
        if engine is None or model.lifecycle.state is STARTING:
            return None
        record, host = engine.record(level=model.level, told=model.facts), model.host_taken
        return msgspec.structs.replace(record, size=model.size, host=host, first_residue=model.first_residue)

    def keep(self) -> None:
        """Save the state that the next sidecar needs."""
        if self._state is None:
            return
        known, models = self.known, self.models
        records = {name: self.record(model) for name, model in models.items()}
        self._state.save(
            SavedState(
                origin=known.origin,
                key=self.key,
                engines={name: record for name, record in records.items() if record is not None},
                measured={name: each for name, each in known.measured.items() if name in models},
                lessons={name: each for name, each in known.lessons.items() if name in models},
                sleeps={name: each for name, each in known.sleeps.items() if name in models},
                times={name: model.times.seen for name, model in models.items()},
                off=tuple(name for name, model in models.items() if model.off),
            )
        )

    async def wait_saved(self) -> str:
        """Wait until the state file has what was ordered; why it has not, empty if it has."""
        if self._state is None:
            return ""
        return "" if await self._state.flush(KEPT_WITHIN) else self._state.error or "the disk does not answer"
