"""Scaling signal of one model: engines wanted, so that every class meets its target at the tokens offered now.

    wanted = work x offered / served / share, rounded up

Calls should fill `share` of what engines can do (`scaling` in the policy). `work` is the sum of its engines'
utilizations. `offered` is what engines were given, what was refused for want of room (a call is refused where its
class's target would be missed), and what waits, as tokens a second; `served` is the first of these. As in Kubernetes'
HorizontalPodAutoscaler the number of engines there are now is no part of it, and fewer are wanted only when that has
been so for a whole stabilization window. In its first LEARNING seconds a gateway wants no fewer than were up at its
first reading: its averages begin at nothing, which is no reason to stop any.

Synchronous, no I/O; `now` is monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import msgspec

from gateway.core.engines.engine import Engine
from gateway.core.engines.speed import TPOT

EVERY = 1.0  # seconds at least between two readings
AVERAGE = 45.0  # seconds of the averages: one burst is for the queue, a new level for more engines
LEARNING = 2 * AVERAGE  # seconds in which the averages of a gateway that was just started tell too little
REMEMBERED = 1800.0  # seconds that an engine's fastest pace is remembered at least, and twice that at most
COOLDOWN = 600.0  # seconds without a call after which no engine is wanted; an autoscaler may wait longer by its own
STABLE = 40.0  # seconds for which fewer engines must suffice before fewer are wanted
RECOVERY = 30.0  # seconds in which what waits now is to be worked off
MOST_OFFERED = 4.0  # times what is served: more is not known well enough to start engines for


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """Readings of one model. `work`: sum of its engines' utilizations. `given`: tokens of all calls that were given an
    engine so far; `refused`: of all that were refused for want of room. `queued`: tokens that wait. `active`: whether
    any call runs. `up`: engines that may be given calls. `lateness`: time to first token over the class's target, None
    where it is not known."""

    work: float
    given: int
    refused: int
    queued: int
    active: bool
    up: int
    lateness: float | None = None


class FastestPace:
    """The least seconds per output token of late: an engine's pace while it has next to nothing to do."""

    def __init__(self, now: float) -> None:
        self._before = self._lately = math.inf
        self._since = now

    @property
    def seconds(self) -> float:
        """Infinite as long as none is known."""
        return min(self._before, self._lately)

    def seen(self, tpot: float, now: float) -> None:
        """An engine takes so long for an output token now."""
        if now - self._since >= REMEMBERED:
            self._before, self._lately, self._since = self._lately, math.inf, now
        self._lately = min(self._lately, tpot)


def utilization(engine: Engine, fastest: float) -> float:
    """Share of what the engine can do that is in use, 0..1.

    A step of an engine has a fixed part and the work of its sequences. With a share u of its time in that work, an
    output token takes `fastest` / (1 - u) seconds, so u = 1 - fastest / tpot. Where KV cache or places are nearer to
    their bound, their share counts.
    """
    if not engine.ledger.in_flight:
        return 0.0
    stretched = 1.0 - fastest / engine.speed.tpot if fastest < engine.speed.tpot else 0.0
    return min(
        1.0,
        max(
            stretched,
            engine.ledger.load / (engine.ledger.budget or 1),
            engine.ledger.in_flight / (engine.ledger.slots or 1),
        ),
    )


class EnginesWanted:
    """The signal with its memory. `share`: of what engines can do, which calls should fill. `refused` counts tokens;
    whoever refuses adds to it."""

    def __init__(self, share: float, now: float) -> None:
        self.refused = 0
        self._share = share
        self._fastest = FastestPace(now)
        self._work = self._served = self._offered = 0.0
        self._given = self._refused = 0
        self._at = now
        self._busy_at = -math.inf  # when there was a call last
        self._known = False
        self._recent: deque[tuple[float, int]] = deque()  # times and numbers, the largest number first
        self._least, self._least_until = 0, now

    def apply(self, share: float) -> None:
        """A reload: the rules change, what was measured stays."""
        self._share = share

    def due(self, now: float) -> bool:
        """Whether it is time for another reading."""
        return now - self._at >= EVERY

    def work_of(self, engines: Iterable[Engine], now: float) -> float:
        """The sum of the engines' utilizations."""
        there = list(engines)
        for engine in there:
            if engine.ledger.in_flight and engine.speed.tpot != TPOT:  # else nothing was learned of it yet
                self._fastest.seen(engine.speed.tpot, now)
        return sum([utilization(engine, self._fastest.seconds) for engine in there])

    def take(self, readings: Readings, now: float) -> None:
        """Take readings in, a second or more after the last."""
        since = max(EVERY, now - self._at)
        self._at = now
        if not self._recent:
            self._least, self._least_until = readings.up, now + LEARNING
        given, refused = readings.given - self._given, readings.refused - self._refused
        self._given, self._refused = readings.given, readings.refused
        if given or refused or readings.queued or readings.active:
            if now - self._busy_at > AVERAGE:
                self._known = False  # after idleness: what is seen, at once
            self._busy_at = now
        kept = math.exp(-since / AVERAGE) if self._known else 0.0
        self._known = True
        self._work += (1.0 - kept) * (readings.work - self._work)
        self._served += (1.0 - kept) * (given / since - self._served)
        self._offered += (1.0 - kept) * ((given + refused) / since - self._offered)
        self._remember(max(self._level(readings, now), self._least if now < self._least_until else 0), now)

    def _level(self, readings: Readings, now: float) -> int:
        """Engines wanted by these readings alone."""
        if now - self._busy_at > COOLDOWN:
            return 0
        offered = self._offered + readings.queued / RECOVERY
        more = min(MOST_OFFERED, offered / self._served) if self._served > 1.0 else 1.0
        wanted = max(1, math.ceil(self._work * more / self._share))
        if readings.lateness is not None and readings.lateness > 1.0:
            wanted = max(wanted, readings.up + 1)
        return wanted

    def _remember(self, level: int, now: float) -> None:
        recent = self._recent
        while recent and recent[-1][1] <= level:
            recent.pop()
        recent.append((now, level))
        while recent[0][0] < now - STABLE:
            recent.popleft()

    @property
    def wanted(self) -> int:
        """Engines: the largest number of the stabilization window."""
        return self._recent[0][1] if self._recent else 0
