"""Deadline prediction: a call's wait and service against the targets of its class.

    wait    = work that goes first / measured drain rate          (Little's law: L = lambda W)
    service = ttft + expected output tokens x time per output token

There are two promises: the first token by `ttft_by`, the last by `deadline`. A call is refused on arrival when its wait
alone breaks the first, or wait and service break the second. Before it runs it is dropped when what is left of its time
no longer suffices (load shedding). An answer that would come late is work taken from calls that could still be in time:
in simulation dropping it lifts goodput under overload from about half of capacity to nearly all of it.

A guess refuses nobody: expected output is what such calls have really written, and an idle engine takes what comes.
Rates are read at any time and change nothing; `advance` takes what has come into their averages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gateway.core.checkpoint import SavedDrain
from gateway.core.request.call import Call

WINDOW = 5.0  # seconds over which the drain rate is averaged
SHARES = 15.0  # seconds over which a class's share of it is: longer, since it is made of fewer calls
EVERY = 0.1  # seconds at least between two readings of it
RESIDENCE_WEIGHT = 0.05  # of one hold in their mean duration
MARGIN = 0.05  # of the target for a first token: the way to the client, and what no prediction is exact to
LEAST_SHARE = 0.01  # of the drain that a class is believed to get


class TokenRate:
    """Tokens per second, averaged with weights that fall by e in `window` seconds.

    `tokens`: those since the last `advance`; the owner adds to it."""

    def __init__(self, now: float, window: float = WINDOW) -> None:
        self._rate = 0.0
        self._window = window
        self.tokens = 0
        self._at = now

    def rate(self, now: float) -> float:
        """Tokens per second; 0 where nothing has come back yet."""
        since = now - self._at
        if since < EVERY:
            return self._rate
        kept = math.exp(-since / self._window) if self._rate else 0.0  # from idleness: what was seen, at once
        return self._rate * kept + self.tokens / since * (1.0 - kept)

    def advance(self, now: float) -> None:
        """Take the tokens since the last time into the average, and begin to count anew."""
        if now - self._at >= EVERY:
            self._rate, self.tokens, self._at = self.rate(now), 0, now

    def restore(self, rate: float, then: float) -> None:
        """Go on from a rate of `then`."""
        self._rate, self._at = rate, then


class Drain:
    """Drain rate of one model: tokens that come back per second, in all and by class.

    The rate is what came back lately, or what is held over the time a hold lasts, whichever is more: by Little's law
    they are equal in a steady state, but after idleness only the second tells what the engines can do.
    """

    def __init__(self, now: float) -> None:
        self._rate = TokenRate(now)
        self._by_class: dict[str, TokenRate] = {}
        self.held = 0  # tokens
        self.given = 0  # tokens of all holds so far
        self._lasted = self._tokens = 0.0  # means over holds: tokens x seconds, tokens

    def taken(self, tokens: int) -> None:
        """A hold of `tokens` began."""
        self.held += tokens
        self.given += tokens

    def returned(self, class_name: str, tokens: int, lasted: float, now: float) -> None:
        """A hold of `tokens` came back after `lasted` seconds."""
        self.held -= tokens
        self._rate.tokens += tokens
        rate = self._by_class.get(class_name)
        if rate is None:
            rate = self._by_class[class_name] = TokenRate(now, SHARES)
        rate.tokens += tokens
        # Weighted by tokens: a mean over held tokens, as Little's law has it.
        self._lasted += RESIDENCE_WEIGHT * (tokens * lasted - self._lasted)
        self._tokens += RESIDENCE_WEIGHT * (tokens - self._tokens)

    def advance(self, now: float) -> None:
        """Time has passed, and a prediction is about to be asked for."""
        self._rate.advance(now)
        for rate in self._by_class.values():
            rate.advance(now)

    def checkpoint(self, now: float) -> SavedDrain:
        """The rates of now, for the next decider."""
        by_class = {name: rate.rate(now) for name, rate in self._by_class.items()}
        return SavedDrain(self._rate.rate(now), by_class, max(0.0, self._lasted), self._tokens)

    def restore(self, saved: SavedDrain, then: float) -> None:
        """Go on from an earlier decider's rates of `then`."""
        self._rate.restore(saved.rate, then)
        for name, rate in saved.by_class.items():
            self._by_class.setdefault(name, TokenRate(then, SHARES)).restore(rate, then)
        self._lasted, self._tokens = saved.lasted, saved.tokens

    def rate(self, now: float) -> float:
        """Tokens per second; 0 where nothing has come back yet."""
        could = self.held * self._tokens / self._lasted if self._lasted else 0.0
        return max(self._rate.rate(now), could)

    def wait(self, tokens: float, now: float) -> float:
        """Seconds until `tokens` have come back; 0 where no rate is known: then shedding late is the judge."""
        rate = self.rate(now)
        return tokens / rate if rate > 1.0 else 0.0

    def rate_of(self, class_name: str, fair: float, passing: Mapping[str, float], now: float) -> float:
        """Tokens per second that a class is served, if those who compete now go on to; 0 where no rate is known.

        `fair`: its share by weight among the classes that wait, of what those leave who do not (`passing`): these are
        served all they ask for, and go on to, as far as their weights (as in `Queues.passing`) let them: whoever waits
        has its turn beside them. It has that, or what it has had lately where that is more.
        """
        rate = self.rate(now)
        if rate <= 1.0:
            return 0.0
        had = {name: self._had(name, now) for name in passing}
        before = sum([share for name, share in had.items() if passing[name] == math.inf])
        beside = sum([passing[name] for name, share in had.items() if share > LEAST_SHARE and passing[name] < math.inf])
        least = fair * (1.0 - before) / (1.0 + fair * beside)
        left = 1.0 - sum(had.values())
        return rate * min(1.0, max(LEAST_SHARE, fair * left, least, self._had(class_name, now)))

    def _had(self, class_name: str, now: float) -> float:
        """A class's share of the tokens that came back lately."""
        lately = self._by_class.get(class_name)
        if lately is None:
            return 0.0
        return lately.rate(now) / max(1.0, sum([each.rate(now) for each in self._by_class.values()]))


def service(call: Call, ttft: float, tpot: float) -> float:
    """Seconds from dispatch to the last token: sequences of one call are written side by side."""
    return ttft + call.expected_tokens * tpot


def breaks_a_promise(call: Call, start: float, ttft: float, reading: float, tpot: float) -> bool:
    """Whether a call that starts at `start` misses a target: by its wait alone, or by wait and service."""
    return start > call.ttft_by or too_late(call, start, ttft, reading, tpot)


def too_late(call: Call, start: float, ttft: float, reading: float, tpot: float) -> bool:
    """Whether a call dispatched at `start` breaks a promise: `ttft` is its predicted time to first token, of which
    `reading` is for its own prompt.

    Under overload a call runs when hardly any of its time is left, so the target has a margin. A prompt that takes
    half of the target to read on an idle engine cannot be hurried by anyone: only its waiting counts against
    `ttft_by`.
    """
    if start + service(call, ttft, tpot) > call.deadline:
        return True
    if call.ttft_by == math.inf:
        return False
    target = call.ttft_by - call.arrived
    own = reading if reading > target / 2 else 0.0
    return start + ttft - own > call.ttft_by - MARGIN * target
