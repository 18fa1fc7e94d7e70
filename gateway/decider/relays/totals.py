"""Totals of all relays, those that have ended too: what `/metrics` adds up. Relays tell them when they are asked.

A relay tells its totals since its start, so to hear them again changes nothing. Those of relays that have left are
kept by their key (relay, epoch): one that comes again replaces them. So are those of an earlier decider's time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.core.call_counts import CallCounts
from gateway.frames.channel import Channel
from gateway.frames.messages import CountsAsk, RelayCounts
from gateway.shared.tasks import done_within

COUNTED_WITHIN = 0.5  # seconds for relays to tell their totals
MOST_LEFT = 64  # relays that have left; beyond them those that have ended are added up
ADDED_UP = (0, 0)  # the key of those: no relay has it
Key = tuple[int, int]
Name = TypeVar("Name", int, str)


class LeftRelay(msgspec.Struct, array_like=True):
    """Totals of a relay that has left, and its process."""

    relay: int
    epoch: int
    pid: int
    counts: RelayCounts


class RelayTotals:
    """`lives` tells whether there is a process of this id."""

    def __init__(self, lives: Callable[[int], bool]) -> None:
        self._lives = lives
        self._totals: dict[Key, RelayCounts] = {}
        self._left: dict[Key, int] = {}  # and its process
        self._unheard: set[Channel | None] = set()  # relays that were asked
        self._heard = asyncio.Event()  # all of them have told, or left

    def all(self) -> Sequence[RelayCounts]:
        return tuple(self._totals.values())

    @property
    def ended(self) -> int:
        """Calls that have ended."""
        return sum([counts.ended for counts in self._totals.values()])

    async def ask(self, relays: Iterable[Channel | None]) -> None:
        """Have these relays tell their totals; those that do not within COUNTED_WITHIN are left at their last."""
        self._unheard.update(asked := [relay for relay in relays if relay is not None])
        for relay in asked:
            relay.send(CountsAsk())
        if self._unheard:
            self._heard.clear()
            await done_within(self._heard.wait(), COUNTED_WITHIN)

    def heard(self, relay: Channel | None) -> None:
        """A relay has told its totals, or has left."""
        self._unheard.discard(relay)
        if not self._unheard:
            self._heard.set()

    def told(self, key: Key, counts: RelayCounts, relay: Channel | None = None) -> None:
        """A relay's totals of now."""
        self._totals[key] = counts
        self._left.pop(key, None)
        self.heard(relay)

    def leaves(self, key: Key, pid: int) -> None:
        """A relay has left: count no connections and bodies of the relay any more."""
        counts = self._totals.get(key)
        if counts is None:
            return
        self._totals[key] = msgspec.structs.replace(counts, connections=0, body_bytes=0, line_calls=0, batch_states={})
        self._left[key] = pid
        if len(self._left) > MOST_LEFT:
            self._add_up()

    def _add_up(self) -> None:
        for key in [key for key, pid in self._left.items() if key == ADDED_UP or not self._lives(pid)]:
            del self._left[key]
            counts = self._totals.pop(key)
            before = self._totals.get(ADDED_UP)
            self._totals[ADDED_UP] = counts if before is None else added(before, counts)
        if ADDED_UP in self._totals:
            self._left[ADDED_UP] = 0

    def left(self) -> list[LeftRelay]:
        """Return the totals of relays that have left, for another decider."""
        return [LeftRelay(*key, pid, self._totals[key]) for key, pid in self._left.items()]

    def given(self, pids: Mapping[int, int]) -> list[LeftRelay]:
        """Return the totals of all relays, whose processes are `pids`, for a gateway that takes over."""
        return [LeftRelay(*key, pids.get(key[0], 0), counts) for key, counts in self._totals.items()]

    def take(self, left: Iterable[LeftRelay]) -> None:
        """Take the totals of relays that had left an earlier decider."""
        for each in left:
            key = (each.relay, each.epoch)
            self._totals.setdefault(key, each.counts)
            self._left.setdefault(key, each.pid)


def added(one: RelayCounts, other: RelayCounts) -> RelayCounts:
    """The sum of two relays' totals."""
    calls = CallCounts()
    calls.add(one.calls)
    calls.add(other.calls)
    return msgspec.structs.replace(summed((one, other)), calls=calls.told())


def summed(counts: Sequence[RelayCounts]) -> RelayCounts:
    """The sum of these totals, without their calls."""
    sums: dict[str, Any] = {"calls": b""}
    for name in RelayCounts.__struct_fields__[1:]:
        found = [getattr(each, name) for each in counts]
        sums[name] = added_up(*found) if isinstance(found[0], dict) else sum(found)
    return RelayCounts(**sums)


def added_up(*counts: Mapping[Name, int]) -> dict[Name, int]:
    """Counts of several processes by name."""
    totals: dict[Name, int] = {}
    for each in counts:
        for name, count in each.items():
            totals[name] = totals.get(name, 0) + count
    return totals


def lives(pid: int) -> bool:
    """Whether there is such a process on this machine."""
    if pid <= 0:  # to the kernel that is a group
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True
