"""Factory of engines (`machine.Engines`): real vLLM processes, each at an address of its own, by the sidecar's file.

The memory that a model takes is estimated in `sidecar.sizing`. One engine is vllm_engine.py.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from gateway.shared.protocol import SOCKETS_MARK
from sidecar.core.addresses import LOOPBACK, TRANSFER_PORTS, EngineAddress
from sidecar.core.arguments import command, environment
from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import EngineFailed, EngineRecord
from sidecar.core.inventory import Size
from sidecar.process.ports import AddressTaken, clear_socket, free_port
from sidecar.process.process import Process
from sidecar.process.process_family import end_orphans
from sidecar.process.start_evidence import download_folders
from sidecar.process.vllm_engine import FAILURES, VllmEngine
from sidecar.sizing.estimate import Sizing


class VllmEngines:
    """Engines of one sidecar.

    `folder`: what names in the file are relative to, and the working folder of engines. `sidecar`: the id of this
    machine's sidecar. `clock`: monotonic seconds. `environment`: the sidecar's own. `say` is told, in a line, what an
    operator should know.
    """

    def __init__(
        self,
        config: SidecarConfig,
        folder: Path,
        *,
        sidecar: str,
        clock: Callable[[], float],
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._folder, self._sidecar = config, folder, sidecar
        self._clock, self._environment, self._say = clock, environment, say
        self._logs = folder / config.log_dir
        self._pool = config.pool(str(folder.resolve()))
        self._taken: set[EngineAddress] = set()
        self.sizing = Sizing(config, folder, environment)

    def settings(self, profile: str, config: SidecarConfig | None = None) -> str:
        """A digest that changes when the profile's engine would be started otherwise. Raises KeyError.

        By the file alone: a sidecar that is started from another shell must be able to adopt its engines. Which port
        an engine has got does not count, nor the module that starts the engine.
        `config`: by that, not by the one in force.
        """
        config = config or self._config
        given, engine, served = config.models[profile], config.engine_of(profile), config.served_name(profile)
        told = (
            command(given, engine, served, EngineAddress(), own=sys.executable, to_compare=True),
            environment(given, engine, given.gpus or (), {}),
            (engine.device, self._pool.sockets or LOOPBACK),
        )
        return hashlib.sha256(msgspec.json.encode(told, order="sorted")).hexdigest()[:32]

    def apply(self, config: SidecarConfig) -> None:
        """Size and start engines by this config from now on."""
        self._config = config
        self.sizing.apply(config)

    # -- engines ----------------------------------------------------------------------------------------------------

    async def start(self, profile: str, gpus: tuple[int, ...], size: Size) -> VllmEngine:
        """Start its process; it is not ready yet. Raises EngineFailed, and KeyError."""
        given, engine = self._config.models[profile], self._config.engine_of(profile)
        with self._failing():
            address = self._free_address(profile)
            if given.kv_transfer is not None and engine.simulated is None:
                port = free_port(TRANSFER_PORTS, taken={each.transfer_port for each in self._taken})
                address = msgspec.structs.replace(address, transfer_port=port)
        self._taken.add(address)
        try:
            with self._failing():
                env = environment(given, engine, gpus, self._environment, address.transfer_port)
                self._make(self._logs, "engines' output is kept in memory alone")
                served = self._config.served_name(profile)
                argv = command(given, engine, served, address, own=sys.executable, size=size)
                process = Process.spawn(
                    argv,
                    env=env,
                    engine=f"{self._sidecar}/{profile}-{secrets.token_hex(8)}",
                    address=address,
                    log=self._logs / f"{profile}.log",
                    cwd=self._folder,
                )
        except BaseException:
            self._taken.discard(address)
            raise
        if process.output.error is not None:
            self._say(f"{profile}: {process.output.error}")
        record = EngineRecord(process=process.record, gpus=gpus, size=size, settings=self.settings(profile))
        return self._engine(profile, process, record, download_folders(given, self._folder, env))

    async def adopt(self, profile: str, record: EngineRecord) -> VllmEngine:
        """Take over what an earlier sidecar started, which may be of a profile that has changed or gone since: see its
        record's `settings`. Raises EngineFailed where there is nothing to take over; one that does not answer, or is
        not what the record says, is ended before that."""
        with self._failing():
            process = Process.adopt(record.process)
        self._taken.add(record.process.address)
        engine = self._engine(profile, process, record)
        if profile in self._config.models and record.settings == self.settings(profile):
            try:
                await engine.check()
            except EngineFailed:
                await engine.stop()
                raise
            except BaseException:
                await engine.leave()
                raise
        return engine

    async def sweep(self, keep: Collection[str]) -> None:
        """End what still runs of engines that were started by an earlier sidecar, but for these (`process.engine`)."""
        try:
            left = await end_orphans(self._sidecar, keep=keep)
        except OSError as error:
            self._say(f"what an earlier sidecar may have left cannot be looked for: {error}")
            return
        if left:
            self._say(f"processes that an earlier sidecar has left do not end: {', '.join(map(str, left))}")

    def _engine(self, profile: str, process: Process, record: EngineRecord, folders: Sequence[Path] = ()) -> VllmEngine:
        released = partial(self._taken.discard, record.process.address)
        return VllmEngine(
            process, record, profile, self._config.models.get(profile),
            folders=folders, clock=self._clock, say=self._say, released=released,
        )  # fmt: skip

    # -- where ------------------------------------------------------------------------------------------------------

    def _free_address(self, profile: str) -> EngineAddress:
        """Return an address that no engine has. Raises AddressTaken."""
        pool = self._pool
        if pool.sockets is None:
            taken = {address.port for address in self._taken if address.uds is None}
            return EngineAddress(port=free_port(pool.ports, taken=taken))
        address = msgspec.structs.replace(pool, sockets=self._sockets(Path(pool.sockets))).on_socket(profile)
        clear_socket(Path(str(address.uds)))
        return address

    def _sockets(self, folder: Path) -> str:
        """The folder of sockets, without links on the way there: made for this user alone, and with the mark by which
        gateways know it. Raises OSError, AddressTaken."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        seen = folder.stat()
        if seen.st_uid != os.geteuid():
            raise AddressTaken(f"{folder} belongs to another user: give engine_addresses a folder of this one's")
        if seen.st_mode & 0o027:
            self._say(f"{folder} is open to other users, so gateways do not send calls there: chmod 700 {folder}")
        (folder / SOCKETS_MARK).touch(mode=0o600)
        return str(folder)

    def _make(self, folder: Path, otherwise: str) -> None:
        try:
            folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            self._say(f"the folder {folder} cannot be made ({error.strerror}): {otherwise}")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            raise EngineFailed(str(error)) from error
