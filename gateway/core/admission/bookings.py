"""Bookings in a queue: room kept for a refused call that obeys Retry-After.

Under steady overload a client that comes back when told finds the same overload and is refused again. So a refusal
makes a booking. It is due when the work that was ahead of the call has drained. The call is known by a hash of tenant,
model and body, which is what a client's retry repeats. When it returns it goes before every newcomer that came after
its first attempt. A newcomer's predicted wait counts the booked work that is due by then as ahead of it.

- Not everyone returns: booked work is weighed with the share of bookings that were claimed lately.
- A booking that is not claimed lapses at the first `advance` after its time.
- Where more than HORIZON seconds are booked no booking is made, and the caller is told not to retry before.
- Bookings promise no more than SHARE of what the class is served. The rest is for newcomers: an answer after a minute
  is not the answer somebody wanted at once.

One `Bookings` serves one class of one model. Times are monotonic seconds, work is KV tokens. O(1) per event.
"""

from __future__ import annotations

import math
from itertools import islice

from gateway.core.checkpoint import SavedPlace
from gateway.core.request.call import Call

SHARE = 0.5
HORIZON = 60.0  # seconds; clients honour no longer Retry-After
SOON = 1.0  # seconds: nobody is told to come back sooner, and where no better time is known
LATE = 2.0  # seconds after it is due that a booking is kept: Retry-After is in whole seconds, and the way takes time
EARLY = 0.25  # seconds before it is due that a call may come for its booking: clocks and roundings differ
MOST = 10_000
SHOWS = 0.5  # share of bookings that are claimed, until seen
SHOWS_WEIGHT = 0.05  # of one booking in that share
FOREVER = 1e9  # seconds: a deadline that there is not


class Booking:
    """`since` and `deadline` are the call's first arrival and deadline, which its return is ordered by."""

    __slots__ = ("deadline", "due", "lapses", "since", "tokens")

    def __init__(self, since: float, deadline: float, tokens: int, due: float) -> None:
        self.since = since
        self.deadline = deadline
        self.tokens = tokens
        self.due = due
        self.lapses = due + LATE


class Bookings:
    """Bookings in the order they were made, which is roughly the order they are due in."""

    def __init__(self) -> None:
        self._bookings: dict[int, Booking] = {}
        self._tokens = 0
        self._due: dict[int, int] = {}  # second -> tokens due in it
        self.shows = SHOWS

    def __len__(self) -> int:
        return len(self._bookings)

    def advance(self, now: float) -> None:
        """Time has passed: bookings that nobody has claimed lapse."""
        bookings = self._bookings
        while bookings:
            key = next(iter(bookings))
            if bookings[key].lapses > now:
                break
            self._drop(key, 0.0)

    def ahead(self, now: float, until: float = math.inf) -> float:
        """Booked tokens, of those that had not lapsed at the last `advance`, that will probably be claimed by
        `until`."""
        if until >= now + HORIZON:
            return self._tokens * self.shows
        return sum([tokens for second, tokens in self._due.items() if second <= until]) * self.shows

    def book(self, call: Call, wait: float, now: float) -> float | None:
        """Seconds after which to come back, for a call that would have to wait for `wait`; None: it gets no booking.

        A call that has one keeps it, also if it came back too early.
        """
        key = fingerprint(call)
        booking = self._bookings.get(key)
        if booking is not None and booking.lapses > now:
            return max(0.0, booking.due - now)
        if wait > HORIZON or len(self._bookings) >= MOST:
            return None
        if booking is not None:
            self._drop(key, 0.0)
        self._add(key, Booking(call.arrived, call.deadline, call.cost, now + wait))
        return wait

    def checkpoint(self, now: float, most: int) -> list[SavedPlace]:
        """The first `most` of them, for the next decider."""
        return [
            SavedPlace(key, now - each.since, min(each.deadline - now, FOREVER), each.due - now, each.tokens)
            for key, each in islice(self._bookings.items(), most)
        ]

    def restore(self, saved: list[SavedPlace], then: float) -> None:
        """Keep what an earlier decider had promised by `then`; that of a call that has a booking here stays."""
        for each in saved:
            if each.key not in self._bookings and len(self._bookings) < MOST:
                booking = Booking(then - each.age, then + each.deadline_in, each.tokens, then + each.due_in)
                self._add(each.key, booking)

    def _add(self, key: int, booking: Booking) -> None:
        self._bookings[key] = booking
        self._tokens += booking.tokens
        second = int(booking.due)
        self._due[second] = self._due.get(second, 0) + booking.tokens

    def due(self, call: Call, now: float) -> Booking | None:
        """Booking of a call that has come back in its time; None if the call has none."""
        if not self._bookings:
            return None
        booking = self._bookings.get(fingerprint(call))
        return booking if booking is not None and booking.due - EARLY <= now < booking.lapses else None

    def claim(self, call: Call) -> None:
        """Use up the booking of a call that has come back."""
        self._drop(fingerprint(call), 1.0)

    def _drop(self, key: int, shown: float) -> None:
        booking = self._bookings.pop(key)
        self._tokens -= booking.tokens
        second = int(booking.due)
        self._due[second] -= booking.tokens
        if not self._due[second]:
            del self._due[second]
        self.shows += SHOWS_WEIGHT * (shown - self.shows)


def fingerprint(call: Call) -> int:
    """Hash of what a client's retry repeats: tenant, model and body."""
    return hash((call.tenant, call.model, call.body))
