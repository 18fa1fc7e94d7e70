"""Runs of one load under rules of eviction: ours, LRU and Belady's.

Four models share memory for two; their calls are Poisson, Zipf over the models and exponential in length. *Belady* is
the same manager with the future known: the model whose next call is farthest makes room. *LRU* is the same one again
with last use alone, and nothing kept from eviction.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import random
from collections.abc import Callable, Sequence

import msgspec

from loadtest.lab.residency.callers import CallOutcome
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted, file, opened
from loadtest.lab.rows import OnProgress, percent
from loadtest.report.stats import quantile
from loadtest.simulate import vtime
from sidecar.core.model_state import ModelState
from sidecar.residency.manager import HOT

NAMES = "abcd"
ZIPF = (1.0, 1 / 2, 1 / 3, 1 / 4)
MODEL = Model(weights=6 * GIB, claim=11 * GIB)  # 13.2 s to start; sleeps in 0.84 s and wakes in 0.84 s
ROOM = 26 * GIB  # for two of them awake and the others asleep
WAITED = 0.01  # seconds: less is no load

Warmth = Callable[[ModelState, float], float]


class PlannedCall(msgspec.Struct, frozen=True):
    """One call, `at` seconds after the start, that an engine needs `seconds` for."""

    at: float
    model: str
    seconds: float


class ResidencyRun(msgspec.Struct):
    """One run: its answers, and how many models were loaded (started or woken) in how many seconds."""

    answers: list[CallOutcome]
    loads: int
    seconds: float

    @property
    def waits(self) -> list[float]:
        return [answer.waited for answer in self.answers]

    @property
    def share(self) -> float:
        """Of the calls that waited."""
        return sum(wait > WAITED for wait in self.waits) / len(self.waits)

    @property
    def mean(self) -> float:
        return sum(self.waits) / len(self.waits)

    def words(self) -> str:
        return f"{percent(self.share)}, {self.mean:.2f} s, {quantile(self.waits, 0.99):.1f} s"


def zipf(seed: int, rate: float, calls: int, seconds: float) -> list[PlannedCall]:
    rng = random.Random(seed)  # noqa: S311 # a workload, no secrets
    at, planned = 0.0, []
    for _ in range(calls):
        at += rng.expovariate(rate)
        planned.append(PlannedCall(at, rng.choices(NAMES, ZIPF)[0], rng.expovariate(1 / seconds)))
    return planned


def belady(planned: Sequence[PlannedCall]) -> Warmth:
    """Minus the moment of the next call."""
    times = {name: [call.at for call in planned if call.model == name] for name in NAMES}

    def warmth(entry: ModelState, now: float) -> float:
        own = times[entry.name]
        following = bisect.bisect_right(own, now)
        return -own[following] if following < len(own) else -math.inf

    return warmth


def lru(_: ModelState, __: float) -> float:
    """Last use alone."""
    return -math.inf


async def _answered(site: Site, planned: Sequence[PlannedCall], label: str, progress: OnProgress) -> list[CallOutcome]:
    begin, calls = site.now, []
    for call in planned:
        await asyncio.sleep(max(0.0, begin + call.at - site.now))
        calls.append(asyncio.ensure_future(site.gateways[0].call(call.model, call.seconds)))
        progress(label, len(calls) / len(planned))
    return await asyncio.gather(*calls)


def run(
    planned: Sequence[PlannedCall],
    label: str,
    progress: OnProgress,
    *,
    sleep: bool,
    hot: float = HOT,
    warmth: Warmth = ModelState.warmth,
) -> ResidencyRun:
    """Calls that wait as long as it takes, under one rule of eviction."""

    async def whole() -> ResidencyRun:
        fields = dict.fromkeys(NAMES, "" if sleep else "sleep: null")
        async with opened(
            file(NAMES, 1, **fields), dict.fromkeys(NAMES, MODEL), ROOM, hot=hot, warmth=warmth, look_every=5.0
        ) as site:
            answers = await _answered(site, planned, label, progress)
            return ResidencyRun(answers, loads_of(site), site.now)

    return vtime.run(whole())


def loads_of(site: Site) -> int:
    return counted(site, "ready").total() + counted(site, "woken").total()
