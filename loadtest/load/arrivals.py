"""Arrival times of requests: seconds from the start of a run, in order, fixed by a seed before anything is sent.

Every generator is lazy and keeps nothing, so a run of any length takes no memory for its times. The Structs are
sections of scenario files (`scenario.py`), so their annotations are the gateway's kinds of values.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import chain, count, cycle, repeat
from typing import Annotated, ClassVar

import msgspec

from gateway.shared.files.units import Count, Factor, Seconds

Span = Annotated[Seconds, msgspec.Meta(ge=0.001, le=30 * 86_400)]

_PERIODS = {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86_400.0}
_SCALES = {"": 1, "k": 1_000, "M": 1_000_000}


class Rate(msgspec.Struct, frozen=True):
    """Requests over time, written `5/s`, `0.5/s`, `600/min`: `amount` per `period` seconds."""

    pattern: ClassVar[str] = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kM]?)/(s|min|h|day)"
    what: ClassVar[str] = "a rate such as 5/s, 0.5/s, 600/min"

    amount: float
    period: float = 1.0

    @property
    def per_second(self) -> float:
        return self.amount / self.period

    @classmethod
    def parse(cls, text: str) -> Rate | None:
        """The rate, 0 included; None where the text is none."""
        match = re.fullmatch(cls.pattern, text)
        return cls(float(Decimal(match[1]) * _SCALES[match[2]]), _PERIODS[match[3]]) if match else None

    def __str__(self) -> str:
        period = next(name for name, seconds in _PERIODS.items() if seconds == self.period)
        return f"{Decimal(repr(self.amount)).normalize():f}/{period}"


def parse_rate(text: str) -> float:
    """Requests per second, of a command line's `5/s`. Raises ValueError, which says what was expected."""
    rate = Rate.parse(text)
    if rate is None or not rate.amount:
        raise ValueError(f"{text!r} is not {Rate.what}, above 0")
    return rate.per_second


class Gamma(msgspec.Struct, frozen=True):
    """Gaps of a gamma distribution, as `vllm bench serve --burstiness` draws them.

    `rate`: Mean rate.
    `burstiness`: Shape: 1 is Poisson, less is burstier, more is more even; the variance of counts over long windows is
    1/burstiness times their mean.
    """

    rate: Rate
    burstiness: Annotated[Factor, msgspec.Meta(ge=0.01, le=1000)] = 1.0


class Ramp(msgspec.Struct, frozen=True, rename={"start": "from", "end": "to"}):
    """A Poisson process whose rate goes in a straight line from one to another, and stays there.

    `from`: Rate at the start.
    `to`: Rate at the end.
    `over`: Time between both.
    """

    start: Rate
    end: Rate
    over: Span


class RateStep(msgspec.Struct, frozen=True, rename={"lasts": "for"}):
    """A Poisson process for a while.

    `rate`: Rate of this step; 0/s: none.
    `for`: Time of this step.
    """

    rate: Rate
    lasts: Span


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """A closed loop. A bare number is its clients.

    `clients`: Clients, each of which sends its next request or begins its next conversation when the last one ended.
    `within`: Time in which they begin, at equal distances.
    `rounds`: Requests or conversations of each client on average; null: without end.
    """

    shorthand: ClassVar[str] = "clients"

    clients: Annotated[Count, msgspec.Meta(ge=1, le=100_000)]
    within: Annotated[Seconds, msgspec.Meta(ge=0, le=86_400)] = 0.0
    rounds: Annotated[Count, msgspec.Meta(ge=1, le=1_000_000)] | None = None

    def times(self) -> Iterator[float]:
        """Times at which requests are to be sent at the earliest; only answers know the time after that."""
        begin = (self.within * number / self.clients for number in range(self.clients))
        return chain(begin, repeat(0.0) if self.rounds is None else repeat(0.0, self.clients * (self.rounds - 1)))


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """Arrival process of requests: one of these. A bare rate is a Poisson process.

    `poisson`: Independent requests, as those of many people.
    `gamma`: Burstier or more even requests.
    `constant`: Requests at equal distances.
    `ramp`: A rate that grows or falls.
    `steps`: One rate after another, again from the first after the last.
    `closed`: Clients that send their next request after their answer. A slow server gets fewer, so this shows what a
    server can do, and what users feel who work like that, as coding agents.
    """

    shorthand: ClassVar[str] = "poisson"

    poisson: Rate | None = None
    gamma: Gamma | None = None
    constant: Rate | None = None
    ramp: Ramp | None = None
    steps: tuple[RateStep, ...] | None = None
    closed: Closed | None = None

    def times(self, seed: int) -> Iterator[float]:
        """The times, without end unless a rate falls to nothing for good, or a closed loop has `rounds`. Raises
        ValueError where none is given."""
        rng = random.Random(f"arrivals {seed}")  # noqa: S311 # a workload, no secrets
        if self.poisson is not None:
            return poisson(self.poisson.per_second, rng)
        if self.gamma is not None:
            return gamma(self.gamma.rate.per_second, self.gamma.burstiness, rng)
        if self.constant is not None:
            return constant(self.constant.per_second)
        if self.ramp is not None:
            return ramp(self.ramp.start.per_second, self.ramp.end.per_second, self.ramp.over, rng)
        if self.steps is not None:
            return steps(tuple((step.rate.per_second, step.lasts) for step in self.steps), rng)
        if self.closed is not None:
            return self.closed.times()
        raise ValueError("arrivals of no kind")

    def scaled(self, factor: float) -> Arrivals:
        """The same at `factor` times the rate; of a closed loop, as many times the clients."""

        def more(rate: Rate) -> Rate:
            return Rate(round(rate.amount * factor, 9), rate.period)

        return Arrivals(
            poisson=self.poisson and more(self.poisson),
            gamma=self.gamma and Gamma(more(self.gamma.rate), self.gamma.burstiness),
            constant=self.constant and more(self.constant),
            ramp=self.ramp and Ramp(more(self.ramp.start), more(self.ramp.end), self.ramp.over),
            steps=self.steps and tuple(RateStep(more(step.rate), step.lasts) for step in self.steps),
            closed=self.closed
            and msgspec.structs.replace(self.closed, clients=max(1, round(self.closed.clients * factor))),
        )

    def mean_rate(self, seconds: float) -> float:
        """Requests per second expected over the first `seconds`; 0.0 for a closed loop, which has none."""
        if self.ramp is not None:
            over, start, end = self.ramp.over, self.ramp.start.per_second, self.ramp.end.per_second
            ramped = min(seconds, over)
            area = start * ramped + (end - start) / over * ramped**2 / 2.0
            return (area + end * (seconds - ramped)) / seconds
        if self.steps is not None:
            return _stepped(self.steps, seconds) / seconds
        rate = self.poisson or self.constant or (self.gamma and self.gamma.rate)
        return rate.per_second if rate else 0.0


def _stepped(steps: tuple[RateStep, ...], seconds: float) -> float:
    """Requests expected in the first `seconds` of steps that begin again after the last."""
    rounds, rest = divmod(seconds, sum(step.lasts for step in steps))
    expected = 0.0
    for step in steps:
        lasts = min(step.lasts, rest)
        rest -= lasts
        expected += step.rate.per_second * (rounds * step.lasts + lasts)
    return expected


# -- the generators ---------------------------------------------------------------------------------------------------


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Gaps are exponential: the process without memory, whose counts have a variance equal to their mean."""
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def gamma(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gaps of shape `burstiness` and mean 1/rate (vLLM's `get_request`)."""
    at = 0.0
    while True:
        at += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield at


def constant(rate: float) -> Iterator[float]:
    """At equal distances from 0 on; a product each, so that no error adds up."""
    return (number / rate for number in count())


def ramp(start: float, end: float, over: float, rng: random.Random) -> Iterator[float]:
    """A Poisson process of rate 1, its clock bent so that it runs at the ramp's rate: `wanted` is the integral of the
    rate until the next arrival, and the time is where a*t + k*t^2/2 equals it."""
    slope = (end - start) / over
    ramped = (start + end) / 2.0 * over
    wanted = rng.expovariate(1.0)
    while wanted < ramped:
        # The root of the quadratic in the form that survives a slope of 0 and a start of 0.
        yield 2.0 * wanted / (start + math.sqrt(start * start + 2.0 * slope * wanted))
        wanted += rng.expovariate(1.0)
    while end > 0.0:
        yield over + (wanted - ramped) / end
        wanted += rng.expovariate(1.0)


def steps(steps: tuple[tuple[float, float], ...], rng: random.Random) -> Iterator[float]:
    """Pairs of a rate and how long it lasts, again and again: the same bent clock. One rate must be above 0."""
    begin = passed = 0.0
    wanted = rng.expovariate(1.0)
    for rate, lasts in cycle(steps):
        ends = passed + rate * lasts
        while wanted < ends:
            yield begin + (wanted - passed) / rate
            wanted += rng.expovariate(1.0)
        passed = ends
        begin += lasts
