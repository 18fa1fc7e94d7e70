"""Memory of one gateway's deciders, in a file of its parent's folder: what one must know of an earlier one's time.

Relays of a gateway that was taken over are no children of this parent, so nobody else would tell a new decider to wait
for what they hold. Totals of relays that have ended are told by nobody either.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gateway.decider.relays.totals import LeftRelay


class Kept(msgspec.Struct):
    """`relays`: processes of relays that came from another gateway, by number. `left`: totals of relays that have
    ended."""

    relays: dict[int, int] = {}
    left: list[LeftRelay] = []


def read(file: Path) -> Kept:
    """What is kept; nothing, before anything was."""
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=Kept)
    except FileNotFoundError:
        return Kept()


def write(file: Path, kept: Kept) -> None:
    """Raises OSError."""
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.msgpack.encode(kept))
    new.replace(file)
