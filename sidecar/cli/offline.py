"""Commands without a sidecar that runs: a plan worked out here, and the end of engines that a sidecar left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import EngineFacts, EngineFailed, EngineRecord
from sidecar.core.inventory import Size
from sidecar.core.lesson import FailedStart, Lesson
from sidecar.core.measured import Measured
from sidecar.gpus.monitor import GpuMonitor
from sidecar.gpus.sampler import Sampler
from sidecar.process.engine import VllmEngines
from sidecar.residency.effects import Engine, Engines
from sidecar.residency.manager import Manager
from sidecar.residency.state_file import SavedState, StateFile
from sidecar.serve.assembly import engines_of, gpus_of, host_memory
from sidecar.serve.operator_log import say
from sidecar.serve.state_origin import own_state


class OnlySizes:
    """Engines of which only the sizes are asked (`effects.Engines`): nothing is started, taken over or ended."""

    def __init__(self, engines: VllmEngines) -> None:
        self._engines = engines

    async def size(self, profile: str, total: int, present: int, *, unified: bool = False) -> Size:
        """Return the memory that the profile's engine will take. Raises Unusable."""
        return await self._engines.size(profile, total, present, unified=unified)

    def settings(self, profile: str, config: SidecarConfig | None = None) -> str:
        """A digest of its profile."""
        return self._engines.settings(profile, config)

    def apply(self, config: SidecarConfig) -> None:
        """The file is read once."""

    async def start(self, profile: str, gpus: tuple[int, ...], size: Size) -> Engine:
        """Refused."""
        raise EngineFailed(f"{profile} on {gpus} ({size}): nothing is started to answer a question")

    async def adopt(self, profile: str, record: EngineRecord) -> Engine:
        """Refused."""
        raise EngineFailed(f"{profile} ({record.process.pid}): nothing is taken over to answer a question")

    async def sweep(self, keep: Collection[str]) -> None:
        """Nothing is ended."""

    def measurement(
        self, profile: str, told: EngineFacts, *, peak: int, settled: int, asleep: int | None = None
    ) -> Measured | None:
        """Nothing was seen."""
        return None

    def lesson(self, profile: str, failed: FailedStart) -> Lesson | None:
        """Nothing was started."""
        return None


async def explained(config: SidecarConfig, folder: Path, profile: str, gpus_from: Path | None) -> tuple[str, bool]:
    """Explain what a sidecar that started now would do to run a profile, with the GPUs as they are. The second value
    says whether the profile can be run at all. Raises KeyError."""
    state = StateFile(folder / config.state_file, say)
    known = own_state(state.load(), state.path, say)
    sampler = Sampler(gpus_of(config, gpus_from))
    try:
        on_gpus = any(config.engine_of(name).device == "gpu" for name in config.models)
        machine = GpuMonitor(sampler.sample if on_gpus else None, lambda _: None)
        only: Engines = OnlySizes(engines_of(config, folder, known))
        asked = SavedState(times=known.times, measured=known.measured, lessons=known.lessons)
        memory = host_memory(config)
        manager = Manager(
            config, only, machine, None, known=asked, host_memory=memory, clock=time.monotonic, say=lambda _: None
        )
        await manager.open()
        told = manager.planner.explain(profile)
        unread = [machine.error] if machine.error and config.engine_of(profile).device == "gpu" else []
        usable = not manager.entries[profile].unusable
    finally:
        await sampler.aclose()
        state.close()
    left = ", ".join(known.engines)
    others = [f"(no sidecar runs; its engines may still be there, and count as others' memory: {left})"] if left else []
    return "\n".join([told, *unread, *others]), usable


async def ended(config: SidecarConfig, folder: Path) -> list[str]:
    """End every engine that an earlier sidecar with this file has left running, and say which those were.

    Raises Locked where a sidecar runs after all.
    """
    state = StateFile(folder / config.state_file, say)
    state.lock()
    try:
        known = own_state(state.load(), state.path, say)
        engines = engines_of(config, folder, known)
        stopped = await asyncio.gather(*(_stop(engines, name, record) for name, record in known.engines.items()))
        await engines.sweep(())  # what could not be taken over, and what the state file does not know
        state.save(msgspec.structs.replace(known, engines={}))
        await state.flush()
    finally:
        state.close()
    return [name for name, was_there in zip(known.engines, stopped, strict=True) if was_there]


async def _stop(engines: VllmEngines, name: str, record: EngineRecord) -> bool:
    """Let it end as it would of itself; False: there was none, or it is left to the sweep."""
    with contextlib.suppress(EngineFailed, KeyError):
        engine = await engines.adopt(name, record)
        await engine.stop()
        return True
    return False
