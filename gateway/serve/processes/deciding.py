"""Decider of several processes: its sockets, its parent, and what it leaves for the next process of its role."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from gateway.decider.checkpoint import Checkpoints
from gateway.decider.relays.totals import LeftRelay
from gateway.relay.wire.server import bound_sockets
from gateway.serve.processes.place import Beats, Place
from gateway.serve.saving import go_on_from
from gateway.serve.starting import Options, StartError
from gateway.serve.upgrade.receiver import InheritedSockets
from gateway.shared.control.http1 import bound_to
from gateway.shared.process_start import born

JOINED_WITHIN = 30.0  # seconds for the relays to be there at the first start


class DeciderMemory(msgspec.Struct):
    """Memory of one gateway's deciders: what one must know of an earlier one's time, since nobody else would tell it.
    The relays are no children of this parent."""

    relays: dict[int, int] = {}  # processes of relays that came from another gateway, by number
    born: dict[int, int] = {}  # when each process began: later its id may be another program's
    left: list[LeftRelay] = []  # totals of relays that have ended


class SavedCheckpoint(msgspec.Struct):
    """A checkpoint, and when it was taken: monotonic seconds of this machine."""

    at: float
    state: bytes


def read(file: Path) -> DeciderMemory:
    """Return the memory; an empty one if there is no file."""
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=DeciderMemory)
    except FileNotFoundError:
        return DeciderMemory()


def read_state(file: Path, now: float) -> tuple[bytes, float]:
    """The checkpoint of the decider before, and how many seconds old it is; b"": there is none."""
    try:
        found = file.read_bytes()
        kept = msgspec.msgpack.decode(found, type=SavedCheckpoint)
    except FileNotFoundError:
        return b"", 0.0
    except msgspec.MsgspecError:
        return found, 0.0  # nor is it a checkpoint: whoever restores it says so
    return kept.state, max(0.0, now - kept.at)


def write(file: Path, kept: DeciderMemory | SavedCheckpoint) -> None:
    """Raises OSError."""
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.msgpack.encode(kept))
    new.replace(file)


def sockets_of(
    options: Options, inherited: InheritedSockets, stack: ExitStack
) -> tuple[list[socket.socket], socket.socket]:
    """The listening sockets of data port and control port, until the stack ends. Raises StartError."""
    flag = f"--listen {options.listen}"
    try:
        data = [stack.enter_context(each) for each in inherited.data or bound_sockets(options.listen)]
        flag = f"--control {options.control}"
        control = stack.enter_context(inherited.control or bound_to(options.control))
    except OSError as error:
        raise StartError(f"{flag}: {error.strerror or error}") from error
    return data, control


class DeciderProcess:
    """A decider that is a process of its own: its place, its parent, and its files for the next one.

    `memory`: relays of a gateway that was taken over, and totals of relays that have ended.
    """

    def __init__(self, place: Place, beats: Beats) -> None:
        self.place = place
        self.beats = beats
        self._file = Path(place.path).with_name("kept")
        self._state = self._file.with_name("state")
        self.memory = read(self._file)
        taken = place.inherited.taken
        if not (place.first or self.memory.relays) and taken is not None and taken.understood:
            self.take(taken.relays)  # the decider before this one ended in the middle of taking over

    @property
    def expected(self) -> dict[int, int]:
        """Processes of the relays that live already, by number."""
        memory = self.memory
        there = {number: pid for number, pid in memory.relays.items() if born(pid) == memory.born.get(pid, 0)}
        return {**self.place.living, **there}

    def take(self, relays: Mapping[int, int]) -> None:
        """Remember relays of another gateway: processes by number."""
        self.memory.relays, self.memory.born = dict(relays), {pid: born(pid) for pid in relays.values()}

    def keep(self, left: list[LeftRelay]) -> None:
        """Write the memory, with these totals of relays that have ended. Raises OSError."""
        self.memory.left = left
        write(self._file, self.memory)

    def restore(self, checkpoints: Checkpoints) -> None:
        """Go on from the checkpoint of the process before."""
        go_on_from(checkpoints, *read_state(self._state, asyncio.get_running_loop().time()))

    async def save(self, state: bytes) -> None:
        """Keep a checkpoint. Raises OSError."""
        write(self._state, SavedCheckpoint(asyncio.get_running_loop().time(), state))
