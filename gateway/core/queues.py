"""The order of the calls that wait for one model: shares between classes by weight, arrival order within a class.

Late binding: calls wait here and not inside vLLM, so order can still be decided. Between classes this is fair
queueing by virtual counters: each class counts the tokens it was served over its weight, and the class with the
smallest counter goes next. A class that comes back from idleness is lifted to the smallest active counter, so nobody
saves up credit by staying away. Two backlogged classes stay within one call's tokens over weight of each other
(Start-time Fair Queueing, Goyal 1996). Work-conserving: a head that does not fit lets other classes' heads pass,
until it has waited half of its time; then nothing passes it, and the engine drains until it fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from gateway.core.call import Call
from gateway.core.policy import TrafficClass


class Ticket:
    """One call in a queue. `waiting` turns false exactly once: granted, refused, expired or withdrawn."""

    __slots__ = ("call", "cost", "exclude", "pushed_at", "waiting")

    def __init__(self, call: Call, pushed_at: float, exclude: frozenset[str] = frozenset()) -> None:
        self.call = call
        self.cost = call.cost
        self.pushed_at = pushed_at
        self.exclude = exclude  # engines that have failed this call
        self.waiting = True


class _Line:
    __slots__ = ("served", "tickets", "tokens", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.tickets: deque[Ticket] = deque()
        self.tokens = 0
        self.served = 0.0  # tokens granted / weight


class Queues:
    """The waiting calls of one model. Not empty means every later arrival of its class waits too."""

    def __init__(self, classes: Mapping[str, TrafficClass]) -> None:
        self._lines = {name: _Line(traffic_class.weight) for name, traffic_class in classes.items()}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for line in self._lines.values() for ticket in line.tickets)

    def length(self, class_name: str) -> int:
        return len(self._lines[class_name].tickets)

    def tokens(self, class_name: str) -> int:
        return self._lines[class_name].tokens

    @property
    def total_tokens(self) -> int:
        return sum(line.tokens for line in self._lines.values())

    def push(self, ticket: Ticket, *, front: bool = False) -> None:
        """Take a place at the end of the line, or at its head (a call that had been granted and lost its engine)."""
        line = self._lines[ticket.call.class_name]
        if not line.tickets:
            self._lift(line)
        if front:
            line.tickets.appendleft(ticket)
        else:
            line.tickets.append(ticket)
        line.tokens += ticket.cost
        self._length += 1

    def _lift(self, line: _Line) -> None:
        active = [other.served for other in self._lines.values() if other.tickets]
        if active:
            line.served = max(line.served, min(active))

    def pop(self, fits: Callable[[Ticket], bool], now: float) -> Ticket | None:
        """The next ticket in order for which `fits` holds, removed and accounted; None if none may go now."""
        for line in sorted((line for line in self._lines.values() if line.tickets), key=lambda line: line.served):
            ticket = line.tickets[0]
            if fits(ticket):
                self._remove(line, ticket)
                line.served += ticket.cost / line.weight
                return ticket
            if now - ticket.pushed_at > (ticket.call.deadline - ticket.pushed_at) / 2:
                return None
        return None

    def remove(self, ticket: Ticket) -> None:
        """Withdraw a waiting ticket: its client left, or it was refused."""
        self._remove(self._lines[ticket.call.class_name], ticket)

    def _remove(self, line: _Line, ticket: Ticket) -> None:
        if line.tickets[0] is ticket:
            line.tickets.popleft()
        else:
            line.tickets.remove(ticket)
        line.tokens -= ticket.cost
        self._length -= 1
        ticket.waiting = False
