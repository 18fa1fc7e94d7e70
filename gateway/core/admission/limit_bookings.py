"""Bookings in rate limits: a call that a limit refused is let in when it was told to come back.

Without them it would find the newcomers of that moment before it. So the refusal books a place: what the call takes is
kept for it from then on. The call is known by a hash of its tenant and body, which is what a client's retry repeats.

- A newcomer must leave room for what is booked. A call with a place needs what GCRA asks, and no more: no window ever
  holds more than its limit.
- Places follow each other at SHARE of the limit's rate, since the rest is for newcomers. They reach no further than
  HORIZON: beyond it nothing is promised, so nobody books a limit out for longer.
- A place lapses. Booked amounts are weighed with the share that was claimed lately, so those who never come back hold
  up nobody for long.
- Equal bodies have a place each. A limit whose burst is less than CALLS such calls promises nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from itertools import count

SHARE = 0.5  # of a limit's rate
HORIZON = 60.0  # seconds; clients honour no longer Retry-After
SOON = 1.0  # seconds: nobody is told to come back sooner
LATE = 2.0  # seconds after it is due that a place is kept: Retry-After is in whole seconds, and the way takes time
EARLY = 0.25  # seconds before it is due that a call may come for its place
MOST = 10_000  # places of one gateway
SLOT, SLOT_LEAST = 0.25, 0.02  # seconds; a limit's slots are half as long as its burst lasts, within these
SHOWS = 0.75  # share of places that are claimed, until seen
WEIGHT = 0.1  # of one place in that share
# Of such calls a limit's burst must hold so many, else newcomers would find no room between two places. Tokens are of
# calls of all sizes, of which the large are few.
CALLS = {"requests": 4, "tokens": 2}


class Booked:
    """What is promised of one limit: amounts by slots of time. `shows`: the share of places claimed lately."""

    __slots__ = ("_last", "_slots", "_width", "amount", "shows")

    def __init__(self, width: float = SLOT) -> None:
        self._width = width
        self._last = -math.inf  # when the last one is due
        self._slots: dict[int, int] = {}
        self.amount = 0
        self.shows = SHOWS

    def leaves(self, over: float, rate: float, now: float) -> bool:
        """Whether all that is booked finds its room, if a newcomer lifts the level to `over` above the burst (below it
        where negative). O(slots), of which the horizon has 250; true of any newcomer where nothing is booked."""
        for slot in sorted(self._slots):
            amount = self._slots[slot]
            over += amount * self.shows
            if over - amount * (1.0 - self.shows) > rate * max(0.0, slot * self._width - now):
                return False
        return True

    def after(self, wait: float, amount: int, rate: float, now: float) -> float:
        """Seconds after which one more is due, which would have to `wait` so long were there no places: behind those
        there are, at the pace at which they are given, and no two at once."""
        behind = wait + self.amount * self.shows / (SHARE * rate)
        return max(behind, self._last - now + amount * self.shows / rate)

    def add(self, due: float, amount: int) -> None:
        """One more place."""
        slot = int(due / self._width)
        self._last = max(self._last, due)
        self._slots[slot] = self._slots.get(slot, 0) + amount
        self.amount += amount

    def drop(self, due: float, amount: int, shown: float) -> None:
        """A place was claimed, or has lapsed."""
        slot = int(due / self._width)
        self.amount -= amount
        self._slots[slot] -= amount
        if not self._slots[slot]:
            del self._slots[slot]
        self.shows += WEIGHT * (shown - self.shows)


class LimitBooking:
    """One call's, in each limit that had no room for it."""

    __slots__ = ("due", "key", "lapses", "live", "parts")

    def __init__(self, key: int, due: float, parts: list[tuple[Booked, int]]) -> None:
        self.key = key
        self.due = due
        self.lapses = due + LATE
        self.parts = parts
        self.live = True
        for booked, amount in parts:
            booked.add(due, amount)

    def end(self, shown: float) -> None:
        """It is given back."""
        self.live = False
        for booked, amount in self.parts:
            booked.drop(self.due, amount, shown)


class LimitBookings:
    """The places of one book of limits. True while there are any."""

    __slots__ = ("_by_key", "_lapses", "_number")

    def __init__(self) -> None:
        self._by_key: dict[int, list[tuple[float, int, LimitBooking]]] = {}  # heaps by when they are due, and so lapse
        self._lapses: list[tuple[float, int, LimitBooking]] = []
        self._number = count()

    def __len__(self) -> int:
        return len(self._lapses)

    def lapse(self, now: float) -> None:
        """Give back the places that nobody has claimed in time."""
        lapses = self._lapses
        while lapses and (lapses[0][0] <= now or not lapses[0][2].live):
            place = heapq.heappop(lapses)[2]
            if place.live:
                self._end(place, 0.0)

    def due(self, key: int, now: float) -> LimitBooking | None:
        """The place of a call that has come when it was told to."""
        places = self._by_key.get(key)
        return places[0][2] if places and now >= places[0][0] - EARLY else None

    def claim(self, place: LimitBooking) -> None:
        """Its call has come and is let in."""
        self._end(place, 1.0)

    def book(self, key: int, after: float, now: float, parts: Iterable[tuple[Booked, int]]) -> bool:
        """A place for a call that is told to come back `after` so many seconds. False: none can be kept."""
        if after > HORIZON or len(self._lapses) >= MOST:
            return False
        place, number = LimitBooking(key, now + after, list(parts)), next(self._number)
        heapq.heappush(self._by_key.setdefault(key, []), (place.due, number, place))
        heapq.heappush(self._lapses, (place.lapses, number, place))
        return True

    def _end(self, place: LimitBooking, shown: float) -> None:
        place.end(shown)
        places = self._by_key[place.key]
        heapq.heappop(places)  # it is the first of its key that is due, and the first that lapses
        if not places:
            del self._by_key[place.key]
