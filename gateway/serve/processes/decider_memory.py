"""Memory of one gateway's deciders, in a file of its parent's folder: what one must know of an earlier one's time.

Relays of a gateway that was taken over are no children of this parent, so nobody else would tell a new decider to wait
for what they hold. Totals of relays that have ended are told by nobody either. Nor is what a decider has learned: that
is in a file of its own, which changes each second.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gateway.decider.relays.totals import LeftRelay


class DeciderMemory(msgspec.Struct):
    """`relays`: processes of relays that came from another gateway, by number. `left`: totals of relays that have
    ended."""

    relays: dict[int, int] = {}
    left: list[LeftRelay] = []


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
