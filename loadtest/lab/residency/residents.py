"""Engines and GPU memory for the sidecar's manager without a process: for virtual time, hence for its figures and laws.

What a real engine takes seconds for is `asyncio.sleep` here, by the numbers of the simulated engine; its memory is a
number on a GPU. Everything that goes wrong on a machine can be made to go wrong: see `MachineFaults`. vLLM does not
forgive two engines of one GPU that start, sleep or wake at once: `Machine.overlaps` has these.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from itertools import count
from typing import Literal, NoReturn

import msgspec

from loadtest.engine import memory_stages
from loadtest.lab.residency.true_memory import TrueMemory, estimated
from sidecar.core.addresses import EngineAddress
from sidecar.core.diagnosis import diagnosis
from sidecar.core.engine_records import EngineFacts, EngineFailed, EngineRecord, Level, ProcessRecord, Unusable
from sidecar.core.gpus import GPU, GPUError
from sidecar.core.inventory import Size
from sidecar.core.lesson import FailedStart, Lesson, learn
from sidecar.core.measured import Measured
from sidecar.sizing.taught import NOTHING_LEARNT

EXIT = 0.5  # seconds from SIGTERM to the end


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a profile's engine: `weights` and `claim` in bytes on each GPU. `broken`: why it cannot be run.
    `true`: what it really takes, where `claim` is but the estimate."""

    weights: int
    claim: int
    broken: str = ""
    true: TrueMemory | None = None


class MachineFaults(msgspec.Struct):
    """Faults of a machine, to be changed at any time. `fail_start`, `fail_wake`, `fail_sleep`: so many of the
    next fail; `keep_asleep`: so many fall asleep and give nothing back; `oom`: so many starts run out of memory;
    `changed`: so many find memory that another gave back meanwhile;
    `kept`: seconds for which ended engines' memory stays taken; `driver`: why the GPUs cannot be read; `slow`:
    seconds that reading them takes."""

    fail_start: int = 0
    fail_wake: int = 0
    fail_sleep: int = 0
    keep_asleep: int = 0
    oom: int = 0
    changed: int = 0
    kept: float = 0.0
    driver: str = ""
    slow: float = 0.0


class Machine:
    """GPUs of these many bytes; `held` by whom, a number that stands for a process."""

    def __init__(self, *totals: int) -> None:
        self.totals = totals
        self.held: dict[int, dict[int, int]] = {}
        self.faults = MachineFaults()
        self.doing: dict[int, str] = {}  # GPU -> what is done there
        self.overlaps: list[str] = []

    async def sample(self) -> tuple[GPU, ...]:
        """As Sampler.sample."""
        await asyncio.sleep(self.faults.slow)
        if self.faults.driver:
            raise GPUError(self.faults.driver)
        return tuple(self._gpu(index) for index in range(len(self.totals)))

    def _gpu(self, index: int) -> GPU:
        processes = {pid: held[index] for pid, held in self.held.items() if index in held}
        used = sum(processes.values())
        return GPU(
            index=index, total=self.totals[index], used=used, free=self.totals[index] - used, processes=processes
        )

    @contextlib.contextmanager
    def alone(self, gpus: Collection[int], what: str) -> Iterator[None]:
        """Something that has to have these GPUs to itself."""
        self.overlaps += [f"{what} while {self.doing[gpu]} on GPU {gpu}" for gpu in gpus if gpu in self.doing]
        self.doing |= dict.fromkeys(gpus, what)
        try:
            yield
        finally:
            for gpu in gpus:
                self.doing.pop(gpu, None)

    def take(self, pid: int, gpus: Collection[int], size: int) -> None:
        """It holds so much on each of these from now on. Raises EngineFailed where there is too little."""
        before = self.held.get(pid, {})
        for gpu in gpus:
            free = self._gpu(gpu).free + before.get(gpu, 0)
            if size > free:
                raise EngineFailed(f"CUDA out of memory: {size} asked for, {free} free", out_of_memory=True)
        self.held[pid] = dict.fromkeys(gpus, size)

    def free(self, pid: int, gpus: Collection[int]) -> int:
        """Bytes free on each of these, with what it holds there itself."""
        before = self.held.get(pid, {})
        return min(self._gpu(gpu).free + before.get(gpu, 0) for gpu in gpus)

    def release(self, pid: int) -> None:
        """Its end, or the end of the time for which its memory stays taken."""
        if self.faults.kept:
            asyncio.get_running_loop().call_later(self.faults.kept, self.held.pop, pid, None)
        else:
            self.held.pop(pid, None)


class TriedStart(msgspec.Struct):
    """A start: when, of which profile, where and of what size; `failed`: the kind of failure, if it did."""

    at: float
    profile: str
    gpus: tuple[int, ...]
    size: Size
    failed: str = ""


class ResidentEngine:
    """effects.Engine. `requests`: what runs in it; `hung`: it answers nothing; `serves`: a call sent to it now would be
    answered; `process` is done when it has ended."""

    def __init__(self, machine: Machine, model: Model, pid: int, tried: TriedStart, settings: str) -> None:
        self.pid = pid
        self.gpus = tried.gpus
        self.url = f"http://127.0.0.1:{pid}"
        self.requests = 0
        self.hung = False
        self.serves = False
        self.woken_at = -math.inf  # when it was last asked to wake
        self.waking = 0.0  # seconds that it has woken up for, all together
        self.level: Literal[0, 1, 2] = 0
        self._machine = machine
        self._model = model
        self._size = tried.size
        self._tried = tried
        self._settings = settings
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

    def lines(self, most: int) -> list[str]:
        return [f"engine {self.pid}"][:most]

    @property
    def alive_now(self) -> bool:
        return not self.process.done()

    def kill(self, how: str = "SIGKILL") -> None:
        """Its process ends, as if by itself."""
        if self.alive_now:
            self.serves = False
            self.process.set_result(how)
            self._machine.release(self.pid)

    def _check(self) -> None:
        if not self.alive_now:
            raise EngineFailed(f"its process ended: {self.process.result()}")

    async def _takes(self, seconds: float) -> None:
        await asyncio.wait((self.process,), timeout=seconds)
        self._check()

    async def ready(self) -> EngineFacts:
        with self._machine.alone(self.gpus, f"start of {self.pid}"):
            return await self._started()

    async def _started(self) -> EngineFacts:
        faults = self._machine.faults
        for stage in memory_stages.start(self._model.weights, self._size.claim):
            if stage.loaded is not None:
                size = memory_stages.held(self._model.weights, self._size.claim, loaded=stage.loaded, cache=stage.cache)
                if faults.oom:
                    faults.oom -= 1
                    self._fails("torch.OutOfMemoryError: CUDA out of memory.")
                if faults.changed:
                    faults.changed -= 1
                    self._fails(
                        "AssertionError: Error in memory profiling. Initial free memory 20.0 GiB, current free "
                        "memory 21.0 GiB."
                    )
                self._takes_memory(size, cache=stage.cache)
            await self._takes(stage.seconds)
        if faults.fail_start:
            faults.fail_start -= 1
            self.kill("exit 1")
            raise EngineFailed("ValueError: it was made to fail")
        self.serves = True
        return EngineFacts(kv_tokens=100_000, context_length=8192)

    def _fails(self, line: str) -> NoReturn:
        """It writes this, and ends."""
        self.kill("exit 1")
        found = diagnosis([line])
        self._tried.failed = found.kind
        raise EngineFailed(line, out_of_memory=found.out_of_memory, found=found)

    def _takes_memory(self, size: int, *, cache: bool) -> None:
        """It holds so much while it loads, and all that it ever will with its KV cache."""
        true, machine = self._model.true, self._machine
        if true is None:
            machine.take(self.pid, self.gpus, size)
            return
        total = min(machine.totals[gpu] for gpu in self.gpus)
        free = machine.free(self.pid, self.gpus)
        line = true.complaint(self._size, free, total)
        if line and (cache or "Free memory" in line):
            self._fails(line)
        size = true.takes(self._size) if cache else min(size, true.rest)
        if size > free:
            tried = f"Tried to allocate {(size - free) / memory_stages.GIB + 0.5:.2f} GiB"
            self._fails(
                f"torch.OutOfMemoryError: CUDA out of memory. {tried}. GPU 0 has a total capacity of "
                f"{(total - true.hidden) / memory_stages.GIB:.2f} GiB of which 0.50 GiB is free."
            )
        machine.take(self.pid, self.gpus, size)

    async def awake(self) -> Literal[0, 1, 2]:
        self._check()
        return self.level

    async def busy(self) -> int:
        self._check()
        return self.requests

    async def alive(self) -> None:
        self._check()
        if self.hung:
            await self._takes(10.0)
            raise EngineFailed("EngineCore does not answer within 10 s")

    async def sleep(self, level: Level) -> None:
        while self.requests:  # mode=wait
            await self._takes(0.05)
        faults = self._machine.faults
        with self._machine.alone(self.gpus, f"sleep of {self.pid}"):
            self.serves = False
            await self._takes(memory_stages.sleep_seconds(self._model.weights, level))
            if faults.fail_sleep:
                faults.fail_sleep -= 1
                raise EngineFailed("/sleep: it answered 500")
            self.level = level
            if faults.keep_asleep:
                faults.keep_asleep -= 1
            else:
                self._machine.take(self.pid, self.gpus, memory_stages.residue(self._size.claim))

    async def wake(self, level: Level, told: EngineFacts) -> None:
        with self._machine.alone(self.gpus, f"wake of {self.pid}"):
            self._check()
            self.woken_at = began = asyncio.get_running_loop().time()
            true = self._model.true
            self._machine.take(self.pid, self.gpus, self._size.claim if true is None else true.takes(self._size))
            await self._takes(memory_stages.wake_seconds(self._model.weights, level))
            if self._machine.faults.fail_wake:
                self._machine.faults.fail_wake -= 1
                raise EngineFailed("its answers are not what they were before it slept")
            self.level = 0
            self.serves = True
            self.waking += asyncio.get_running_loop().time() - began

    async def ended(self) -> str:
        await asyncio.wait((self.process,))
        return self.process.result()

    async def stop(self) -> None:
        self.serves = False
        if self.alive_now:
            await asyncio.wait((self.process,), timeout=EXIT)
            self.kill("SIGTERM")

    async def leave(self) -> None:
        return


class ResidentEngines:
    """effects.Engines on one machine; `all` that ever were, for whoever wants to harm one."""

    def __init__(self, machine: Machine, models: Mapping[str, Model]) -> None:
        self.machine = machine
        self.models = dict(models)
        self.all: dict[str, ResidentEngine] = {}
        self.starts: list[tuple[float, str]] = []  # (when, profile)
        self.tried: list[TriedStart] = []
        self.lessons: Mapping[str, Lesson] = {}
        self._pids = count(1000)

    async def size(self, profile: str, total: int, present: int) -> Size:
        model = self.models[profile]
        if model.broken:
            raise Unusable(model.broken)
        if model.claim > total:
            raise Unusable(f"needs {model.claim} bytes, the GPU has {total}")
        lesson = self.lessons.get(profile)
        if lesson is None or lesson.settings != self.settings(profile):
            lesson = NOTHING_LEARNT
        if model.true is not None:
            return estimated(model.weights, model.claim, total, lesson)
        residue = memory_stages.residue(model.claim)
        beyond = min(lesson.beyond, total - model.claim)
        claim = model.claim + beyond
        return Size(
            claim=claim, start_needs=claim, residue=residue, host=model.weights, beyond=beyond, arithmetic="sim"
        )

    def settings(self, profile: str) -> str:
        return msgspec.json.encode(msgspec.structs.replace(self.models[profile], true=None)).decode()

    def lesson(self, profile: str, failed: FailedStart) -> Lesson | None:
        return learn(self.lessons.get(profile), failed, self.settings(profile))

    async def start(self, profile: str, gpus: tuple[int, ...], size: Size) -> ResidentEngine:
        self.starts.append((asyncio.get_running_loop().time(), profile))
        tried = TriedStart(asyncio.get_running_loop().time(), profile, gpus, size)
        self.tried.append(tried)
        engine = ResidentEngine(self.machine, self.models[profile], next(self._pids), tried, self.settings(profile))
        self.all[profile] = engine
        return engine

    async def adopt(self, profile: str, record: EngineRecord) -> ResidentEngine:
        engine = self.all.get(profile)
        if engine is None or engine.pid != record.process.pid or not engine.alive_now:
            raise EngineFailed("there is no such process any more")
        return engine

    async def sweep(self, keep: Collection[str]) -> None:
        for engine in self.all.values():
            if f"sim/{engine.pid}" not in keep:
                engine.kill("swept")

    def measurement(
        self, profile: str, told: EngineFacts, *, peak: int, settled: int, asleep: int | None = None
    ) -> Measured | None:
        return None
