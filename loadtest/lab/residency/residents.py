"""Engines for the sidecar's manager without a process: for virtual time, hence for its figures and laws.

What a real engine takes seconds for is `asyncio.sleep` here, by the numbers of the simulated engine; its memory is a
number on a GPU (machine.py). It may take more or less than was claimed for it, keep more asleep with every sleep, and
fail in vLLM's words. The sidecar's own deadlines for a start are applied to it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Literal, NoReturn, cast

import msgspec

from loadtest.engine import memory_stages
from loadtest.engine.true_memory import Shortage, TrueMemory
from loadtest.engine.vllm_lines import VLLM_LINES, line
from loadtest.lab.residency.estimates import estimated
from loadtest.lab.residency.machine import Machine, failed
from sidecar.core.addresses import EngineAddress
from sidecar.core.config import SidecarConfig
from sidecar.core.diagnosis import diagnosis
from sidecar.core.engine_records import EngineFacts, EngineFailed, EngineRecord, ProcessRecord, Unusable
from sidecar.core.inventory import Size
from sidecar.core.lesson import Lesson, Measured
from sidecar.core.profile import Profile
from sidecar.core.sleep import Level
from sidecar.core.start_progress import Look, StartProgress
from sidecar.process.engine_api import ApiError, EngineApi
from sidecar.process.start_evidence import ready
from sidecar.sizing.claim import MOST, NOTHING_LEARNT

EXIT = 0.5  # seconds from SIGTERM to the end
DOWNLOADS = 100_000_000  # bytes a second
HANG_SAYS = 60.0  # seconds between two lines of a start whose GPUs wait for each other


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a profile's engine: `weights` and `claim` in bytes on each GPU. `broken`: why it cannot be run.
    `true`: what it really takes, where `claim` is but the estimate, `context` of it KV cache of a context, 0: an
    eighth. `own_context`: tokens of that, where fewer may be chosen; 0: they are given. `pinned`: host memory that it
    takes to sleep at level 1, as a multiple of its weights; `keeps_pinned`: awake again too. `pools`: bytes of host
    memory that it keeps from its start to its end."""

    weights: int
    claim: int
    broken: str = ""
    true: TrueMemory | None = None
    context: int = 0
    own_context: int = 0
    pinned: float = 1.0
    keeps_pinned: bool = False
    pools: int = 0


class TriedStart(msgspec.Struct):
    """A start: when, of which profile, where, of what size and with how much `free`. `failed`: the kind of failure, if
    it did, with so much `left` to it."""

    at: float
    profile: str
    gpus: tuple[int, ...]
    size: Size
    free: int = 0
    failed: str = ""
    left: int = 0


class ResidentEngine:
    """Engine (residency.machine.Engine). `requests`: what runs in it; `hung`: it answers nothing; `serves`: a call sent
    to it now would be answered; `harmed`: something has failed in it; `ending`: it was told to; `process` is done when
    it has ended."""

    def __init__(
        self, machine: Machine, model: Model, pid: int, tried: TriedStart, settings: str, profile: Profile
    ) -> None:
        self.pid = pid
        self.gpus = tried.gpus
        self.url = f"http://127.0.0.1:{pid}"
        self.requests = 0
        self.hung = self.harmed = self.ending = False
        self.stuck_at = math.inf  # when it hung as it fell asleep or woke
        self.serves = False
        self.sleeps = 0
        self.woken_at = -math.inf  # when it was last asked to wake
        self.level: Literal[0, 1, 2] = 0
        self._machine = machine
        self._model = model
        self._size = tried.size
        self._tried = tried
        self._settings = settings
        self._profile = profile
        self._under_way: asyncio.Task[None] | None = None
        self._said = [f"engine {pid}"]
        self._fetched = 0  # bytes that it has downloaded
        self._gpu_bytes: Callable[[], int] = lambda: 0
        self._progress = StartProgress(asyncio.get_running_loop().time(), profile.load_stall)
        self.process: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def record(self, *, level: Literal[0, 1, 2], told: EngineFacts) -> EngineRecord:
        process = ProcessRecord(
            engine=f"sim/{self.pid}", pid=self.pid, started=0, boot="", log="", address=EngineAddress()
        )
        return EngineRecord(
            process=process, gpus=self.gpus, size=self._size, settings=self._settings, told=told, level=level
        )

    def held(self, processes: dict[int, int]) -> int:
        return processes.get(self.pid, 0)

    def host_held(self) -> int:
        return self._machine.host.get(self.pid, 0)

    def lines(self, most: int) -> list[str]:
        return self._said[-most:]

    @property
    def alive_now(self) -> bool:
        return not self.process.done()

    def kill(self, how: str = "SIGKILL") -> None:
        """End the process, as if by itself."""
        if self.alive_now:
            self.serves = False
            self.process.set_result(how)
            self._machine.release(self.pid)

    def _check(self) -> None:
        if not self.alive_now:
            self.harmed = True
            raise EngineFailed(f"its process ended: {self.process.result()}")

    async def _takes(self, seconds: float) -> None:
        await asyncio.wait((self.process,), timeout=seconds)
        self._check()

    async def _sticks(self) -> None:
        """Do nothing any more, until the process ends."""
        self.hung, self.stuck_at = True, asyncio.get_running_loop().time()
        await asyncio.wait((self.process,))
        self._check()

    def _fails(self, why: str) -> EngineFailed:
        self.harmed = True
        return EngineFailed(why)

    # -- its start --------------------------------------------------------------------------------------------------

    async def ready(self, gpu_bytes: Callable[[], int] = lambda: 0) -> EngineFacts:
        self._gpu_bytes = gpu_bytes
        with self._machine.alone(self.gpus, f"start of {self.pid}"):
            start = _Start(self._started)
            loop = asyncio.get_running_loop()
            limit = self._profile.load_timeout
            api = cast(EngineApi, start)
            try:
                await ready(api, self._progress, limit, loop.time, dead=self.process, look=self._look)
            except ApiError as error:
                self.harmed = True
                found = diagnosis(self._said)
                raise EngineFailed(f"it did not get ready: {error}", found=found) from error
            return start.facts

    async def _started(self) -> EngineFacts:
        faults = self._machine.faults
        if faults.refusal:
            self._ends(Shortage(diagnosis([faults.refusal]).kind, faults.refusal))
        if faults.strikes("silent_start"):
            self._says("INFO Downloading weights from the hub")
            for _ in range(int(faults.silent)):
                await self._takes(1.0)
                self._fetched += DOWNLOADS
        for stage in memory_stages.start(self._model.weights, self._size.claim):
            if stage.loaded is not None:
                size = memory_stages.held(self._model.weights, self._size.claim, loaded=stage.loaded, cache=stage.cache)
                if faults.strikes("oom"):
                    self._ends(Shortage("oom", "torch.OutOfMemoryError: CUDA out of memory."))
                if faults.strikes("changed"):
                    self._ends(Shortage("memory_changed", line("memory_changed", free=20.0, current=21.0)))
                if len(self.gpus) > 1 and faults.strikes("hang_start"):
                    await self._hangs()
                self._takes_memory(size, cache=stage.cache)
            await self._takes(stage.seconds)
            self._says(stage.line)
        if faults.strikes("fail_start"):
            self._ends(Shortage(diagnosis([faults.fail_line]).kind, faults.fail_line))
        self.serves = True
        return EngineFacts(kv_tokens=100_000, context_length=8192)

    async def _hangs(self) -> None:
        """Let its GPUs wait for each other for ever. It says so once a minute."""
        while True:
            await self._takes(HANG_SAYS)
            now = asyncio.get_running_loop().time()
            self._says(f"(EngineCore pid={self.pid}) INFO at {now:.0f} {VLLM_LINES.slow_or_hung}")

    def _says(self, words: str) -> None:
        self._said.append(words)
        self._progress.wrote(words, asyncio.get_running_loop().time())

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        self._progress.looked(Look(moved={self.pid: self._fetched}, gpu=self._gpu_bytes()), now)

    def _ends(self, why: Shortage) -> NoReturn:
        """Write this, and end."""
        before = list(self._said)
        self._says(why.line)
        self.harmed = True
        self._tried.left = self._machine.free(self.pid, self.gpus)
        self._tried.failed = why.kind
        self.kill("exit 1")
        raise failed(why, before)

    def _takes_memory(self, size: int, *, cache: bool) -> None:
        """Hold what it takes while it loads, and all that it ever will with its KV cache."""
        true, machine, pid = self._model.true, self._machine, self.pid
        if true is None:
            machine.take(pid, self.gpus, size)
            return
        share, total = self._size.share or 0.0, min(machine.totals[gpu] for gpu in self.gpus)
        free = machine.free(pid, self.gpus)
        first = pid not in machine.held
        lacks = true.refuses(self._size.context_length) if first else None
        lacks = true.at_first(share, free, total, self.gpus[0]) if first and lacks is None else lacks
        if lacks is None and cache:
            lacks = true.for_cache(share, self._size.sequences, total, self._size.context_length)
        size = self._true_size(true) if cache else min(size, true.rest)
        if lacks is None and size > free:
            lacks = true.full(size, free, total, self.gpus[0])
        if lacks is not None:
            self._ends(lacks)
        machine.take(pid, self.gpus, size)

    def _true_size(self, true: TrueMemory) -> int:
        """Bytes on each of its GPUs, awake."""
        total = min(self._machine.totals[gpu] for gpu in self.gpus)
        return true.takes(int((self._size.share or 0.0) * (total - true.hidden)))

    # -- its sleep and its health -----------------------------------------------------------------------------------

    async def awake(self) -> Literal[0, 1, 2]:
        if self._under_way is not None and not self.hung:
            await asyncio.wait((self._under_way,))
        await self.alive()
        return self.level

    async def busy(self) -> int:
        self._check()
        return self.requests

    async def alive(self) -> None:
        self._check()
        if self.hung:
            await self._takes(10.0)
            raise self._fails("EngineCore does not answer within 10 s")

    async def _by_core(self, work: Coroutine[None, None, None]) -> None:
        """EngineCore goes on with what it has begun, whoever has left meanwhile."""
        self._under_way = task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def sleep(self, level: Level) -> None:
        await self._by_core(self._sleep(level))

    async def _sleep(self, level: Level) -> None:
        while self.requests:  # mode=wait
            await self._takes(0.05)
        machine, model = self._machine, self._model
        with machine.alone(self.gpus, f"sleep of {self.pid}"):
            self.serves = False
            if machine.faults.strikes("hang_sleep"):
                await self._sticks()
            await self._takes(memory_stages.sleep_seconds(model.weights, level))
            if machine.faults.strikes("fail_sleep"):
                raise self._fails("/sleep: it answered 500")
            self.level = level
            self.sleeps += 1
            if level == 1:
                machine.host[self.pid] = int(model.pinned * model.weights * len(self.gpus))
            if not machine.faults.strikes("keep_asleep"):
                awake = machine.held[self.pid][self.gpus[0]] if self.gpus else 0
                true = model.true
                asleep = memory_stages.residue(self._size.claim) if true is None else true.asleep(self.sleeps)
                machine.take(self.pid, self.gpus, min(awake, asleep))

    async def wake(self, level: Level, told: EngineFacts) -> None:
        await self._by_core(self._wake(level))

    async def _wake(self, level: Level) -> None:
        machine, model = self._machine, self._model
        if machine.faults.strikes("hang_wake"):  # with all its memory, and not alone: others are woken beside it
            machine.take(self.pid, self.gpus, min(self._size.claim, machine.free(self.pid, self.gpus)))
            await self._sticks()
        with machine.alone(self.gpus, f"wake of {self.pid}"):
            self._check()
            self.woken_at = asyncio.get_running_loop().time()
            size = self._size.claim if model.true is None else self._true_size(model.true)
            if size > machine.free(self.pid, self.gpus):
                self.harmed = True
                self.kill("exit 1")
                raise failed(Shortage("wake_oom", line("wake_oom")))
            machine.take(self.pid, self.gpus, size)
            await self._takes(memory_stages.wake_seconds(model.weights, level))
            if machine.faults.strikes("fail_wake"):
                self.harmed = True
                raise EngineFailed("its answers are not what they were before it slept", wrong=level == 2)
            self.level = 0
            self.serves = True
            if not model.keeps_pinned:
                machine.host.pop(self.pid, None)

    # -- its end ----------------------------------------------------------------------------------------------------

    async def ended(self) -> str:
        await asyncio.wait((self.process,))
        return self.process.result()

    async def stop(self) -> None:
        if self.requests and self.alive_now and not (self.hung or self.harmed):
            now = asyncio.get_running_loop().time()
            self._machine.cut_off.append(f"{now:.1f} s: {self._tried.profile} is ended with {self.requests} calls")
        self.serves, self.ending = False, True
        asyncio.get_running_loop().call_later(EXIT, self.kill, "SIGTERM")
        await asyncio.wait((self.process,))

    async def leave(self) -> None:
        return


class _Start:
    """API of an engine that starts, as `readiness.ready` asks it: it is healthy once all stages are over."""

    served_name = "model"

    def __init__(self, stages: Callable[[], Coroutine[None, None, EngineFacts]]) -> None:
        self._stages = stages
        self.facts = EngineFacts()

    async def health(self) -> None:
        """Until it is; raises EngineFailed."""
        self.facts = await self._stages()

    async def models(self) -> dict[str, int]:
        """The names that it serves."""
        return {self.served_name: 0}

    async def warm_up(self, _prompt: str, _tokens: int) -> None:
        """Answered at once."""


class ResidentEngines:
    """Engines on one machine; `all` that ever were, for whoever wants to harm one; `profiles`: of the file in
    force. `models`: by the last part of their model_path."""

    def __init__(self, machine: Machine, models: Mapping[str, Model]) -> None:
        self.machine = machine
        self.models = dict(models)
        self.all: dict[str, ResidentEngine] = {}
        self.starts: list[tuple[float, str]] = []  # (when, profile)
        self.tried: list[TriedStart] = []
        self.profiles: Mapping[str, Profile] = {}

    def apply(self, config: SidecarConfig) -> None:
        self.profiles = config.models

    def model(self, profile: Profile) -> Model:
        return self.models[profile.model_path.rpartition("/")[2]]

    @property
    def sizing(self) -> ResidentEngines:
        return self

    async def size(
        self, name: str, total: int, present: int, measured: Measured | None, lesson: Lesson | None, *, unified: bool
    ) -> Size:
        model = self.model(self.profiles[name])
        if model.broken:
            raise Unusable(model.broken)
        if model.claim > total and not (total and model.own_context):
            raise Unusable(f"needs {model.claim} bytes, the GPU has {total}")
        lesson = lesson or NOTHING_LEARNT
        if model.true is not None:
            return estimated(model.weights, model.claim, total, lesson, model.context, model.own_context)
        residue = memory_stages.residue(model.claim)
        beyond = max(0, min(lesson.beyond, total * MOST // 1000 - model.claim))
        claim = model.claim + beyond
        return Size(
            claim=claim,
            start_needs=claim,
            residue=residue,
            host=model.weights,
            pools=model.pools,
            beyond=beyond,
            arithmetic="sim",
        )

    def settings(self, profile: str, config: SidecarConfig | None = None) -> str:
        given = (self.profiles if config is None else config.models)[profile]
        model = msgspec.structs.replace(self.model(given), true=None)
        where = given.model_path, given.gpus, given.tensor_parallel
        return msgspec.json.encode((model, where, given.flags, given.context_length, given.sleeps is None)).decode()

    async def start(self, profile: str, gpus: tuple[int, ...], size: Size) -> ResidentEngine:
        self.starts.append((asyncio.get_running_loop().time(), profile))
        tried = TriedStart(asyncio.get_running_loop().time(), profile, gpus, size, self.machine.free(0, gpus))
        self.tried.append(tried)
        model, settings = self.model(self.profiles[profile]), self.settings(profile)
        self.machine.begins(profile, gpus, size.start_needs)
        engine = ResidentEngine(self.machine, model, next(self.machine.pids), tried, settings, self.profiles[profile])
        self.all[profile] = engine
        return engine

    async def adopt(self, profile: str, record: EngineRecord) -> ResidentEngine:
        engine = self.all.get(profile)
        if engine is None or engine.pid != record.process.pid or not engine.alive_now:
            raise EngineFailed("there is no such process any more")
        if engine.ending:
            await engine.stop()
            raise EngineFailed("it does not answer")
        return engine

    async def sweep(self, keep: Collection[str]) -> None:
        for engine in self.all.values():
            if f"sim/{engine.pid}" not in keep:
                engine.kill("swept")

    def kv_bytes(self, name: str, told: EngineFacts) -> int | None:
        return None
