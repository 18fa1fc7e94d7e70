"""Lifecycle of one engine. TRANSITIONS and PENDING list every step; anything else raises and changes nothing.

    STOPPED -> STARTING -> RUNNING <-> SLEEPING, any of the last three -> ERROR -> STARTING

`state` is the state of the engine's process, `pending` the operation under way. Orders (start, drain, sleep, wake,
stop, and cancel for an order that nothing was done about yet) change only `pending`. Facts (launched, ready, slept,
woken, stopped, failed, out_of_memory, taught) change `state`, and end the operation that they answer. An ordered stop
outlasts every fact but `stopped`: an engine that becomes ready, falls asleep or fails meanwhile is stopped all the
same.

A failed engine is restarted after `backoff` seconds. After MOST_FAILURES failures in a row the engine rests: during the
pause only an operator can start it, and after the pause the next call does. Running out of memory is the machine's
fault, not the model's, so it does not count as a failure. The plan evicts one more victim for one more try; after that
the engine rests too. A failed start that taught its reason does not count either: a different start follows at once. A
failure within HEALTHY seconds after the engine became ready is in a row with those before.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal


class State(Enum):
    """Values are the metric label and the word in reports."""

    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    SLEEPING = "sleeping"
    ERROR = "error"


class Pending(Enum):
    """Step under way; None: none. Values are the word in reports."""

    START = "start"  # from the decision on, while others make room, until it is ready
    DRAIN = "drain"  # gateways send it nothing more
    SLEEP = "sleep"
    WAKE = "wake"
    STOP = "stop"


STOPPED, STARTING, RUNNING, SLEEPING, ERROR = State
START, DRAIN, SLEEP, WAKE, STOP = Pending

Event = Literal[
    "start", "drain", "sleep", "wake", "stop", "cancel",
    "launched", "ready", "slept", "woken", "stopped", "failed", "out_of_memory", "taught",
]  # fmt: skip

TRANSITIONS: dict[State, dict[Event, State]] = {
    STOPPED: {"start": STOPPED, "cancel": STOPPED, "launched": STARTING},
    STARTING: {
        "stop": STARTING,
        "ready": RUNNING,
        **dict.fromkeys(("failed", "out_of_memory", "taught"), ERROR),
        "stopped": STOPPED,
    },
    RUNNING: {
        **dict.fromkeys(("drain", "cancel", "sleep", "stop"), RUNNING),
        "slept": SLEEPING,
        "failed": ERROR,
        "stopped": STOPPED,
    },
    SLEEPING: {
        **dict.fromkeys(("wake", "cancel", "stop"), SLEEPING),
        "woken": RUNNING,
        "failed": ERROR,
        "out_of_memory": ERROR,
        "stopped": STOPPED,
    },
    ERROR: {**dict.fromkeys(("start", "cancel", "stop"), ERROR), "launched": STARTING, "stopped": STOPPED},
}

# What is pending after an event, by what was before. An engine's sleep may be somebody else's doing: no order precedes.
PENDING: dict[Event, dict[Pending | None, Pending | None]] = {
    "start": {None: START},
    "drain": {None: DRAIN},
    "sleep": {None: SLEEP, DRAIN: SLEEP},
    "wake": {None: WAKE},
    "stop": dict.fromkeys((None, START, DRAIN, SLEEP, WAKE), STOP),
    "cancel": dict.fromkeys((START, DRAIN, WAKE, STOP)),  # a stop, where nothing was done about it yet
    "launched": {START: START},
    "ready": {START: None, STOP: STOP},
    "slept": {None: None, DRAIN: None, SLEEP: None, STOP: STOP},
    "woken": {None: None, WAKE: None, STOP: STOP},
    "stopped": {STOP: None},
    "failed": {**dict.fromkeys((None, START, DRAIN, SLEEP, WAKE)), STOP: STOP},
    "out_of_memory": {START: None, WAKE: None, STOP: STOP},
    "taught": {START: None, STOP: STOP},
}

MOST_FAILURES = 5  # in a row
MOST_STARVED = 2  # times in a row out of memory: the first, and once more after another eviction
MOST_TAUGHT = 8  # times in a row
SHORTEST, LONGEST = 10.0, 300.0  # seconds of backoff
FIRST_REST, LAST_REST = 300.0, 3600.0  # seconds without a try, after the last of the tries in a row
HEALTHY = 300.0  # seconds after which one that got ready has been in order


class IllegalTransition(Exception):
    """An event that the tables do not have in this state: a mistake of ours."""


def after(state: State, pending: Pending | None, event: Event) -> tuple[State, Pending | None]:
    """The state that `event` leads to. Raises IllegalTransition."""
    found = TRANSITIONS[state].get(event)
    if found is None:
        raise IllegalTransition(f"{event!r} in state {state.value}: it has {', '.join(TRANSITIONS[state])}")
    if pending not in PENDING[event]:
        raise IllegalTransition(
            f"{event!r} in state {state.value} with {pending.value if pending else 'nothing'} pending"
        )
    return found, PENDING[event][pending]


def backoff(failures: int) -> float:
    """Seconds to wait after this many failures in a row: min(10 x 2^(n-1), 300); none after none."""
    return min(SHORTEST * 2 ** (failures - 1), LONGEST) if failures else 0.0


def rest(rests: int) -> float:
    """Seconds of the pause after this many rows of failures: min(300 x 2^(n-1), 3600)."""
    return min(FIRST_REST * 2.0 ** (min(rests, 10) - 1), LAST_REST)


class Lifecycle:
    """Lifecycle of one profile's engine. `since`: time of the last change of `state`.

    `failures`, `starved` (out of memory), `taught` and the `rests` that they led to are counted in a row. The row ends
    once an engine that got ready at `ready_at` has been in order for HEALTHY seconds. `last_error`: error of the last
    failure, kept until the engine is ready. An engine found alive when the sidecar starts begins in its present
    `state`.
    """

    def __init__(self, now: float, state: State = STOPPED) -> None:
        self.state = state
        self.pending: Pending | None = None
        self.since = self.ready_at = now
        self.last_error = ""
        self.failures = self.starved = self.taught = self.rests = 0

    def step(self, event: Event, now: float, error: str = "") -> State:
        """Apply a fact or an order, at `now`; `error` in words, of failed and out_of_memory. Returns the state.

        Raises IllegalTransition, with nothing changed.
        """
        state, pending = after(self.state, self.pending, event)
        if event == "ready":
            self.ready_at = now
            self.last_error = ""
        elif event == "start" and self.given_up:
            self.failures = self.starved = self.taught = 0  # somebody asked again: it has all its tries again
        elif event in ("failed", "out_of_memory", "taught"):
            self.last_error = error
            if self.state in (RUNNING, SLEEPING) and now >= self.ready_at + HEALTHY:
                self.failures = self.starved = self.taught = self.rests = 0
            if self.pending is not STOP:  # it was being ended anyway
                self.failures += event == "failed"
                self.starved += event == "out_of_memory"
                self.taught += event == "taught"
                self.rests += self.given_up
        if state is not self.state:
            self.since = now
        self.state, self.pending = state, pending
        return state

    def rested(self, now: float) -> bool:
        """Whether nothing has become of it for as long as it rests at first."""
        return now >= self.since + FIRST_REST

    @property
    def given_up(self) -> bool:
        """Whether it is started again only when somebody asks."""
        return self.failures >= MOST_FAILURES or self.starved >= MOST_STARVED or self.taught >= MOST_TAUGHT

    @property
    def restart_at(self) -> float | None:
        """Time at which an engine in ERROR is started again by itself; None: it is not to be."""
        if self.state is not ERROR or self.pending is not None or self.given_up:
            return None
        return self.since + backoff(self.failures)

    @property
    def rests_until(self) -> float | None:
        """Until when one that has failed too often is not started for calls; None: it has not."""
        return self.since + rest(self.rests) if self.state is ERROR and self.given_up else None
