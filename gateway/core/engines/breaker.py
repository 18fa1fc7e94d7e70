"""Circuit breaker of one engine: no call waits for the failures of an engine that is known to fail.

CLOSED takes every call. `failures` in a row, or more than ERROR_RATE of at least RATED calls within WINDOW, trip it.
OPEN takes none for `open_for` seconds, twice as long each time it relapses, LONGEST times that at most. Then it is
HALF_OPEN, where one probe at a time finds out: PROBES good ones close it, a bad one opens it again (Nygard,
"Release It!"). TRANSITIONS is all there is; anything else raises and changes nothing.

A call is known by the token that `sent` gave it. The token is worth something only in the state it was given in: calls
of before a trip, which fail late and all together, neither open an engine that is well again nor give up its probe.
No probe blocks the next for good. The next may go at the engine's first byte, at the call's ending of whatever kind,
at every change of state, and at the latest when a probe has said nothing for LONGEST times `open_for`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from gateway.core.checkpoint import SavedBreaker
from gateway.core.policy.traffic import Breaker
from gateway.core.recent_calls import RecentCalls


class BreakerState(Enum):
    """Values are the metric label."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


# Names of the module: to look a member up in its Enum takes 50 ns, as long as all the rest of `allows`.
CLOSED, OPEN, HALF_OPEN = BreakerState

TRANSITIONS: dict[BreakerState, dict[str, BreakerState]] = {
    CLOSED: {"trip": OPEN},
    OPEN: {"elapse": HALF_OPEN},
    HALF_OPEN: {"recover": CLOSED, "relapse": OPEN},
}


class IllegalTransition(Exception):
    """An event that the table does not have in this state: a mistake of ours."""


def next_state(state: BreakerState, event: str) -> BreakerState:
    """State that follows `state` after `event`. Raises IllegalTransition."""
    found = TRANSITIONS[state].get(event)
    if found is None:
        raise IllegalTransition(f"{event!r} in state {state.value}: it has {', '.join(TRANSITIONS[state])}")
    return found


class Ending(Enum):
    """Verdict of a call's end on its engine. NEUTRAL: none, because the call was cancelled, or refused for lack of
    room."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"


SUCCESS, FAILURE, NEUTRAL = Ending

# By the engine's status; None: it sent none in time, or the connection failed. Its 4xx is an answer of a sane engine.
ENDINGS: dict[int | None, Ending] = {
    **dict.fromkeys(range(100, 500), SUCCESS),
    **dict.fromkeys(range(500, 600), FAILURE),
    429: NEUTRAL,
    501: NEUTRAL,  # vLLM's for options of a request that it does not have
    503: NEUTRAL,
    None: FAILURE,
}

ERROR_RATE = 0.5  # share of failed calls above which it opens
RATED = 20  # calls in the window below which the share of failures does not count
PROBES = 3  # good ones in a row that close it
LONGEST = 12  # times `open_for` that it stays open at most: a minute, of 5 s
PANIC = 0.5  # share of the fleet above which open breakers are ignored; Envoy's default
CALLS_NEEDED = 10  # a share of fewer says more of one call than of the engines
UNCOUNTED = 0  # the token of a call that went to an engine its breaker would not have sent it to
MOST_DOUBLINGS = 4  # past LONGEST
LONGEST_PAUSE = 86_400.0  # seconds that an engine may ask for


def ending_of(status: int | None) -> Ending:
    """Verdict of an answer with `status` on its engine; None: a transport error, or no first byte in time."""
    return ENDINGS.get(status, FAILURE)


def panicked(open_: int, total: int) -> bool:
    """Whether more than PANIC of the fleet is open: then its breakers are ignored, since sending all calls to what
    is left would break that too, and a fault so common is rarely the engines' own (Envoy's panic threshold)."""
    return open_ > PANIC * total


class CircuitBreaker:
    """`allows` before an engine is chosen, `sent` when a call is given to it, `ended` once when it is over.

    `allows` is a question and changes nothing. `advance` and the calls' own events move the state.

    `rate` is its calls of the last seconds, of which failures are marked.

    `since` is when it last changed; `broken_at`: when the failures began that opened it; `failing_at`: when the first
    of the last failures in a row ended; -inf: never. `transitions` counts by the state that was entered; `reopened` is
    how often it has relapsed since it was last closed.
    """

    def __init__(self, policy: Breaker) -> None:
        self.policy = policy
        self.rate = RecentCalls()
        self._period = self._serial = 1  # the first token of this state, the last one given in any
        self._probe = 0  # the token whose first byte is awaited, 0: none is out
        self._probe_at = -math.inf
        self.state = CLOSED
        self.since = self.broken_at = self.failing_at = -math.inf
        self.transitions = {state.value: 0 for state in BreakerState}
        self.paused_until = -math.inf  # the engine has asked for no calls before
        self.failures = 0  # in a row, while CLOSED
        self.probes = 0  # good ones, while HALF_OPEN
        self.reopened = 0

    @property
    def probe_at(self) -> float:
        """Time when an OPEN breaker lets a probe through: `open_for` x 2^n after it opened, at most x LONGEST, and no
        earlier than the engine has asked for."""
        doubled = min(1 << min(self.reopened, MOST_DOUBLINGS), LONGEST)
        return max(self.paused_until, self.since + self.policy.open_for * doubled)

    def allows(self, now: float) -> bool:
        """Whether a call may go to this engine."""
        if self.state is CLOSED:
            return True
        if self.state is OPEN:
            return now >= self.probe_at
        return not self._probe or now - self._probe_at >= self.policy.open_for * LONGEST

    def advance(self, now: float) -> None:
        """Time has passed: OPEN for long enough becomes HALF_OPEN; calls older than the window are forgotten."""
        if self.state is OPEN and now >= self.probe_at:
            self._move("elapse", now)
        self.rate.advance(now)

    def sent(self, now: float) -> int:
        """A call is given to the engine: its token. While HALF_OPEN, the first is the probe.

        A call that `allows` would not have sent (breakers are ignored when too many are open) is not counted.
        """
        if self.state is CLOSED:
            return self._period
        if not self.allows(now):
            return UNCOUNTED
        self.advance(now)
        self._serial += 1
        self._probe, self._probe_at = self._serial, now
        return self._probe

    def first_byte(self, token: int) -> None:
        """The engine has begun to answer: the next probe may go while this one's answer is still being written."""
        if token == self._probe:
            self._probe = 0

    def ended(self, token: int, ending: Ending, now: float) -> None:
        """Record how a call ended, once for each call. A call from before the last change of state has no effect."""
        if token < self._period:
            return
        if token == self._probe:
            self._probe = 0
        if ending is NEUTRAL:
            return
        if self.state is CLOSED:
            if ending is SUCCESS:
                self.rate.count(now)
                self.failures = 0
                return
            self.rate.count(now)
            self.rate.mark()
            if not self.failures:
                self.failing_at = now
            self.failures += 1
            policy, rate = self.policy, self.rate
            if self.failures >= policy.failures or (rate.calls >= RATED and rate.marked > ERROR_RATE * rate.calls):
                self._move("trip", now)
        elif ending is FAILURE:
            self._move("relapse", now)
        else:
            self.probes += 1
            if self.probes >= PROBES:
                self._move("recover", now)

    def stalled(self, now: float) -> None:
        """The engine works on none of its calls: it gets no more but probes, whatever those before have told."""
        if self.state is not OPEN:
            self._move("trip" if self.state is CLOSED else "relapse", now)

    def pause(self, seconds: float, now: float) -> None:
        """Open for so many seconds at least, up to LONGEST_PAUSE: the engine has asked for it (Retry-After)."""
        self.stalled(now)
        self.paused_until = max(self.paused_until, now + min(seconds, LONGEST_PAUSE))

    def checkpoint(self, now: float) -> SavedBreaker:
        """State of the breaker for the next decider, without the calls within the window."""
        age = None if self.since == -math.inf else max(0.0, now - self.since)
        return SavedBreaker(self.state.value, age, self.failures, self.probes, self.reopened)

    def restore(self, saved: SavedBreaker, then: float) -> None:
        """Go on from a checkpoint of `then`. Calls that were sent before mean nothing any more."""
        self.state = BreakerState(saved.state)
        self.since = self.broken_at = -math.inf if saved.age is None else then - saved.age
        self.failures, self.probes, self.reopened = saved.failures, saved.probes, saved.reopened
        self._serial += 1
        self._period = self._serial
        self._probe = 0

    def _move(self, event: str, now: float) -> None:
        self.state = next_state(self.state, event)
        self.since = now
        if event == "trip":
            self.broken_at = self.failing_at if self.failures else now
        self.transitions[self.state.value] += 1
        self._serial += 1
        self._period = self._serial
        self._probe = self.failures = self.probes = 0
        if event == "relapse":
            self.reopened += 1
        elif event == "recover":
            self.reopened = 0
            self.rate = RecentCalls()


def errors_of(breakers: Sequence[CircuitBreaker]) -> float | None:
    """The share of the calls of these engines that failed lately; None: fewer than CALLS_NEEDED calls."""
    calls = sum([breaker.rate.calls for breaker in breakers])
    failures = sum([breaker.rate.marked for breaker in breakers])
    return failures / calls if calls >= CALLS_NEEDED else None
