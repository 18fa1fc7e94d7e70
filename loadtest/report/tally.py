"""Tally of results, one at a time as they come, in bounded memory.

A `Tally` is of one repeat of one target. Its size grows with classes, tenants and seconds, not with requests: ten
million results need no more than a hundred thousand do. Tallies can be merged, in any order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from loadtest.report.records import NOT_SENT, RequestResult, Run, Slo, Window
from loadtest.report.sketch import Sketch
from loadtest.report.stats import OK, consistent, latency_of, met, slo_of

REASONS = 100  # of one class; servers' words are theirs to choose, and no memory may depend on them
# How a request ended whose times cannot be: its sender is not believed, but it does not cost anyone the report.
INCONSISTENT = ("inconsistent", "answered before it was asked")
BINS = 240  # of a timeline


class Attainment(msgspec.Struct, gc=False):
    """SLO attainment: requests that were offered, and those of them that met their SLO."""

    offered: int = 0
    met: int = 0


class ClassTally(msgspec.Struct):
    """Counts of one class, measured part only. Sketches hold seconds, of requests that were ok."""

    offered: int = 0
    ok: int = 0
    met: int = 0
    tries: int = 0  # at least one for each that was sent
    uncounted: int = 0  # streams that were ok and said nothing of their tokens: they have no TPOT
    prompt_tokens: int = 0  # here and below: of requests that were ok
    completion_tokens: int = 0
    cached_tokens: int = 0
    outcomes: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)  # by outcome and reason
    ttft: Sketch = msgspec.field(default_factory=Sketch)
    tpot: Sketch = msgspec.field(default_factory=Sketch)
    itl: Sketch = msgspec.field(default_factory=Sketch)
    e2e: Sketch = msgspec.field(default_factory=Sketch)
    ttft_from_send: Sketch = msgspec.field(default_factory=Sketch)  # here and below: vLLM's own, from the send time
    e2e_from_send: Sketch = msgspec.field(default_factory=Sketch)

    def add(self, result: RequestResult, slo: Slo | None) -> bool:
        """Count one request; whether it was ok and met its SLO."""
        self.offered += 1
        self.tries += result.tries
        latency = latency_of(result, result.at) if result.outcome == OK else None
        if latency is None:
            self._end(result.outcome, result.reason)
            return False
        if not consistent(result, latency):
            self._end(*INCONSISTENT)
            return False
        self._end(result.outcome, result.reason)
        late = result.sent - result.at
        self.ok += 1
        self.prompt_tokens += result.prompt_tokens
        self.completion_tokens += result.completion_tokens
        self.cached_tokens += result.cached_tokens
        self.ttft.add(latency.ttft)
        self.e2e.add(latency.e2e)
        self.ttft_from_send.add(max(0.0, latency.ttft - late))
        self.e2e_from_send.add(max(0.0, latency.e2e - late))
        self.itl.extend(result.gaps)
        if latency.tpot is not None:
            self.tpot.add(latency.tpot)
        elif result.first_token and not result.completion_tokens:
            self.uncounted += 1
        good = met(slo, latency)
        self.met += good
        return good

    def _end(self, outcome: str, reason: str) -> None:
        if (outcome, reason) not in self.outcomes and len(self.outcomes) >= REASONS:
            reason = "(other)"
        self.outcomes[outcome, reason] += 1

    def merge(self, other: ClassTally) -> None:
        """All that `other` has counted, too."""
        for name, counted in msgspec.structs.asdict(other).items():
            own = getattr(self, name)
            if isinstance(own, Sketch):
                own.merge(counted)
            elif isinstance(own, Counter):
                own.update(counted)
            else:
                setattr(self, name, own + counted)


class Timeline:
    """Offered and met requests of every class over the whole run, its warm-up and cool-down too, by intended time.

    Never more than `most`: when a request lies beyond the last, bins are joined in pairs and `width` doubles.
    """

    def __init__(self, most: int = BINS) -> None:
        self.most = most
        self.width = 1.0  # seconds
        self.bins: dict[str, list[Attainment]] = {}

    def add(self, class_name: str, at: float, good: bool) -> None:
        """Count one request of a class, intended at `at`."""
        while at >= self.width * self.most:
            self._double()
        bins = self.bins.setdefault(class_name, [])
        place = int(at / self.width)
        while len(bins) <= place:
            bins.append(Attainment())
        bins[place].offered += 1
        bins[place].met += good

    def _double(self) -> None:
        self.width *= 2.0
        for bins in self.bins.values():
            for left, right in zip(bins[::2], bins[1::2], strict=False):
                left.offered += right.offered
                left.met += right.met
            del bins[1::2]

    def merge(self, other: Timeline) -> None:
        """All that `other` has counted, too, in the wider bins of both or wider ones still."""
        longest = max((len(bins) for bins in other.bins.values()), default=0) * other.width
        while self.width < other.width or longest > self.width * self.most:
            self._double()
        for class_name, theirs in other.bins.items():
            bins = self.bins.setdefault(class_name, [])
            joined = round(self.width / other.width)  # of their bins in one of ours
            bins.extend(Attainment() for _ in range(math.ceil(len(theirs) / joined) - len(bins)))
            for number, more in enumerate(theirs):
                bins[number // joined].offered += more.offered
                bins[number // joined].met += more.met


class Tally:
    """Counts of one repeat: `add` every result, in any order, whatever became of it."""

    def __init__(self, window: Window, slos: Sequence[Slo] = ()) -> None:
        self.window = window
        self.slos = slos
        self.classes: dict[str, ClassTally] = {}
        self.tenants: dict[str, Attainment] = {}
        self.lag = Sketch()  # of requests that were sent, or were due
        self.timeline = Timeline()
        self.last = 0.0  # the latest intended time

    def add(self, result: RequestResult) -> None:
        """Count one result."""
        at, class_name = result.at, result.class_name
        slo = slo_of(self.slos, class_name)
        self.last = max(self.last, at)
        if at not in self.window:
            in_time = result.outcome == OK and met(slo, latency_of(result, at))
            self.timeline.add(class_name, at, in_time)
            return
        part = self.classes.get(class_name)
        if part is None:
            part = self.classes[class_name] = ClassTally()
        good = part.add(result, slo)
        self.timeline.add(class_name, at, good)
        tenant = self.tenants.get(result.tenant)
        if tenant is None:
            tenant = self.tenants[result.tenant] = Attainment()
        tenant.offered += 1
        tenant.met += good
        if result.sent or result.outcome == NOT_SENT:  # which is at least as late
            self.lag.add(max(0.0, (result.sent or result.finished) - at))

    @property
    def seconds(self) -> float:
        """Seconds of the measured part; up to the last request where nobody knew how long there would be some."""
        ends = self.window.ends if math.isfinite(self.window.ends) else self.last
        return max(0.0, ends - self.window.warmup)


def tallies_of(run: Run) -> Sequence[Tally]:
    """Tally of each repeat. Made of the results where there are none yet, and kept in the run."""
    if not run.tallies:
        found: dict[int, Tally] = {}
        for result in run.results:
            tally = found.get(result.repeat)
            if tally is None:
                tally = found[result.repeat] = Tally(run.window, run.slos)
            tally.add(result)
        run.tallies = [found[repeat] for repeat in sorted(found)] or [Tally(run.window, run.slos)]
    return run.tallies
