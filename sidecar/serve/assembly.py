"""Assembly of the objects that `sidecar serve` and the commands beside it share, from the file of one machine.

The file is read again on a save and on SIGHUP, and checked as a whole before anything changes. One with mistakes
changes nothing: they are told in the log, in `sidecar status` and by a metric until the file is good again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from gateway.shared.command_line import Mistake
from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.file_status import FileStatus
from gateway.shared.protocol import ModelReport
from gateway.shared.tokens import AcceptedTokens
from gateway.shared.watched_file import Read, WatchedFile
from sidecar.control.client import SidecarTokens
from sidecar.control.named_files import ca_of, tokens_of
from sidecar.core.config import SidecarConfig
from sidecar.core.flags import SIMULATED_GPUS
from sidecar.core.gpus import GPUs
from sidecar.core.lifecycle import RUNNING
from sidecar.core.reload import LATER, Changes, newer, on_gpu
from sidecar.gpus.monitor import GpuMonitor, Sampler
from sidecar.gpus.nvml import MEMINFO, NVML, machine_memory
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


def relay_of(manager: Manager, tokens: AcceptedTokens, leaving: Callable[[], bool]) -> Relay:
    """The relay to a manager's engines, which does not listen yet. `tokens`: the order tokens."""

    def engine(profile: str) -> RelayedEngine | None:
        found = manager.machine.running.get(profile)
        if found is None or profile not in manager.entries:
            return None
        return RelayedEngine(found.url, manager.entries[profile].lifecycle.state is RUNNING)

    def ensure(profile: str) -> ModelReport | None:
        return manager.orders.ensure(profile) if profile in manager.entries else None

    def log(profile: str, lines: int) -> list[str] | None:
        return manager.lines(profile, lines) if profile in manager.entries else None

    return Relay(tokens, engine=engine, ensure=ensure, log=log, leaving=leaving, say=say)


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


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the files that the sidecar's file names. `ca`: authorities of gateways' certificates, in PEM; None:
    the system's."""

    tokens: SidecarTokens = SidecarTokens()
    ca: str | None = None


class FileReload:
    """Reloads of the file at `path`, and of the tokens and authorities that it names, which `apply` takes. `started`:
    the config with which the sidecar was started, with `gateway` beside the file's gateways. Raises what reading
    raises, because the files may have changed since."""

    def __init__(
        self,
        path: Path,
        started: SidecarConfig,
        gateway: str | None,
        manager: Manager,
        apply: Callable[[Secrets], None],
    ) -> None:
        self.last: Changes = {}
        self._started = started
        self._gateway = gateway
        self._manager = manager
        self._path = path
        self._folder = str(path.absolute().parent.resolve())
        failures = (InvalidFile, Mistake, OSError, ValueError)
        self._watched = WatchedFile(path, self._load, _say, failures=failures, name="file")
        self._first = self._watched.first()
        self._secrets = self._first[2]
        self._take_secrets = apply
        self.ask: Callable[[], None] = self._watched.ask
        self.aclose: Callable[[], Awaitable[None]] = self._watched.aclose

    @property
    def status(self) -> FileStatus:
        """Version of the file in use, and why a newer version cannot be used."""
        return self._watched.status

    @property
    def trouble(self) -> str:
        """Trouble with the file that an operator should know of; empty: none."""
        error = self.status.error
        if error is not None:
            return f"the file has mistakes and does not count, version {self.status.version} stays active: {error}"
        fields = ", ".join(self.last.get(LATER, ()))
        return f"the file has changes that count only once the sidecar is started again: {fields}" if fields else ""

    def start(self) -> None:
        """Watch it in the running loop."""
        self._take_secrets(self._secrets)
        if self._first[1] != self._started:
            self._apply(self._first)
        self._watched.start(self._apply)

    def _load(self, read: Read) -> tuple[SidecarConfig, SidecarConfig, Secrets]:
        file, taken = newer(read(self._path), str(self._path), self._started, self._folder)
        beside = self._gateway
        if beside is not None and beside not in file.gateways:
            file = msgspec.structs.replace(file, gateways=(*file.gateways, beside))
        tokens, ca = tokens_of(taken, self._path, read), ca_of(taken, self._path, read)
        return file, taken, Secrets(tokens=tokens, ca=ca)

    def _apply(self, loaded: tuple[SidecarConfig, SidecarConfig, Secrets]) -> None:
        file, taken, secrets = loaded
        if secrets != self._secrets:
            self._secrets = secrets
            self._take_secrets(secrets)
            say("file: the tokens or authorities that it names have changed")
        self.last = self._manager.file.take(file, taken, host_memory(taken))
        for kind, names in self.last.items():
            if names:
                say(f"file: {kind}: {', '.join(names)}")
        if not any(self.last.values()):
            say("file: no model has changed")


def _say(text: str) -> None:
    for line in text.splitlines():
        say(line)
