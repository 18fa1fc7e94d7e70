"""End of the engines that a sidecar has left, where none runs."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import EngineFailed, EngineRecord
from sidecar.process.engine import VllmEngines
from sidecar.residency.state_file import StateFile
from sidecar.serve.assembly import engines_of
from sidecar.serve.operator_log import say
from sidecar.serve.state_origin import own_state


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
