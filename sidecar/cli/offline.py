"""Commands without a sidecar that runs: a plan worked out here, and the end of engines that a sidecar left."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import EngineFailed, EngineRecord
from sidecar.gpus.sampler import Sampler
from sidecar.process.engine import VllmEngines
from sidecar.residency.state_file import SavedState, StateFile
from sidecar.serve.assembly import engines_of, gpus_of, managed
from sidecar.serve.operator_log import say
from sidecar.serve.state_origin import own_state


async def explained(config: SidecarConfig, folder: Path, profile: str, gpus_from: Path | None) -> tuple[str, bool]:
    """Explain what a sidecar that started now would do to run a profile, with the GPUs as they are. The second value
    says whether the profile can be run at all. Raises KeyError."""
    state = StateFile(folder / config.state_file, say)
    known = own_state(state.load(), state.path, say)
    sampler = Sampler(gpus_of(config, gpus_from))
    try:
        asked = SavedState(times=known.times, measured=known.measured, lessons=known.lessons)
        manager = managed(config, folder, sampler, asked, None, gpus_from, lambda _: None)
        await manager.open(only_look=True)
        told = manager.planner.explain(profile)
        unread = [manager.monitor.error] if manager.monitor.error and config.engine_of(profile).device == "gpu" else []
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
