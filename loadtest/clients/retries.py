"""Retries of clients, the same in virtual time and on sockets: patience with a try, and the wait before another.

A client tries again as openai-python does: on 408, 409, 429, 5xx, failed connections and its own time-out, unless
`x-should-retry` says otherwise. It waits as long as `retry-after-ms` or `retry-after` says (up to 60 s), or else 0.5 s,
doubled with each try and jittered. Once an answer has begun well it never tries again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import msgspec

LONGEST_ADVICE = 60.0  # seconds; openai-python ignores a longer Retry-After
NOTHING_SAID = -1.0
DO_NOT = -2.0
WELL = ("ok", "left", "unfinished", "interrupted")  # outcomes after which nobody wants an answer any more


class Clients(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of clients. `retries`: at most, per call; `exact`: only where a Retry-After was given.

    `timeout`: seconds after which a client gives up a try; `patience`: instead of it, by class. `leaves`: the share of
    tries whose client goes away, after a time that is exponential with the mean `leaves_after`.
    """

    retries: int = 2
    exact: bool = False
    timeout: float = math.inf
    patience: Mapping[str, float] = {}
    leaves: float = 0.0
    leaves_after: float = 3.0

    def patience_of(self, class_name: str) -> float:
        """Seconds after which a client of this class gives up a try."""
        return self.patience.get(class_name, self.timeout)

    def wait_before_retry(
        self, number: int, outcome: str, status: int, advised: float, rng: random.Random
    ) -> float | None:
        """Seconds until the next try, after try `number` (1 is the first) ended with `status`, 0 for none; None: there
        is none."""
        if outcome in WELL or number > self.retries or advised == DO_NOT:
            return None
        if status == 200 or (0 < status < 500 and status not in (408, 409, 429)):
            return None
        if 0.0 < advised <= LONGEST_ADVICE:
            return advised
        if self.exact:
            return None
        return float(min(8.0, 0.5 * 2.0 ** (number - 1)) * (1.0 - 0.25 * rng.random()))


def advice(fields: Mapping[bytes, bytes]) -> float:
    """Seconds that an answer's head says to wait; NOTHING_SAID; DO_NOT come back."""
    if fields.get(b"x-should-retry") == b"false":
        return DO_NOT
    for name, unit in ((b"retry-after-ms", 1000.0), (b"retry-after", 1.0)):
        try:
            return float(fields[name]) / unit
        except (KeyError, ValueError):  # a date, which no engine sends, is as good as nothing
            continue
    return NOTHING_SAID
