"""Ring of the calls that ended last, for the console: bounded, without any prompt.

Its calls are in the order in which they were told, which is that of their serial numbers. It is nearly that of their
ends: a relay tells once a second, and after a time without a decider, it tells of calls that ended long before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import itemgetter

from msgspec import UNSET

from gateway.core.request.record import COPY, Record

KEPT = 10_000  # calls
REASON = 400  # characters of a reason that are kept: an engine may have much to say
Ended = tuple[float, Record]  # when, in monotonic seconds


class EndedCalls:
    """The last `kept` calls. Each has a serial number, counted from 1 since the start; `last` is the newest one's.
    `routed` takes each call for a model route, and when it ended."""

    def __init__(self, kept: int = KEPT, routed: Callable[[Record, float], None] | None = None) -> None:
        self.last = 0
        self._routed = routed
        self._calls: deque[Ended] = deque(maxlen=kept)
        self._latest: deque[float] = deque(maxlen=kept)  # beside each call: the latest end up to it

    def add(self, record: Record, now: float) -> None:
        """Keep a record, which nobody else reads any more: its prompt, where one is logged, is forgotten."""
        if record.asked_model is not UNSET and self._routed is not None:
            self._routed(record, now)
        if record.request is not UNSET:
            record.request = UNSET
        if len(record.reason) > REASON:
            record.reason = record.reason[:REASON]
        self.last += 1
        self._calls.append((now, record))
        self._latest.append(max(now, self._latest[-1]) if self._latest else now)

    def after(self, serial: int, most: int) -> tuple[int, Sequence[Ended]]:
        """The serial number of the first call after `serial` that is still kept, and up to `most` calls from it on."""
        first = max(serial, self.last - len(self._calls)) + 1
        skipped = first - (self.last - len(self._calls)) - 1
        if skipped >= len(self._calls):  # also a number that no clock or counter has
            return first, ()
        return first, tuple(islice(self._calls, skipped, skipped + most))

    def reach(self, now: float, most: float) -> float:
        """Seconds that `since` can look back: `most`, or less where the ring is full of later calls."""
        full = len(self._calls) == self._calls.maxlen
        return min(most, max(0.001, now - self._latest[0])) if full else most

    def since(self, when: float) -> list[Ended]:
        """The calls that ended after `when`, the newest first."""
        found = []
        for latest, ended in zip(reversed(self._latest), reversed(self._calls), strict=True):
            if latest <= when:  # as are all before it
                break
            if ended[0] > when:
                found.append(ended)
        found.sort(key=itemgetter(0), reverse=True)
        return found

    def callers(self, when: float) -> list[Ended]:
        """The same, of callers alone: a copy for a mirror is nobody's loss where it finds no room."""
        return [ended for ended in self.since(when) if ended[1].mirrored != COPY]
