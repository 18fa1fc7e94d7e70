"""Copies: one engine more of a model whose calls wait longer than that engine would take to get ready.

A copy is another profile of the same model: on the same machine, on another, or on another node. It is wanted once a
class's predicted wait has been longer than the copy's `copy_in` and a margin, for some seconds without a break. Whether
there is a place for it that no warmer model would lose is its sidecar's to say, by `copy_in`. The wish goes to the
sidecar with the answers to its reports, and stays there as long as it is repeated: no order is sent.

    considered -> wanted -> begun -> awake
                    |         |
                    |         +-> failed: it did not get ready, or not within twice its time
                    +-> withdrawn: calls wait no longer; or failed: not begun within BEGINS, or its sidecar is silent

There is no flapping: one copy of a model at a time is on its way, also if another gateway wants it. After one is awake
nothing is wanted for SETTLES, in which calls spread over it. The same profile is not wanted again within APART, and
after failures within a rest that doubles. The model goes on with the engines that it has.

Synchronous, no I/O; `now` is monotonic seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from gateway.core.sidecars.sidecar import Sidecar, awake, beginning

SAME = 0.5  # seconds: profiles that are ready within this time of each other count as equal
SETTLES = 10.0  # seconds: the drain rate is averaged over half of that
APART = 30.0  # seconds
BEGINS = 10.0  # seconds: the sidecar hears of a wish with its next report, and waits for operations on its GPUs
PATIENCE = 30.0  # seconds that a copy may take beyond what was foretold, or as long again where that is more
LASTING = 1.5  # times the margin: how long a wait must be too long, or short enough again, without a break
FIRST_REST, LAST_REST = 30.0, 600.0  # seconds after failures

Place = tuple[str, str]  # sidecar and profile
Holders = Sequence[tuple[Sidecar, str]]
Result = Literal["asked", "woken", "withdrawn", "failed"]


class LongWait(msgspec.Struct, frozen=True):
    """Predicted seconds until the last call of a class starts; `refused`: until calls that were refused may come, or
    for which such calls have been refused. `adapter`: the calls are for this adapter of the model."""

    class_name: str
    seconds: float
    refused: bool = False
    adapter: str = ""


class CopyWish(msgspec.Struct):
    """Wish of one model for a copy. `since`: when its waits became too long; None: they are not. `place`: the copy that
    is wanted, or on its way. `own`: this gateway wanted that copy. `rests_until`: no copy is wanted before then."""

    since: float | None = None
    place: Place | None = None
    own: bool = True
    wait: LongWait | None = None
    asked_at: float = 0.0
    begun: bool = False
    ready_in: float = 0.0
    short_since: float | None = None
    rests_until: float = -math.inf


class Copies:
    """The wishes of one gateway. `margin`: seconds by which a wait must exceed a copy's start; None: copies are never
    wanted. `wishes`: by model. `counts`: by result and reason, of the copies that were wanted."""

    def __init__(self) -> None:
        self.margin: float | None = None
        self.wishes: dict[str, CopyWish] = {}
        self.counts: Counter[tuple[Result, str]] = Counter()
        self._failures: dict[Place, int] = {}  # in a row
        self._rests: dict[Place, float] = {}  # until when it is not wanted

    def place(self, model: str) -> Place | None:
        """The sidecar and profile that are to have a copy of the model ready, by this gateway's wish."""
        wish = self.wishes.get(model)
        return None if wish is None or not wish.own else wish.place

    def step(self, model: str, holders: Holders, longest_wait: Callable[[str], LongWait | None], now: float) -> str:
        """Consider a model at `now`. `longest_wait`: the longest of the classes of calls that name this model, or an
        adapter; None where no call waits or no engine serves it. Returns a line for the operator; empty: nothing has
        changed."""
        wait = _longest(model, holders, longest_wait)
        wish = self.wishes.get(model)
        if wish is None:
            if wait is None or self.margin is None:
                return ""
            wish = self.wishes[model] = CopyWish()
        if wish.place is not None:
            line = self._follow(wish, model, wish.place, holders, wait, now)
        else:
            line = self._consider(wish, model, holders, wait, now)
        if wish.place is None and wish.since is None and now >= wish.rests_until:
            del self.wishes[model]
        return line

    def forget(self) -> None:
        """Drop all wishes, with the sidecars."""
        self.wishes.clear()
        self._failures.clear()
        self._rests.clear()

    # -- no copy is on its way ----------------------------------------------------------------------------------

    def _consider(self, wish: CopyWish, model: str, holders: Holders, wait: LongWait | None, now: float) -> str:
        margin, best = self.margin, self._best(holders, "" if wait is None else wait.adapter, now)
        if margin is None or wait is None or best is None or wait.seconds <= best[0] + margin:
            wish.since = None
            return ""
        wish.since = now if wish.since is None else wish.since
        if now < max(wish.since + LASTING * margin, wish.rests_until):
            return ""
        ready_in, place = best
        coming = next(
            ((s, p) for s, p in holders if not s.stale(now) and beginning(s.models[p]) and not awake(s.models[p])), None
        )
        wish.wait, wish.asked_at, wish.short_since, wish.own = wait, now, None, coming is None
        wish.begun = coming is not None
        if coming is not None:  # another gateway's copy
            wish.place = (coming[0].report.sidecar, coming[1])
            wish.ready_in = coming[0].models[coming[1]].ready_in or 0.0
            return ""
        wish.place, wish.ready_in = place, ready_in
        self._prune(now)
        self._rests[place] = now + APART
        self._count(wish, "asked")
        waits = "would wait" if wait.refused else "wait"
        return (
            f"{model}: calls of class {wait.class_name} {waits} {wait.seconds:.1f} s, and sidecar {place[0]} can have "
            f"{place[1]} ready in {ready_in:.1f} s: it is wanted as a copy"
        )

    def _prune(self, now: float) -> None:
        """Forget rests that are long over, and the failures that led to them."""
        self._rests = {place: until for place, until in self._rests.items() if now < until + LAST_REST}
        self._failures = {place: count for place, count in self._failures.items() if place in self._rests}

    def _best(self, holders: Holders, adapter: str, now: float) -> tuple[float, Place] | None:
        """The copy, with this adapter if any, that can be ready soonest, and in how many seconds; None: there is
        none."""
        found = []
        for sidecar, profile in holders:
            report, place = sidecar.models[profile], (sidecar.report.sidecar, profile)
            ready_in = report.copy_in
            if adapter and adapter not in report.adapters:
                continue
            if ready_in is not None and not sidecar.stale(now) and now >= self._rests.get(place, -math.inf):
                found.append(((ready_in // SAME, sidecar.load, place), ready_in))
        if not found:
            return None
        (_, _, place), ready_in = min(found)
        return ready_in, place

    # -- one is on its way --------------------------------------------------------------------------------------

    def _follow(
        self, wish: CopyWish, model: str, place: Place, holders: Holders, wait: LongWait | None, now: float
    ) -> str:
        sidecar = next((s for s, p in holders if (s.report.sidecar, p) == place and not s.stale(now)), None)
        if sidecar is None:
            return self._failed(wish, model, place, "its sidecar is silent", now)
        report = sidecar.models[place[1]]
        if awake(report):
            self._failures.pop(place, None)
            return self._over(wish, "woken", now, f"{model}: the copy {place[1]} of sidecar {place[0]} is awake")
        if beginning(report):
            if not wish.begun:
                wish.begun, wish.asked_at = True, now
            if now >= wish.asked_at + wish.ready_in + max(PATIENCE, wish.ready_in):
                return self._failed(wish, model, place, "it takes too long", now)
            return ""
        if wish.begun:
            return self._failed(wish, model, place, report.last_error or "it did not get ready", now)
        margin = self.margin
        if margin is None:
            return self._over(wish, "withdrawn", now, f"{model}: no copies are wanted any more")
        if wait is not None and wait.seconds > wish.ready_in + margin:
            wish.short_since = None
        else:
            wish.short_since = now if wish.short_since is None else wish.short_since
            if now >= wish.short_since + LASTING * margin:
                return self._over(wish, "withdrawn", now, f"{model}: no copy is wanted, calls wait no longer")
        if now >= wish.asked_at + BEGINS:
            return self._failed(wish, model, place, "it was not begun", now)
        return ""

    def _failed(self, wish: CopyWish, model: str, place: Place, why: str, now: float) -> str:
        failures = self._failures[place] = self._failures.get(place, 0) + 1
        rest = min(LAST_REST, FIRST_REST * 2.0 ** (min(failures, 10) - 1))
        self._rests[place] = now + rest
        line = f"{model}: no copy {place[1]} of sidecar {place[0]} ({why}); it is not wanted for {rest:.0f} s"
        return self._over(wish, "failed", now, line)

    def _over(self, wish: CopyWish, result: Result, now: float, line: str) -> str:
        if wish.own:
            self._count(wish, result)
        wish.place = wish.since = None
        wish.rests_until = now + SETTLES
        return line if wish.own else ""

    def _count(self, wish: CopyWish, result: Result) -> None:
        assert wish.wait is not None  # noqa: S101 # a place has one
        self.counts[result, "refused" if wish.wait.refused else "waiting"] += 1


def _longest(model: str, holders: Holders, longest_wait: Callable[[str], LongWait | None]) -> LongWait | None:
    """Longest wait of calls that name the model, or one of its adapters."""
    waits = [longest_wait(model)]
    for adapter in dict.fromkeys(name for sidecar, profile in holders for name in sidecar.models[profile].adapters):
        wait = longest_wait(adapter)
        waits.append(None if wait is None else msgspec.structs.replace(wait, adapter=adapter))
    return max(filter(None, waits), key=lambda wait: wait.seconds, default=None)
