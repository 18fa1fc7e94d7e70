"""GPU memory of one engine, as it starts, serves and sleeps: by its processes, or by the GPU's totals.

In a container NVML tells no processes, or those of the host by the host's numbers, among which an engine is never
found. There the growth of a GPU's use while the engine started stands for it. Bytes are per GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gateway.shared.files.units import GIB
from sidecar.core.gpus import GPU
from sidecar.core.lesson import MOST_BEYOND
from sidecar.core.lifecycle import START, WAKE
from sidecar.core.model_state import ModelState
from sidecar.gpus.monitor import GpuMonitor
from sidecar.residency.effects import Engine

MOST_TOLD = 3  # processes of others


class EngineMemory:
    """Memory of all engines of a sidecar. `running`: engines by profile. `blind`: NVML did not list a ready engine
    among its processes."""

    def __init__(self, monitor: GpuMonitor, running: Mapping[str, Engine]) -> None:
        self._monitor = monitor
        self._running = running
        self.blind = False
        self._told = False  # whether NVML has ever told a process of one of the engines
        self._grown: dict[str, dict[int, int]] = {}  # by how much each GPU's use grew while the engine started

    def starting(self, model: ModelState, before: Mapping[int, int], gpus: Iterable[GPU]) -> None:
        """Note the growth on its GPUs since `before`, the bytes used by GPU when it began to start."""
        self._grown[model.name] = {
            gpu.index: max(0, gpu.used - before.get(gpu.index, gpu.used)) for gpu in gpus if gpu.index in model.gpus
        }

    def ready(self, model: ModelState, engine: Engine, gpus: Sequence[GPU]) -> None:
        """Note whether NVML lists the processes of an engine that is ready, and so holds memory."""
        if model.gpus:
            self.blind = not any(self.seen(model, engine, gpus).values())

    def claim(self, model: ModelState, settled: int, before: Mapping[int, int]) -> int:
        """Return the claim in bytes of an engine that serves and holds `settled`. The claim includes bytes beyond the
        booked ones, because the engine gives them back when it ends. By the GPU's totals a neighbour's growth looks
        like the engine's own, so at most a fourth beyond the booked bytes is believed. If the GPUs cannot be read now,
        the claim is all of that, as far as it was free before the start: with less booked, the engine would not be
        evicted for a model that needs the whole GPU. `before`: bytes used by GPU when the engine began to start."""
        booked = model.size.claim
        most = booked + booked // MOST_BEYOND
        if self._monitor.error:
            free = [total - before.get(gpu, 0) for gpu, total in self._monitor.totals if gpu in model.gpus]
            return max(booked, min([most, *free])) if free else booked
        grown = max(self._grown.get(model.name, {}).values(), default=0) if self.blind else 0
        return max(booked, settled, min(grown, most))

    def adopted(self, model: ModelState, engine: Engine, gpus: Sequence[GPU]) -> None:
        """Note an engine that ran before this sidecar. The growth of its GPUs' use is unknown, so its claim (asleep:
        its residue) stands in, at most the bytes used."""
        most = model.size.residue if model.level else model.size.claim
        self._grown[model.name] = {gpu.index: min(most, gpu.used) for gpu in gpus if gpu.index in model.gpus}
        self.ready(model, engine, gpus)

    def woken(self, model: ModelState, before: Iterable[GPU], gpus: Iterable[GPU]) -> None:
        """Note the growth of an engine that woke: it was asleep at the reading `before`. An engine adopted asleep has
        no noted growth above its residue."""
        used, grown = {gpu.index: gpu.used for gpu in before}, self._grown.get(model.name, {})
        for gpu in gpus:
            if gpu.index in grown:
                asleep = min(grown[gpu.index], model.size.residue)
                awake = min(asleep + gpu.used - used.get(gpu.index, gpu.used), model.size.claim)
                grown[gpu.index] = max(grown[gpu.index], awake)

    def forget(self, model: ModelState) -> None:
        """Forget the growth of an engine that has ended."""
        self._grown.pop(model.name, None)

    def held(self, model: ModelState, engine: Engine, gpus: Sequence[GPU], *, alive: bool = False) -> dict[int, int]:
        """Bytes that it holds now, by GPU: by its processes, or, where these are not told (in a container), by what
        the GPU's use grew while it started. `alive`: it is known to be, so it holds something still."""
        held = self.seen(model, engine, gpus)
        own = [gpu for gpu in gpus if gpu.index in held]
        if any(held.values()) or not self._by_totals(own):
            return held
        grown = self._grown.get(model.name, {})
        most = model.size.residue if model.level else model.size.claim
        foreseen = {gpu.index: (min(grown.get(gpu.index, 0), most), gpu.used) for gpu in own}
        if alive:
            return {index: min(size, used) for index, (size, used) in foreseen.items()}
        return {index: size if size <= used else 0 for index, (size, used) in foreseen.items()}  # 0: it is back

    def _by_totals(self, gpus: Iterable[GPU]) -> bool:
        return not self._told or any(gpu.processes_hidden for gpu in gpus)

    def residue(
        self,
        model: ModelState,
        engine: Engine,
        before: Iterable[GPU],
        held: Mapping[int, int],
        gpus: Sequence[GPU],
    ) -> dict[int, int]:
        """Bytes that it has not given back, by GPU, of those that it `held` at the reading `before`. By totals a
        neighbour that ended meanwhile looks like its memory. All of them where a GPU cannot be read."""
        now = {gpu.index: gpu for gpu in gpus if gpu.readable}
        seen = self.seen(model, engine, gpus)
        if not any(seen.values()):
            used = {gpu.index: gpu.used for gpu in before}
            seen = {i: min(size, max(0, size - used[i] + now[i].used)) for i, size in held.items() if i in now}
        return {index: seen[index] if index in now else size for index, size in held.items()}

    async def given_back(self, engine: Engine, share: float, claim: int) -> bool:
        """Whether it holds no more than this share of its claim on any GPU, or does soon. Where NVML tells none of its
        processes, whatever is used there may be its own."""

        def most(gpu: GPU) -> int:
            return engine.held(gpu.processes) or gpu.used

        return not engine.gpus or await self._monitor.until(
            lambda gpus: all(most(gpu) <= share * claim for gpu in gpus if gpu.index in engine.gpus)
        )

    def seen(self, model: ModelState, engine: Engine, gpus: Iterable[GPU]) -> dict[int, int]:
        """Bytes that its processes hold by NVML, by GPU; 0 where NVML does not tell."""
        seen = {gpu.index: engine.held(gpu.processes) for gpu in gpus if gpu.index in model.gpus}
        self._told = self._told or any(seen.values())
        return seen

    def foreign(self, model: ModelState) -> str:
        """The processes that hold most of its GPUs and are no engine's of this sidecar, in words; empty: none told."""
        if self.blind:
            return ""  # our engines would be among them
        others = [
            (size, f"process {pid} holds {size / GIB:.1f} GiB of GPU {gpu.index}")
            for gpu in self._monitor.gpus
            for pid, size in gpu.processes.items()
            if gpu.index in model.gpus and size and not any(e.held({pid: size}) for e in self._running.values())
        ]
        return ", ".join(words for _, words in sorted(others, reverse=True)[:MOST_TOLD])

    def unseen(self, model: ModelState) -> int:
        """Bytes that it is taking and NVML does not show yet, on the GPU where that is most."""
        if model.lifecycle.pending not in (START, WAKE):
            return 0
        engine, target = self._running.get(model.name), model.size.claim
        if engine is None:
            return target
        return max((target - size for size in self.held(model, engine, self._monitor.gpus).values()), default=0)
