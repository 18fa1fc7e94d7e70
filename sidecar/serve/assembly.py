"""Assembly of the objects that `sidecar serve` and the commands beside it share, from the file of one machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from gateway.shared.protocol import ModelReport
from sidecar.core.config import SidecarConfig
from sidecar.core.flags import SIMULATED_GPUS
from sidecar.core.gpus import GPUs
from sidecar.core.lifecycle import RUNNING
from sidecar.core.reload import on_gpu
from sidecar.gpus.monitor import GpuMonitor
from sidecar.gpus.nvml import MEMINFO, NVML, machine_memory
from sidecar.gpus.sampler import Sampler
from sidecar.gpus.simulated import SimulatedGPUs
from sidecar.process.engine import VllmEngines
from sidecar.relay.relay import Relay, RelayedEngine
from sidecar.residency.machine import Machine
from sidecar.residency.manager import Manager
from sidecar.residency.state_file import SavedState, StateFile
from sidecar.serve.operator_log import say

LIMIT = Path("/sys/fs/cgroup/memory.max")  # bytes or "max", as a container sees its own


def managed(
    config: SidecarConfig,
    folder: Path,
    sampler: Sampler,
    known: SavedState,
    state: StateFile,
    gpus_from: Path | None,
) -> Manager:
    """The manager of this machine's engines, not opened yet. `known`: what the state file said."""
    engines = engines_of(config, folder, gpus_from)
    monitor = GpuMonitor(sampler.sample if on_gpu(config) else None, say)
    bound = host_memory(config)
    return Manager(
        Machine(config, engines, monitor, state, known=known, host_memory=bound, clock=time.monotonic, say=say)
    )


def gpus_of(config: SidecarConfig, folder: Path | None) -> GPUs:
    """The GPUs that the sidecar may use: the machine's, or those that a folder simulates."""
    return NVML(config.gpus) if folder is None else SimulatedGPUs(folder, config.gpus)


def engines_of(config: SidecarConfig, folder: Path, gpus_from: Path | None = None) -> VllmEngines:
    """Factory of the engines of a file in `folder`; `gpus_from` simulates their GPUs, if any does."""
    simulated = {} if gpus_from is None else {SIMULATED_GPUS: str(gpus_from.resolve())}
    return VllmEngines(
        config,
        folder,
        sidecar=owner(config, folder),
        clock=time.monotonic,
        environment={**os.environ, **simulated},
        say=say,
    )


def relay_of(manager: Manager, token: str, leaving: Callable[[], bool]) -> Relay:
    """The relay to a manager's engines, which does not listen yet. `token`: the order token."""

    def engine(profile: str) -> RelayedEngine | None:
        found = manager.machine.running.get(profile)
        if found is None or profile not in manager.entries:
            return None
        return RelayedEngine(found.url, manager.entries[profile].lifecycle.state is RUNNING)

    def ensure(profile: str) -> ModelReport | None:
        return manager.orders.ensure(profile) if profile in manager.entries else None

    def log(profile: str, lines: int) -> list[str] | None:
        return manager.lines(profile, lines) if profile in manager.entries else None

    return Relay(token, engine=engine, ensure=ensure, log=log, leaving=leaving, say=say)


def sidecar_id(config: SidecarConfig) -> str:
    """The configured id, else this machine's name in the letters that an id may have."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()).lstrip("-._")[:64]
    return config.id or name or "sidecar"


def owner(config: SidecarConfig, folder: Path) -> str:
    """Mark of this sidecar's engines, so that they are found again, and ended where nothing else is
    known of them. The id alone would not do: two sidecars of one machine may both have its name, and would end each
    other's engines; they cannot share a state file."""
    state = hashlib.sha256(os.fsencode((folder / config.state_file).resolve())).hexdigest()
    return f"{sidecar_id(config)}-{state[:8]}"


def host_memory(config: SidecarConfig) -> int:
    """Bytes that models asleep at level 1 may fill; auto: half of what this process may use: of the machine's memory
    (MemTotal of /proc/meminfo), or of its control group's limit where that is less."""
    if config.host_memory_for_sleep != "auto":
        return config.host_memory_for_sleep
    found = machine_memory(MEMINFO)
    total = 0 if found is None else found.total
    with contextlib.suppress(OSError):
        limit = LIMIT.read_text().strip()
        total = min(total, int(limit)) if limit.isdecimal() else total
    return total // 2
