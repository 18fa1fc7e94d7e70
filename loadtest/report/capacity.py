"""Capacity search: the highest rate at which an SLO still holds, by a rule that is stated before the search.

From the first rate on it is doubled while the SLO is kept, or halved while it is missed, at most REACH times. Between
the highest that was kept and the lowest that was missed it is then bisected at the geometric middle until they are
less than PRECISION apart. A rate is kept if all its repeats together keep every SLO and the sender was in time.

Where the sender was late the rate is tried once more, for something else may have kept it. Then the search ends, since
the sender's limit says nothing of the target. It ends too where fewer requests were measured than an SLO's share can be
told of: of the best 99 % nothing is known before there are 100.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from loadtest.report.records import Run
from loadtest.report.summary import missed as not_kept
from loadtest.report.summary import summarise

REACH = 10  # doublings, or halvings
PRECISION = 1.05  # of two rates

RULE = (
    f"doubled or halved from the first rate on until the SLO was kept at one rate and missed at another, then bisected "
    f"until these were less than {PRECISION - 1.0:.0%} apart; kept: by all repeats together, the sender in time"
)


class Tried(msgspec.Struct, frozen=True):
    """Result at one rate. `missed`: a line for each missed part of the SLO; empty: kept. Two fields say why nothing is
    known of the rate: `late`, the sender was late, and `few`, the reason for too few requests."""

    rate: float
    missed: tuple[str, ...]
    late: bool = False
    few: str = ""


class Capacity(msgspec.Struct, frozen=True):
    """`kept` 0.0: no rate that was tried was kept; `missed` infinite: none was missed. `why`: what ended the search
    before its end, if something did."""

    kept: float
    missed: float
    tried: tuple[Tried, ...]
    why: str = ""

    def __str__(self) -> str:
        if not self.kept and math.isinf(self.missed):
            return f"unknown{self._note}"
        if not self.kept:
            return f"less than {self.missed:.3g}/s, where the SLO was missed{self._note}"
        if math.isinf(self.missed):
            return f"at least {self.kept:.3g}/s, where the SLO was kept; no higher rate was missed{self._note}"
        reason = next((tried.missed[0] for tried in self.tried if tried.rate == self.missed and tried.missed), "")
        return f"{self.kept:.3g}/s; at {self.missed:.3g}/s: {reason}{self._note}"

    @property
    def _note(self) -> str:
        return f" ({self.why})" if self.why else ""


def search(first: float, attempt: Callable[[float], Tried | None]) -> Capacity:
    """Find it. `attempt` runs a rate; None: the search is to end, somebody has stopped it."""
    kept, missed = 0.0, math.inf
    tried: list[Tried] = []
    rate = first
    for number in range(10 * REACH):
        if kept and missed / kept <= PRECISION:
            break
        if (not kept or math.isinf(missed)) and number > REACH:
            return Capacity(kept, missed, tuple(tried), f"after {number} rates")
        found = attempt(rate)
        if found is not None and found.late:
            found = attempt(rate)
        if found is None:
            return Capacity(kept, missed, tuple(tried), "broken off")
        tried.append(found)
        if found.late or found.few:
            return Capacity(kept, missed, tuple(tried), found.few or f"the sender cannot do {rate:.3g}/s")
        if found.missed:
            missed = rate
        else:
            kept = rate
        rate = kept * 2.0 if math.isinf(missed) else missed / 2.0 if not kept else math.sqrt(kept * missed)
    return Capacity(kept, missed, tuple(tried))


def verdict(rate: float, made: Run) -> Tried:
    """Judge a rate by its run."""
    summary = summarise(made)
    lines = tuple(not_kept(made.slos, summary))
    least = needed(slo.attainment for slo in made.slos)
    measured = summary.total.offered
    few = f"{measured} requests at {rate:.3g}/s, and {least} are needed to tell: give a longer --duration"
    return Tried(rate, lines, not summary.valid, few if measured < least else "")


def needed(shares: Iterable[float]) -> int:
    """Return the least number of requests that must be measured to tell these shares from all requests."""
    return max((math.ceil(round(1.0 / (1.0 - share), 6)) for share in shares if share < 1.0), default=1)
