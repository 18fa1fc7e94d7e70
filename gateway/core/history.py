"""History of the last hour for the console: calls by how they ended, queues, engines, and what happened.

Memory is bounded: KEPT buckets of STEP seconds, at most CLASSES classes in each, and EVENTS events. Nothing is done for
a call: totals are compared once a bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gateway.shared.notice import OTHER, Level, Notice

STEP = 10  # seconds of one bucket
KEPT = 360  # buckets
EVENTS = 200
CLASSES = 16  # that are told apart: the first ones
WORDS = 300  # characters of an event

Ended = tuple[int, int, int]  # calls answered, refused, failed


class Interval(msgspec.Struct, array_like=True, frozen=True):
    """STEP seconds that ended `at`, Unix seconds."""

    at: float
    answered: int  # calls that ended so
    refused: int
    failed: int
    queued: int  # the most calls at once
    running: int
    up: int  # the fewest engines at once
    engines: int
    classes: dict[str, Ended]


class Event(msgspec.Struct, array_like=True, frozen=True):
    """Event of the history. `at`: Unix seconds."""

    at: float
    level: Level
    event: str
    text: str


class History:
    """The last KEPT buckets and EVENTS events. `closed`: buckets so far."""

    def __init__(self) -> None:
        self.closed = 0
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self._buckets: deque[Interval] = deque(maxlen=KEPT)
        self._before: dict[str, Sequence[int]] = {}
        self._queued = self._running = self._engines = 0
        self._up: int | None = None

    def look(self, queued: int, running: int, up: int, engines: int) -> None:
        """Note what is the case now, for the bucket that is open."""
        self._queued, self._running = max(self._queued, queued), max(self._running, running)
        self._up = up if self._up is None else min(self._up, up)
        self._engines = engines

    def close(self, at: float, totals: Mapping[str, Sequence[int]]) -> None:
        """Close the bucket. `totals`: calls answered, refused and failed since the start, by class."""
        classes: dict[str, Ended] = {}
        sums = [0, 0, 0]
        for name, now in totals.items():
            before = self._before.get(name, (0, 0, 0))
            # A process that has gone takes its counts with it.
            new = [max(0, after - was) for after, was in zip(now, before, strict=True)]
            sums = [total + count for total, count in zip(sums, new, strict=True)]
            if any(new) and len(classes) < CLASSES:
                classes[name] = (new[0], new[1], new[2])
        self._before = dict(totals)
        self._buckets.append(
            Interval(
                at,
                answered=sums[0],
                refused=sums[1],
                failed=sums[2],
                queued=self._queued,
                running=self._running,
                up=self._up or 0,
                engines=self._engines,
                classes=classes,
            )
        )
        self.closed += 1
        self._queued = self._running = 0
        self._up = None

    def after(self, number: int) -> list[Interval]:
        """The buckets after the first `number` ones, as far as they are kept."""
        new = max(0, self.closed - number)
        return list(self._buckets)[-new:] if new else []

    def note(self, at: float, line: str) -> None:
        """Note an event: a line for the operator."""
        level, event = (line.level, line.event) if isinstance(line, Notice) else ("info", OTHER)
        self.events.append(Event(at, level, event, line[:WORDS]))

    def noting(self, say: Callable[[str], None], clock: Callable[[], float]) -> Callable[[str], None]:
        """`say`, whose lines are noted as events. `clock`: Unix seconds."""

        def both(line: str) -> None:
            self.note(clock(), line)
            say(line)

        return both
