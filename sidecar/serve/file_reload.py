"""Reload of the sidecar's file while it runs: on a save and on SIGHUP.

The file is checked as a whole before anything changes. One with mistakes changes nothing: they are told in the log, in
`sidecar status` and by a metric until the file is good again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from gateway.shared.files.file_status import FileStatus
from gateway.shared.watched_file import Read, WatchedFile
from sidecar.core.config import SidecarConfig
from sidecar.core.reload import LATER, Changes, newer
from sidecar.residency.manager import Manager
from sidecar.serve.assembly import host_memory
from sidecar.serve.operator_log import say


class FileReload:
    """Reloads of the file at `path`. `started`: the config with which the sidecar was started, with `gateway` beside
    the file's gateways. Raises what reading raises, because the file may have changed since."""

    def __init__(self, path: Path, started: SidecarConfig, gateway: str | None, manager: Manager) -> None:
        self.last: Changes = {}
        self._started = started
        self._gateway = gateway
        self._manager = manager
        self._path = path
        self._folder = str(path.absolute().parent.resolve())
        self._watched = WatchedFile(path, self._load, _say, name="file")
        self._first = self._watched.first()
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
        if self._first[1] != self._started:
            self._apply(self._first)
        self._watched.start(self._apply)

    def _load(self, read: Read) -> tuple[SidecarConfig, SidecarConfig]:
        file, taken = newer(read(self._path), str(self._path), self._started, self._folder)
        beside = self._gateway
        if beside is not None and beside not in file.gateways:
            file = msgspec.structs.replace(file, gateways=(*file.gateways, beside))
        return file, taken

    def _apply(self, loaded: tuple[SidecarConfig, SidecarConfig]) -> None:
        file, taken = loaded
        self.last = self._manager.file.take(file, taken, host_memory(taken))
        for kind, names in self.last.items():
            if names:
                say(f"file: {kind}: {', '.join(names)}")
        if not any(self.last.values()):
            say("file: no model has changed")


def _say(text: str) -> None:
    for line in text.splitlines():
        say(line)
