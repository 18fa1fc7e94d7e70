"""State file: the engines, measurements and times that a sidecar must know after a restart.

It is one small JSON file, replaced as a whole, so that a sidecar that is killed leaves the old one or the new one.
Losing it loses engines that could have been adopted, and measurements. So no trouble with it keeps a model from being
served: the trouble is said once, and its end once.

A lock on `PATH.lock` keeps two sidecars from sharing a file, as they would end each other's engines. The lock goes with
its process, however that ends.

Engines in a file from another machine, or in a copy of another sidecar's file, are not this sidecar's. Their process
numbers may be strangers' here. On the same machine they are the engines of the sidecar that the file was copied from,
which may run.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from gateway.shared.new_file import move
from gateway.shared.tasks import done_within
from gateway.shared.threads import in_thread
from sidecar.core.engine_records import EngineRecord
from sidecar.core.lesson import Lesson, Measured
from sidecar.core.sleep import MeasuredSleep
from sidecar.core.step_times import Times
from sidecar.process.process_family import boot_id

MAX_BYTES = 4 * 1024**2
MODE = 0o600
LATE = 10.0  # seconds for a write, after which it is said that the disk hangs
MACHINE_ID = Path("/etc/machine-id")  # machine-id(5): kept over starts of the machine; a container may have none
AGAIN = 10.0  # seconds until what could not be written is tried again

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Key = Annotated[str, msgspec.Meta(max_length=128)]


class StateError(ValueError):
    """A state file that cannot be read; says where and why."""


class Locked(Exception):
    """The state file is another sidecar's, or a folder, device or pipe; the message says which."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a state file: a digest of the machine's id, and the path that it was written to; empty: not known."""

    machine: _Key = ""
    path: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the state file; all but its first three fields by profile. A newer sidecar's fields are skipped."""

    version: Literal[1] = 1
    origin: Origin = Origin()
    key: _Key = ""  # that this sidecar's reports show; empty: it has none yet
    engines: dict[_Name, EngineRecord] = {}
    measured: dict[_Name, Measured] = {}
    lessons: dict[_Name, Lesson] = {}
    sleeps: dict[_Name, MeasuredSleep] = {}
    times: dict[_Name, Times] = {}
    off: tuple[_Name, ...] = ()  # profiles that an operator has switched off


def encode(state: SavedState) -> bytes:
    """The state file's bytes."""
    return msgspec.json.encode(state)


def decode(data: bytes) -> SavedState:
    """Decode a state file's bytes. Raises StateError."""
    if len(data) > MAX_BYTES:
        raise StateError(f"it has {len(data)} bytes, expected at most {MAX_BYTES}")
    try:
        return msgspec.json.decode(data, type=SavedState)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(str(error)) from None


def _trusted(seen: os.stat_result) -> None:
    """Check that nobody else may have written it, as its engines are ended or adopted. Raises StateError."""
    if seen.st_uid != os.geteuid():
        raise StateError(f"it belongs to user {seen.st_uid}, and this is user {os.geteuid()}")
    if seen.st_mode & 0o022:
        raise StateError(f"others may write it (mode {stat.S_IMODE(seen.st_mode):o}, expected {MODE:o})")


class StateFile:
    """The file at `path`: `lock`, `load`, then `save` whenever something changed; `flush` and `close` in the end.

    `say` is told, in a line, what goes wrong. `write`: how a file is replaced, in a thread. `error`: why the last save
    failed; empty: it did not.
    """

    def __init__(
        self, path: Path, say: Callable[[str], None], *, write: Callable[[Path, bytes], None] | None = None
    ) -> None:
        self.path = path
        self.error = ""
        self._say = say
        self._write_file = write or replace
        self._lock: int | None = None
        self._tried = asyncio.Event()  # whether the newest has been, with or without success
        self._tried.set()
        self._wanted: bytes | None = None  # the newest that is not on its way to the disk yet
        self._writer: asyncio.Task[None] | None = None

    def lock(self) -> None:
        """Keep every other sidecar from this file until `close`, or the end of this process. Raises Locked, also where
        the path is no plain file: a save would replace a device that all of the machine use."""
        if not_plain(self.path):
            raise Locked(f"{self.path} is no plain file: give this sidecar a state_file of its own")
        path = Path(f"{self.path}.lock")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
        except OSError as error:
            self._say(f"{path} cannot be made ({error.strerror}): nothing keeps a second sidecar from {self.path}")
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.write(fd, b"%d\n" % os.getpid())
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise Locked(
                f"{self.path} is in use by the sidecar with process id {holder}: stop that one, or give this one a "
                "state_file of its own"
            ) from None
        except OSError as error:  # no room for the number, or no locks on this file system
            self._say(f"{path}: {error.strerror}")
        self._lock = fd

    def read(self) -> SavedState:
        """The state that was saved last; empty without a file. Raises OSError, StateError."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold us up
        except FileNotFoundError:
            return SavedState()
        with open(fd, "rb") as file:
            _trusted(os.fstat(fd))
            return decode(file.read(MAX_BYTES + 1))

    def load(self) -> SavedState:
        """The state that was saved last; empty without a file, or with one that cannot be read. That one is moved
        aside, to PATH.bad, so that the next save does not destroy what a person may want to look at."""
        try:
            return self.read()
        except (OSError, StateError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        aside = Path(f"{self.path}.bad")
        try:
            self.path.replace(aside)
            where = f"it is now {aside}"
        except OSError as error:
            where = f"it could not be moved to {aside}: {error.strerror}"
        self._say(f"the state file {self.path} cannot be used, {where}; starting without it: {why}")
        return SavedState()

    def save(self, state: SavedState) -> None:
        """Have a thread replace the file. What is saved while it writes is written next, the newest alone; what could
        not be written is tried again."""
        self._wanted = encode(state)
        self._tried.clear()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def flush(self, within: float = LATE) -> bool:
        """Until what was saved is on the disk, or has failed to get there, but `within` seconds at most. Whether it is
        there."""
        await done_within(self._tried.wait(), within)
        return self._tried.is_set() and not self.error

    def close(self) -> None:
        """Write nothing more, and give the lock back."""
        if self._writer is not None:
            self._writer.cancel()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _write(self) -> None:
        while (data := self._wanted) is not None:
            self._wanted = None
            writing = asyncio.ensure_future(in_thread(self._write_file, self.path, data))
            if not (await asyncio.wait([writing], timeout=LATE))[0]:
                self._becomes(f"no answer from the disk for {LATE:g} s")
            try:
                await writing
            except OSError as error:
                self._becomes(error.strerror or str(error))
                if self._wanted is None:
                    self._tried.set()
                    await asyncio.sleep(AGAIN)
                    self._wanted = self._wanted or data
            else:
                self._becomes("")
        self._tried.set()

    def _becomes(self, error: str) -> None:
        if error and not self.error:
            self._say(f"the state file {self.path} cannot be written ({error}): a restart would not know its engines")
        elif self.error and not error:
            self._say(f"the state file {self.path} is written again")
        self.error = error


def not_plain(path: Path) -> bool:
    """Whether a folder, device or pipe stands where a state file should be."""
    return path.exists() and not path.is_file()


def replace(path: Path, data: bytes) -> None:
    """The whole file or none of it, also where the power fails. Raises OSError."""
    new = Path(f"{path}.new")
    try:
        # Removed first: what is there may be a link, or another's.
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        move(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


# -- origin -----------------------------------------------------------------------------------------------------------


def own_state(known: SavedState, path: Path, say: Callable[[str], None]) -> SavedState:
    """Return what the state file at `path` knows of this sidecar. `say` gets a line on everything that is left out.

    Of another sidecar's state only measurements and lessons stay, because they belong to the model and not to the
    machine. The key is dropped too, because gateways would take two sidecars with one key for one sidecar.
    """
    here = Origin(machine=machine(), path=os.path.realpath(path))
    why = _another(known.origin, here)
    if why:
        say(
            f"the state file {path} {why}: no engine in it is taken over or ended; what models were measured to take "
            "is kept"
        )
        return SavedState(origin=here, measured=known.measured, lessons=known.lessons, sleeps=known.sleeps)
    boot = boot_id() if known.engines else ""
    engines = {name: record for name, record in known.engines.items() if record.process.boot == boot}
    if gone := ", ".join(sorted(known.engines.keys() - engines.keys())):
        say(
            f"the state file {path} is from before the machine's last start, or from another machine: no engine of "
            f"that time is taken over or ended ({gone})"
        )
    return msgspec.structs.replace(known, origin=here, engines=engines)


def machine(file: Path = MACHINE_ID) -> str:
    """A digest of the machine's id, as machine-id(5) wants the id itself kept in confidence; empty: it has none."""
    try:
        found = file.read_bytes().strip()
    except OSError:
        return ""
    return hashlib.sha256(b"weir sidecar " + found).hexdigest()[:32] if found else ""


def _another(was: Origin, here: Origin) -> str:
    """The reason why a file is another sidecar's; empty: it is this one's, perhaps under a new name."""
    if "" not in {was.machine, here.machine} and was.machine != here.machine:
        return "was written on another machine"
    if was.path and os.path.realpath(was.path) != here.path and os.path.exists(was.path):
        return f"is a copy of {was.path}"
    return ""
