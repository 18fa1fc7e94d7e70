"""Bookings in rate limits: room kept for a call that a limit refused and told when to come back.

Without them it would find the newcomers of that moment before it. So the refusal makes a booking: what the call takes
is kept for it from then on. The call is known by a hash of its tenant and body, which is what a client's retry repeats.

- A newcomer must leave room for what is booked. A call with a booking needs what GCRA asks, and no more: no window ever
  holds more than its limit.
- Bookings follow each other at SHARE of the limit's rate, since the rest is for newcomers. They reach no further than
  HORIZON: beyond it nothing is promised, so nobody books a limit out for longer.
- A booking lapses. Booked amounts are weighed with the share that was claimed lately, so those who never come back hold
  up nobody for long.
- Equal bodies have a booking each. A limit whose burst is less than CALLS such calls promises nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from itertools import count

SHARE = 0.5  # of a limit's rate
HORIZON = 60.0  # seconds; clients honour no longer Retry-After
SOON = 1.0  # seconds: nobody is told to come back sooner
LATE = 2.0  # seconds after it is due that a booking is kept: Retry-After is in whole seconds, and the way takes time
EARLY = 0.25  # seconds before it is due that a call may come for its booking
MOST = 10_000  # bookings of one gateway
SLOT, SLOT_LEAST = 0.25, 0.02  # seconds; a limit's slots are half as long as its burst lasts, within these
SHOWS = 0.75  # share of bookings that are claimed, until seen
WEIGHT = 0.1  # of one booking in that share
# Of such calls a limit's burst must hold so many, else newcomers would find no room between two bookings. Tokens are of
# calls of all sizes, of which the large are few.
CALLS = {"requests": 4, "tokens": 2}


class Booked:
    """Amounts booked on one limit, by time slot. `shows`: the share of bookings claimed lately."""

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
        """Seconds after which a further booking is due. Without other bookings it would `wait` so long; it queues
        behind the present ones at the pace of bookings, and no two are due at once."""
        behind = wait + self.amount * self.shows / (SHARE * rate)
        return max(behind, self._last - now + amount * self.shows / rate)

    def add(self, due: float, amount: int) -> None:
        """Add a booking of `amount` for the time `due`."""
        slot = int(due / self._width)
        self._last = max(self._last, due)
        self._slots[slot] = self._slots.get(slot, 0) + amount
        self.amount += amount

    def drop(self, due: float, amount: int, shown: float) -> None:
        """A booking was claimed, or has lapsed."""
        slot = int(due / self._width)
        self.amount -= amount
        self._slots[slot] -= amount
        if not self._slots[slot]:
            del self._slots[slot]
        self.shows += WEIGHT * (shown - self.shows)


class LimitBooking:
    """Booking of one call, in each limit that had no room for it."""

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
        """End the booking in each limit. `shown`: 1.0 if its call has come back, else 0.0."""
        self.live = False
        for booked, amount in self.parts:
            booked.drop(self.due, amount, shown)


class LimitBookings:
    """The bookings of one book of limits. True while there are any."""

    def __init__(self) -> None:
        self._by_key: dict[int, list[tuple[float, int, LimitBooking]]] = {}  # heaps by when they are due, and so lapse
        self._lapses: list[tuple[float, int, LimitBooking]] = []
        self._number = count()

    def __len__(self) -> int:
        return len(self._lapses)

    def lapse(self, now: float) -> None:
        """Give back the bookings that nobody has claimed in time."""
        lapses = self._lapses
        while lapses and (lapses[0][0] <= now or not lapses[0][2].live):
            booking = heapq.heappop(lapses)[2]
            if booking.live:
                self._end(booking, 0.0)

    def due(self, key: int, now: float) -> LimitBooking | None:
        """Booking of a call that has come back in its time; None if the call has none."""
        bookings = self._by_key.get(key)
        return bookings[0][2] if bookings and now >= bookings[0][0] - EARLY else None

    def claim(self, booking: LimitBooking) -> None:
        """End the booking of a call that has come back and is admitted."""
        self._end(booking, 1.0)

    def book(self, key: int, after: float, now: float, parts: Iterable[tuple[Booked, int]]) -> bool:
        """Book a call that will be asked to come back `after` so many seconds. False: the booking cannot be kept."""
        if after > HORIZON or len(self._lapses) >= MOST:
            return False
        booking, number = LimitBooking(key, now + after, list(parts)), next(self._number)
        heapq.heappush(self._by_key.setdefault(key, []), (booking.due, number, booking))
        heapq.heappush(self._lapses, (booking.lapses, number, booking))
        return True

    def live(self, most: int) -> list[LimitBooking]:
        """The `most` that are due first, of those that are not used up."""
        return [booking for _, _, booking in sorted(self._lapses) if booking.live][:most]

    def _end(self, booking: LimitBooking, shown: float) -> None:
        booking.end(shown)
        bookings = self._by_key[booking.key]
        heapq.heappop(bookings)  # it is the first of its key that is due, and the first that lapses
        if not bookings:
            del self._by_key[booking.key]
