"""Mode of one model (brownout, load shedding): classes and long prompts are refused while its engines are overloaded.

    NORMAL <-> TIGHT <-> BROWNOUT <-> CLOSED

One step at a time, both ways, and no step before the dwell time of the mode it is in has passed (NORMAL has none).
Up: any threshold of `enter` is reached, of the next mode or of a worse one. Down: no threshold of its own `enter` or
of a worse one is reached, and every signal that its `leave` names is below (or zero: nothing is below zero).
A signal that is not known reaches nothing. It holds a mode for UNKNOWN_HOLDS seconds after it was last known: one lost
sample ends no brownout, and a model whose calls have all ceased comes back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Literal

import msgspec

from gateway.core.policy.traffic import ModeRule, Modes, Threshold
from gateway.core.quantile import nearest_rank

WINDOW = 10.0  # seconds of which `Window` tells
SAMPLES = 64  # first bytes it remembers at most
SAMPLES_NEEDED = 10  # below this a share or a p90 says more of one call than of the engines
UNKNOWN_HOLDS = 10.0  # seconds
SIGNALS = ("kv", "waiting", "ttft", "errors")


class Mode(Enum):
    """Mode of load shedding, in order: a greater mode refuses more. `str` is the metric label and the policy's word."""

    NORMAL = 0
    TIGHT = 1
    BROWNOUT = 2
    CLOSED = 3

    # Members are dict keys; Enum's own __hash__ is a Python function that hashes the name.
    __hash__ = object.__hash__

    # Python turns > and <= round to these two. `value` would do, were it not a property that takes three times as long.
    def __lt__(self, other: Mode) -> bool:
        return self._value_ < other._value_

    def __ge__(self, other: Mode) -> bool:
        return self._value_ >= other._value_

    def __str__(self) -> str:
        return self.name.lower()


_MODES = tuple(Mode)
NORMAL, TIGHT, BROWNOUT, CLOSED = _MODES

# `enter`: a threshold of the next mode or of a worse one is reached. `leave`: this mode's own reasons are over.
TRANSITIONS: dict[Mode, dict[Literal["enter", "leave"], Mode]] = {
    NORMAL: {"enter": TIGHT},
    TIGHT: {"enter": BROWNOUT, "leave": NORMAL},
    BROWNOUT: {"enter": CLOSED, "leave": TIGHT},
    CLOSED: {"leave": BROWNOUT},
}


class Signals(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Signals of one model's engines; None: not known. `kv`: mean share of KV cache in use. `waiting`: mean calls
    waiting inside an engine. `ttft`: p90 of time to first token over the class's target. `errors`: share of failed
    calls."""

    kv: float | None = None
    waiting: float | None = None
    ttft: float | None = None
    errors: float | None = None


class ModelMode:
    """Mode of one model. `why`: the signals of the last step, empty before the first. `transitions`: counts by (from,
    to)."""

    def __init__(self, rules: Modes) -> None:
        self.mode = Mode.NORMAL
        self.since = -math.inf
        self.why = ""
        self._known_at = dict.fromkeys(SIGNALS, -math.inf)
        self.apply(rules)

    def apply(self, rules: Modes) -> None:
        """Go by `rules` from now on; the mode stays what it is."""
        self._rules = (rules.tight, rules.brownout, rules.closed)

    def step(self, signals: Signals, now: float) -> bool:
        """Take a reading in; True: the mode has changed, by one."""
        for name in SIGNALS:
            if getattr(signals, name) is not None:
                self._known_at[name] = now
        level = self.mode.value
        own = self._rules[level - 1] if level else None
        if own is not None and now - self.since < own.dwell:
            return False
        for rule in self._rules[level:]:
            why = _reached(rule.enter, signals)
            if why:
                self._move("enter", why, now)
                return True
        if own is None or _reached(own.enter, signals):
            return False
        why = self._below(own.leave, signals, now)
        if why:
            self._move("leave", why, now)
        return bool(why)

    def _below(self, leave: Threshold, signals: Signals, now: float) -> str:
        """Describe the signals that `leave` names if all are below their thresholds; empty if one is not. An unknown
        signal counts as below only after UNKNOWN_HOLDS seconds."""
        words = []
        for name in SIGNALS:
            threshold, value = getattr(leave, name), getattr(signals, name)
            if threshold is None:
                continue
            if value is None:
                if now - self._known_at[name] < UNKNOWN_HOLDS:
                    return ""
                words.append(f"{name} unknown")
            elif value >= threshold and value > 0:
                return ""
            else:
                below = f" < {_short(threshold)}" if value < threshold else ""
                words.append(f"{name} {_short(value)}{below}")
        return ", ".join(words) or "nothing keeps it"

    def _move(self, event: Literal["enter", "leave"], why: str, now: float) -> None:
        mode = TRANSITIONS[self.mode][event]
        self.mode, self.since, self.why = mode, now, why

    def refuses(self, class_name: str, order: Sequence[str]) -> str | None:
        """Reason to refuse a call now, in words that follow "under pressure:"; None if the mode admits the call.

        The rules of the milder modes apply too. `order`: the classes, most important first. The default `refuse` never
        includes the most important class, even if it is the only class.
        """
        for level in range(self.mode._value_, 0, -1):
            if bars(self._rules[level - 1], class_name, order):
                return f"mode {_MODES[level]} refuses class {class_name!r}"
        return None


def bars(rule: ModeRule, class_name: str, order: Sequence[str]) -> bool:
    """Whether a mode's own rule refuses a class, whatever the call. `order`: the classes, most important first."""
    if rule.refuse == "all_but_most_important":
        return class_name not in order[:1]
    return class_name in (order[1:][-1:] if rule.refuse == "least_important" else rule.refuse)


def _reached(enter: Threshold, signals: Signals) -> str:
    """The first threshold that is reached, in words; empty: none is."""
    for name in SIGNALS:
        threshold, value = getattr(enter, name), getattr(signals, name)
        if threshold is not None and value is not None and value >= threshold:
            return f"{name} {_short(value)} >= {_short(threshold)}"
    return ""


def _short(value: float) -> str:
    return f"{round(value, 3):.10g}"


class Window:
    """The signal that is made of first bytes, those of the last WINDOW seconds. O(1) per event."""

    def __init__(self) -> None:
        self._first_bytes: deque[tuple[float, float]] = deque(maxlen=SAMPLES)  # when, ratio

    def first_byte(self, ratio: float, now: float) -> None:
        """A first byte came after `ratio` times its class's target."""
        self._first_bytes.append((now, ratio))

    def ttft(self, now: float) -> float | None:
        """The p90 of the ratios; None: fewer than SAMPLES_NEEDED first bytes."""
        since = now - WINDOW
        ratios = sorted([ratio for at, ratio in self._first_bytes if at > since])
        return nearest_rank(ratios, 0.9) if len(ratios) >= SAMPLES_NEEDED else None
