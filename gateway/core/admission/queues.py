"""Weighted fair queues of one model: the order between classes, and the room in each.

Late binding: calls wait here and not inside vLLM, so order can still be decided. Between classes this is fair
queueing by virtual counters: each class counts the tokens it was served over its weight, and the class with the
smallest counter goes next. A class that comes back from idleness is lifted to the smallest active counter, and at
least to the counter of the last class whose turn it was, so nobody saves up credit by staying away. Two backlogged
classes stay within one call's tokens over weight of each other (Start-time Fair Queueing, Goyal 1996). These are
estimates for good: they are what is held on the engines. The order within a class is in `fairness.py`.

Bands: a strict class ends its band. Classes of one band share by weight; a later band gets what they leave.

Head of line: a head that does not fit is not passed. The engines drain until it does, which for a call of usual size is
a moment. Were it passed, small calls would take all room as it comes, whatever the weights, and nobody's wait could be
foretold. There are two exceptions. The head of a class with a `reserve` may pass. Anybody may pass a `large` head,
which would keep too much idle, until that has waited half of the time to its deadline.

Starvation: a head that has waited half of its time, and whose class was not served for as long either, is next,
whatever the order. Only strict classes or a tiny weight can bring that about. It is one call per class in half its
time: a class of old calls does not turn importance upside down.

Room: `max_queue` are places that a class always has. Where they are taken, a newcomer may take
the place of a waiting call of a less important class that has taken more than half of its own. So the least important
are refused first and none is driven out. All classes together never hold more than the sum of their places, so what a
class lent is not filled again behind it. A call that returns for its booking has places of its own, as many again as
its class has: no newcomer can take them, and no more important call can push it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from itertools import count, islice, takewhile
from math import inf

from gateway.core.admission.fairness import ClassQueue, turns_before
from gateway.core.admission.ticket import Ticket
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.call import Call

__all__ = ["Queues", "Ticket"]

Full = str  # what is full, in words: `256 calls`
DEFAULT = "default"  # the class that every policy has
PROMISED = 2  # times all places: the most that wait, with calls that return for their bookings
LOOKED_AT = 64  # newest tickets of a class that may be pushed out


class Queues:
    """The waiting calls of one model. Not empty means every later arrival of its class waits too.

    `classes` are in order of importance; `weights` are tenants' shares within a class, 1 where absent. `paused` gives
    the classes that may not start a call whatever room there is.
    """

    def __init__(
        self,
        classes: Mapping[str, TrafficClass],
        weights: Mapping[str, float] = {},
        paused: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._paused = paused
        self._by_class: dict[str, ClassQueue] = {}
        self._length = 0
        self._sequence = count(1)
        self._floors: list[float] = [0.0]  # per band: no class that comes back has less
        self.apply(classes, weights)

    def apply(self, classes: Mapping[str, TrafficClass], weights: Mapping[str, float]) -> None:
        """Take a new policy. What waits keeps its place, and a class's lead over the least served of its band stays
        the same number of tokens. Tickets of a class that is gone move to `default`, whose name their calls get."""
        weights = dict(weights)
        levels = [self._level(band) for band in range(len(self._floors))]
        old, self._by_class, band = self._by_class, {}, 0
        for name, settings in classes.items():
            queue = old.pop(name, None)
            if queue is None:
                queue = ClassQueue()
            else:
                queue.served = max(0.0, queue.served - levels[queue.band]) * queue.weight / settings.weight
            queue.configure(settings, band, weights)
            self._by_class[name] = queue
            band += settings.strict
        self._floors = [0.0] * (band + 1)
        self._places = sum([settings.max_queue for settings in classes.values()])
        self._fillers = frozenset([name for name, settings in classes.items() if settings.headroom])
        for queue in old.values():
            for ticket in queue.tickets:
                ticket.call.class_name = DEFAULT
                self._enter(self._by_class[DEFAULT], ticket)
        if old:
            self._by_class[DEFAULT].merge()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for queue in self._by_class.values() for ticket in queue.tickets)

    @property
    def classes(self) -> Mapping[str, TrafficClass]:
        """The classes by name, most important first."""
        return {name: queue.settings for name, queue in self._by_class.items()}

    def length(self, class_name: str) -> int:
        queue = self._by_class.get(class_name)
        return 0 if queue is None else len(queue.tickets)

    def tokens(self, class_name: str) -> int:
        queue = self._by_class.get(class_name)
        return 0 if queue is None else queue.tokens

    def ends(self, class_name: str) -> tuple[Ticket, Ticket] | None:
        """The first and the last call of a class to come, of those that wait; None: none does."""
        queue = self._by_class.get(class_name)
        if queue is None or not queue.tickets:
            return None
        return next(iter(queue.tickets)), next(reversed(queue.tickets))

    def promised_tokens(self, class_name: str) -> int:
        """Tokens of a class's calls that wait after they came back for their bookings."""
        return self._by_class[class_name].promised_tokens

    @property
    def total_tokens(self) -> int:
        return sum(queue.tokens for queue in self._by_class.values())

    @property
    def tokens_for_room(self) -> int:
        """Tokens of all calls that more room would let start: those of paused classes wait for their own."""
        paused = self._paused()
        return sum([queue.tokens for name, queue in self._by_class.items() if name not in paused])

    # -- coming and going ---------------------------------------------------------------------------------------

    def push(self, ticket: Ticket, *, front: bool = False) -> None:
        """Take a place in the order. `front`: a call that had been granted and lost its engine goes first within its
        tenant, and nobody is charged for it again. Whether there is `room` is the caller's to ask."""
        ticket.sequence = next(self._sequence)
        ticket.paid = front
        self._enter(self._by_class[ticket.call.class_name], ticket)
        self._length += 1

    def _enter(self, queue: ClassQueue, ticket: Ticket) -> None:
        if not queue.tickets:
            self._floors[queue.band] = level = self._level(queue.band)
            queue.served = max(queue.served, level)
        queue.push(ticket)

    def _level(self, band: int) -> float:
        """The counter to which a class of that band is lifted: the least of those that wait, else of the last."""
        if self._length:
            waiting = self._waiting(band)
            if waiting:
                return max(self._floors[band], min(waiting))
        return self._floors[band]

    def _waiting(self, band: int) -> list[float]:
        """Counters of those that wait for their turn; one that makes way falls behind, and is nobody's measure."""
        making_way = self._making_way
        return [
            queue.served
            for name, queue in self._by_class.items()
            if queue.tickets and queue.band == band and name not in making_way
        ]

    def pop(self, fits: Callable[[Ticket], bool], now: float, paused: Container[str] = ()) -> Ticket | None:
        """The next ticket in order for which `fits` holds, removed and accounted; None if none may go now.

        `paused` are classes that may not start a call whatever room there is (their `max_concurrency`): they are left
        out, and a head of theirs holds nobody up.
        """
        held_up = False
        for queue in self.order(now, paused):
            ticket = queue.head()
            if not held_up or queue.settings.reserve:
                for candidate in queue.candidates(ticket):
                    if fits(candidate):
                        if not (held_up or queue.settings.headroom or queue.starving(ticket, now)):
                            self._floors[queue.band] = max(self._floors[queue.band], queue.served)  # it was its turn
                        queue.take(candidate, now)
                        self._left(queue)
                        return candidate
            if queue.settings.headroom:
                continue  # what it leaves free is for the others
            if queue.starving(ticket, now):
                return None
            held_up = held_up or not (ticket.large or ticket.aside)
        return None

    def heads(self, now: float) -> Iterator[Ticket]:
        """Iterate over each class's next ticket, in order. To drop late tickets, remove them and ask again."""
        return (queue.head() for queue in self.order(now, ()))

    def order(self, now: float, paused: Container[str]) -> list[ClassQueue]:
        """Classes that have a call to go, in the order of their turns."""
        queues = [queue for name, queue in self._by_class.items() if queue.tickets and name not in paused]
        if len(queues) > 1:
            queues.sort(key=lambda queue: queue.rank(now))
        return queues

    def rank(self, now: float, paused: Container[str]) -> tuple[bool, int]:
        """Sort key among models on one engine, before their counters: a starving head goes first, then bands."""
        return next((queue.rank(now)[:2] for queue in self.order(now, paused)), (True, 0))

    def remove(self, ticket: Ticket) -> None:
        """Withdraw a waiting ticket: its client left, or it was refused. Nobody is charged for it."""
        queue = self._by_class[ticket.call.class_name]
        queue.remove(ticket)
        self._left(queue)

    def _left(self, queue: ClassQueue) -> None:
        self._length -= 1
        if not queue.tickets and (not self._length or not self._waiting(queue.band)):
            self._floors[queue.band] = max(self._floors[queue.band], queue.served)  # it may have made way

    def served(self, class_name: str, tenant: str) -> float:
        """The tenant's counter in its class: charges over weight."""
        queue = self._by_class.get(class_name)
        return 0.0 if queue is None else queue.counter(tenant)

    def starving(self, ticket: Ticket, now: float) -> bool:
        """Whether it has waited half of the time it may wait: nobody passes it then."""
        return self._by_class[ticket.call.class_name].starving(ticket, now)

    def owed(self, ticket: Ticket) -> float:
        """Charges over weight by which the ticket's tenant was served less than another that waits in its class."""
        return self._by_class[ticket.call.class_name].owed(ticket.call.tenant)

    def correct(self, ticket: Ticket, prompt_tokens: int, completion_tokens: int) -> None:
        """Real usage of a popped ticket, in place of its tenant's charge. Without effect on a ticket
        that was never charged, on one whose class or tenant is forgotten, and the second time."""
        queue = self._by_class.get(ticket.call.class_name)
        if queue is not None and ticket.paid and not ticket.waiting:
            queue.correct(ticket, prompt_tokens, completion_tokens)

    # -- room ---------------------------------------------------------------------------------------------------

    def room(self, call: Call, *, promised: bool = False) -> Full | None:
        """Bound that leaves no room for the call; None: it may enter. `promised`: it returns for its booking, so only
        other calls that did count."""
        queue = self._by_class[call.class_name]
        waiting, times = (queue.promised, PROMISED) if promised else (len(queue.tickets), 1)
        most = queue.settings.max_queue
        return f"{most} calls" if waiting >= most or self._length >= times * self._places else None

    def victim(self, call: Call) -> Ticket | None:
        """The ticket to refuse so that the newcomer may have its place, where there is no `room`; None: there is none.

        Of the least important class, below the newcomer's, that has one (and, where the newcomer has no place of its
        own left, waits in more than half of its places): its newest that was neither granted nor promised a place. A
        class with `max_queue: 0` waits in nobody's place.
        """
        own = self._by_class[call.class_name]
        places = own.settings.max_queue
        if not places or self.room(call) is None:
            return None
        more = len(own.tickets) >= places  # else it takes back a place of its own
        for queue in takewhile(lambda queue: queue is not own, reversed(self._by_class.values())):
            if more and 2 * len(queue.tickets) <= queue.settings.max_queue:
                continue
            for ticket in islice(reversed(queue.tickets), LOOKED_AT):
                if not ticket.paid and not ticket.promised:
                    return ticket
        return None

    # -- estimates ----------------------------------------------------------------------------------------------

    @property
    def _making_way(self) -> Container[str]:
        """Classes whose calls wait for something else than their turn: for gaps that they may fill (headroom), or for
        calls of their own to end (paused). They hold nobody up."""
        return self._fillers.union(self._paused())

    def own_ahead(self, call: Call, ticket: Ticket | None = None) -> tuple[float, float]:
        """Tokens of the call's class that go before the call, and the class's share by weight among the classes that
        wait. The share is 0 behind a waiting strict class."""
        own, making_way = self._by_class[call.class_name], self._making_way
        weights = own.weight
        for name, queue in self._by_class.items():
            if queue.tickets and queue is not own and name not in making_way:
                if queue.band < own.band:
                    return own.ahead(call, ticket), 0.0
                weights += queue.weight if queue.band == own.band else 0.0
        return own.ahead(call, ticket), own.weight / weights

    def passing(self, class_name: str) -> dict[str, float]:
        """The other classes without a call that waits for its turn: they are served what comes, or what they may. Each
        with its weight over the class's own; infinite: it goes before; 0: it comes after, or fills gaps."""
        own, making_way = self._by_class[class_name], self._making_way
        return {
            name: _beside(queue, own)
            for name, queue in self._by_class.items()
            if queue is not own and (name in making_way or not queue.tickets)
        }

    def ahead(self, class_name: str, own: float) -> float:
        """Tokens that go before what has `own` tokens of its class before it, by the order above, if nobody else came.

        Earlier bands whole; of its band what gets its turn meanwhile; later bands and classes that make way nothing.
        Starving heads are not foreseen.
        """
        queue, making_way = self._by_class[class_name], self._making_way
        start = (queue.served if queue.tickets else max(queue.served, self._level(queue.band))) + own / queue.weight
        tokens, ties = own, True  # equal counters: the more important class goes first
        for name, other in self._by_class.items():
            if other is queue:
                ties = False
            elif name in making_way:
                continue
            elif other.band < queue.band:
                tokens += other.tokens
            elif other.band == queue.band and other.tickets:
                behind = (start - other.served) * other.weight
                tokens += turns_before(behind, other.tokens, len(other.tickets), ties=ties) * other.tokens
        return tokens


def _beside(other: ClassQueue, own: ClassQueue) -> float:
    """Weight of another class over a class's own; infinite: it goes before; 0: it comes after, or fills gaps."""
    if other.band < own.band:
        return inf
    return 0.0 if other.band > own.band or other.settings.headroom else other.weight / own.weight
