"""Traffic of one model over all its engines: its drain rate, its bookings, its load-shedding mode, and its outages.

The state of single engines is in the fleet, and the waiting calls are in the model's queues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.core.admission.bookings import SHARE, SOON, Bookings
from gateway.core.admission.deadline import EVERY, Drain, TokenRate
from gateway.core.admission.mode import ModelMode, Signals, Window
from gateway.core.admission.queues import Queues
from gateway.core.admission.ticket import Ticket
from gateway.core.checkpoint import SavedTraffic
from gateway.core.engines.breaker import errors_of
from gateway.core.engines.choice import usable_of
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.scaling import EnginesWanted, Readings
from gateway.core.policy.policy import Policy
from gateway.core.quantile import TTFTQuantile
from gateway.core.request.call import Call

UNCROWDED = 0.9  # of what a class is served: newcomers that ask for less leave room for those who come back
STEP_EVERY = 0.1  # seconds at least between two judgements of the mode


class ModelTraffic:
    """Traffic of one model. `drain` and `bookings` serve predictions; `state` is the mode, `level` its number: 0 is
    normal. `scaling` is the signal for autoscalers; whoever refuses a call for want of room adds its tokens there."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.drain = Drain(now)
        self.scaling = EnginesWanted(policy.scaling, now)
        self.bookings: dict[str, Bookings] = {}
        self.level = 0
        self.state = ModelMode(policy.modes)
        self._order = tuple(policy.classes)
        self._window = Window()
        self._offered: dict[str, TokenRate] = {}  # by newcomers that could not start at once
        self._ttfts: dict[str, TTFTQuantile] = {}
        # Since when calls of a class are refused for want of room, and until when the last of them stays away.
        self._away: dict[str, tuple[float, float]] = {}
        self._judged_at = self._advanced_at = -math.inf
        self.apply(policy)

    def apply(self, policy: Policy) -> None:
        """A reload: rules and classes change, measurements stay."""
        self.state.apply(policy.modes)
        self.scaling.apply(policy.scaling)
        self._order = tuple(policy.classes)
        self.bookings = {name: self.bookings.get(name) or Bookings() for name in policy.classes}
        self._offered = {name: rate for name, rate in self._offered.items() if name in policy.classes}
        self._away = {name: until for name, until in self._away.items() if name in policy.classes}
        self._ttfts = {name: self._ttfts.get(name) or TTFTQuantile() for name in policy.classes}

    def advance(self, now: float) -> None:
        """Time has passed, and a prediction is about to be asked for."""
        if now - self._advanced_at < EVERY:
            return  # nothing in it would be folded anew
        self._advanced_at = now
        self.drain.advance(now)
        for rate in self._offered.values():
            rate.advance(now)
        for bookings in self.bookings.values():
            bookings.advance(now)

    def refuses(self, call: Call) -> str | None:
        """Reason for which the mode refuses the call; None if the mode admits it."""
        return self.state.refuses(call.class_name, self._order)

    def first_byte(self, call: Call, now: float) -> None:
        """A stream's first token came."""
        seconds = now - call.arrived
        ttfts = self._ttfts.get(call.class_name)
        if ttfts is not None:
            ttfts.add(seconds)
        if call.ttft_by < math.inf:
            self._window.first_byte(seconds / (call.ttft_by - call.arrived), now)

    def usual_ttft(self, class_name: str, quantile: float) -> float | None:
        """Seconds from arrival to the first token that this share of the class's streams stay below.

        None: too few are known, or there is no such class any more."""
        ttfts = self._ttfts.get(class_name)
        return None if ttfts is None else ttfts.value(quantile)

    def wait(
        self,
        queues: Queues,
        call: Call,
        now: float,
        ticket: Ticket | None = None,
        *,
        until: float = 0.0,
        spare: int = 0,
        less: int = 0,
    ) -> float:
        """Predicted seconds until `call` (waiting as `ticket`, or were it to come now) can start.

        Work ahead of it over the drain rate, two ways, and the longer: what waits now, by the queues' order; and its
        own class's work at its class's share, since more important calls keep coming while it waits. Booked work that
        comes due before a newcomer starts is ahead of it, that of after `until` is nobody's concern. `spare` tokens of
        its own need not be waited for, and `less` of its class's that wait before it will have left.
        """
        short, name = max(0, call.cost - spare), call.class_name
        own, rate = self._own(queues, call, now, ticket)
        own = max(0.0, own - less)
        if ticket is not None:
            ahead = self.drain.wait(queues.ahead(name, own) + short, now)
            return max(ahead, (own + short) / rate)
        bookings, booked = self.bookings[name], 0.0
        crowded = self._crowded(name, rate, now)
        while True:
            ahead = self.drain.wait(queues.ahead(name, own + booked) + short, now)
            wait = max(ahead, (own + booked + short) / rate)
            due = bookings.ahead(now, min(now + wait, until)) * crowded
            if due <= booked:
                return wait
            booked = due  # each time at least a second's bookings more, so HORIZON times at most

    def turned_away(self, class_name: str, seconds: float, now: float) -> None:
        """A call of this class was refused for want of room, and may come back after so many seconds."""
        since, until = self._away.get(class_name, (now, now))
        self._away[class_name] = (since if now < until else now), max(now + seconds, until)

    def away(self, class_name: str, now: float) -> float:
        """Seconds until the last of these may come back, or for which such calls have been refused without a break,
        whichever is more; 0: all may."""
        since, until = self._away.get(class_name, (now, now))
        return max(until - now, now - since) if now < until else 0.0

    def offered(self, call: Call, now: float) -> None:
        """A newcomer asks for a place in the queue."""
        rate = self._offered.get(call.class_name)
        if rate is None:
            rate = self._offered[call.class_name] = TokenRate(now)
        rate.tokens += call.cost

    def _own(self, queues: Queues, call: Call, now: float, ticket: Ticket | None = None) -> tuple[float, float]:
        """Tokens of the call's class that go before the call, and tokens per second for that class. Without a known
        rate the second is infinity, and only shedding later refuses the call."""
        own, fair = queues.own_ahead(call, ticket)
        name = call.class_name
        return own, self.drain.rate_of(name, fair, queues.passing(name), now) or math.inf

    def _crowded(self, class_name: str, rate: float, now: float) -> float:
        """Share of booked work, 0 to 1, that newcomers make way for: 1 if newcomers alone exceed the rate of their
        class.

        With fewer newcomers, returning calls find room in any case. Refusing newcomers for them would only create more
        bookings, and the refusals of one bad minute would go on for ever.
        """
        offered = self._offered.get(class_name)
        if offered is None or rate == math.inf:
            return 1.0
        return min(1.0, max(0.0, (offered.rate(now) / rate - UNCROWDED) / (1.0 - UNCROWDED)))

    def book(self, queues: Queues, call: Call, now: float, ready_in: float = 0.0) -> float | None:
        """Seconds after which a call that is refused may come back to its booking; None: it gets none, as does a
        merged call, which no client can repeat. `ready_in`: seconds until an engine of the model is ready."""
        if call.merged:
            return None
        self.advance(now)
        bookings = self.bookings[call.class_name]
        own, rate = self._own(queues, call, now)
        booked = queues.promised_tokens(call.class_name) + (bookings.ahead(now) + call.cost) / SHARE
        return bookings.book(call, max(SOON, ready_in + max(booked, own) / rate), now)

    def checkpoint(self, model: str, now: float, most: int) -> SavedTraffic:
        """Rates and `most` places of each class, for the next decider."""
        places = {name: bookings.checkpoint(now, most) for name, bookings in self.bookings.items() if bookings}
        return SavedTraffic(model, self.drain.checkpoint(now), places)

    def restore(self, saved: SavedTraffic, then: float, *, places: bool) -> None:
        """Go on from a checkpoint of `then`; with its `places`, of classes that there still are."""
        self.drain.restore(saved.drain, then)
        for name, kept in saved.places.items() if places else ():
            if name in self.bookings:
                self.bookings[name].restore(kept, then)

    def step(self, engines: Sequence[Engine], now: float) -> bool:
        """Judge the mode anew, if that was not done just now; True if it changed."""
        if now - self._judged_at < STEP_EVERY:
            return False
        self._judged_at = now
        usable = usable_of(engines, now)  # what a dead engine failed is over with it
        for engine in usable:
            engine.breaker.advance(now)
        for bookings in self.bookings.values():
            bookings.advance(now)
        changed = self.state.step(self.signals(usable, now), now)
        self.level = self.state.mode.value
        return changed

    def signals(self, usable: Sequence[Engine], now: float) -> Signals:
        """Signals of the mode, of engines that may be used."""
        samples = [e.sample for e in usable if e.sample is not None and e.fresh(now)]
        count = len(samples)
        return Signals(
            kv=sum([sample.kv_usage for sample in samples]) / count if count else None,
            waiting=sum([sample.waiting for sample in samples]) / count if count else None,
            ttft=self._window.ttft(now),
            errors=errors_of([e.breaker for e in usable]),
        )

    def scale(self, engines: Sequence[Engine], queued: int, now: float) -> int:
        """Engines that the model wants, which `engines` serve and for which calls of `queued` tokens wait."""
        scaling = self.scaling
        if scaling.due(now):
            readings = Readings(
                work=scaling.work_of(engines, now),
                given=self.drain.given,
                refused=scaling.refused,
                queued=queued,
                active=self.drain.held > 0,
                up=len(usable_of(engines, now)),
                lateness=self._window.ttft(now),
            )
            scaling.take(readings, now)
        return scaling.wanted


# -- outages ----------------------------------------------------------------------------------------------------------


class Outages:
    """Outages of the models of a fleet: since when none of a model's engines may be given calls, while one is expected
    back."""

    def __init__(self, fleet: Fleet) -> None:
        self.since: dict[str, float] = {}
        self._fleet = fleet

    def look(self, model: str, now: float) -> None:
        """Note whether an outage of the model has begun or is over."""
        if self._lasts(model):
            self.since.setdefault(model, now)
        elif self.since:
            self.since.pop(model, None)

    def held_until(self, model: str, now: float, hold: float) -> float:
        """Time when calls that wait for an engine of the model to come back are given up, `hold` seconds after the
        outage began. Negative infinity if an engine may receive calls, or if no engine is expected back."""
        return self.since.get(model, now) + hold if self._lasts(model) else -math.inf

    def _lasts(self, model: str) -> bool:
        """Whether no engine may be given calls for the model, and one is expected back."""
        return not self._fleet.serves(model) and any(not engine.leaving for engine in self._fleet.serving(model))
