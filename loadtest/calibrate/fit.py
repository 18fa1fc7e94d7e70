"""Least-squares fit of a latency profile to an engine's observed step times.

Each observation is one line of a linear system: a number of steps, prompt tokens (and pairs of them), decoding
sequences, KV tokens read, and ways through the server around the engine took so many seconds. The system is solved by
weighted least squares: the normal equations (Gauss, 1809), exactly, since there are six unknowns.

Errors count as a share of the fitted time: a tenth is as bad in a short step as in a long one. A share of the observed
time would not do: where that varies by 20 %, constants come out 8 % too small, since steps that were quick by chance
count more. Errors are also weighted by Huber (1964), since a machine pauses now and then. Reweighting goes on until
nothing changes (Holland and Welsch, 1977). A constant below 0 becomes 0, and the others are fitted again without it.

Two constants are not linear: the part of the way into an engine that requests take in turn (`front`), and the part
that they share (`delay`). The simulated engine fits these: it plays bursts and traffic until its first tokens come when
those of the real engine came.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median, stdev

import msgspec

from loadtest.calibrate.observations import Burst, WorkRow
from loadtest.engine.engine import Engine
from loadtest.engine.engine_config import engine_config
from loadtest.engine.latency import Front, Profile
from loadtest.engine.sequence import Sequence as Tokens

NAMES = ("base", "prefill", "decode", "context", "attention", "delay")
SPARE = NAMES.index("attention")  # is 0 where the others can be found without it only
HUBER = 1.345  # of a normal distribution's deviations: 95 % as efficient as least squares where there are no outliers
NORMAL = 1.4826  # a normal distribution's deviation over its median absolute deviation
ROUNDS = 50
MOST_OFF = 4.0  # times, that a fitted time counts as while it is not found yet
HALVINGS = 16  # to 20 us of a second
SURE = 3.0  # standard errors, beyond which it is hardly chance


class Unfit(Exception):
    """The observations do not determine the constants; says why."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a fit to `rows` observations. `constants` in seconds; `explained`: R^2, weighted as the fit is;
    `residual`: the median of the relative errors, `worst`: nine of ten are smaller."""

    constants: dict[str, float]
    rows: int
    explained: float
    residual: float
    worst: float

    def seconds(self, row: WorkRow) -> float:
        """Seconds of some work, by the fit."""
        return sum(self.constants[name] * amount for name, amount in zip(NAMES, row.work, strict=True))


def fit(rows: Sequence[WorkRow]) -> Fit:
    """The constants. Raises Unfit where the observations cannot tell them apart."""
    columns = [at for at in range(len(NAMES)) if any(row.work[at] for row in rows)]
    while True:
        try:
            found, weights = _robust(rows, columns)
        except Unfit:
            if SPARE not in columns:
                raise
            columns.remove(SPARE)
            continue
        below = [at for at, value in zip(columns, found, strict=True) if value < 0.0]
        if not below:
            break
        columns.remove(min(below, key=lambda at: found[columns.index(at)] / max(row.work[at] for row in rows)))
    constants = dict.fromkeys(NAMES, 0.0) | {NAMES[at]: value for at, value in zip(columns, found, strict=True)}
    made = Fit(constants=constants, rows=len(rows), explained=0.0, residual=0.0, worst=0.0)
    said = [made.seconds(row) for row in rows]
    mean = sum(weight * row.seconds for weight, row in zip(weights, rows, strict=True)) / sum(weights)
    lost = sum(weight * (row.seconds - one) ** 2 for weight, row, one in zip(weights, rows, said, strict=True))
    spread = sum(weight * (row.seconds - mean) ** 2 for weight, row in zip(weights, rows, strict=True))
    errors = sorted(abs(one / row.seconds - 1.0) for row, one in zip(rows, said, strict=True))
    return msgspec.structs.replace(
        made, explained=1.0 - lost / spread if spread else 0.0, residual=median(errors),
        worst=errors[int(0.9 * len(errors))],
    )  # fmt: skip


def _robust(rows: Sequence[WorkRow], columns: Sequence[int]) -> tuple[list[float], list[float]]:
    """The values of some columns, and the weights of the rows, with that of their length."""
    lines = [[row.work[at] for at in columns] for row in rows]
    long = [row.seconds for row in rows]
    lengths, robust = long, [1.0] * len(rows)
    found: list[float] = []
    for _ in range(ROUNDS):
        before = found
        weights = [one / length**2 for one, length in zip(robust, lengths, strict=True)]
        found = _least_squares(lines, long, weights)
        said = [sum(a * x for a, x in zip(line, found, strict=True)) for line in lines]
        lengths = [min(MOST_OFF * one, max(one / MOST_OFF, fitted)) for one, fitted in zip(long, said, strict=True)]
        residuals = [(one - fitted) / length for one, fitted, length in zip(long, said, lengths, strict=True)]
        spread = NORMAL * median(map(abs, residuals)) or 1e-12
        robust = [min(1.0, HUBER * spread / max(abs(one), 1e-15)) for one in residuals]
        if before and all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-15) for a, b in zip(before, found, strict=True)):
            break
    return found, weights


def _least_squares(lines: Sequence[Sequence[float]], right: Sequence[float], weights: Sequence[float]) -> list[float]:
    """x that makes `lines` x nearest to `right`. Columns are scaled to one length first: nanoseconds of context stand
    beside milliseconds of base."""
    size = len(lines[0])
    lengths = [math.sqrt(sum(w * line[at] ** 2 for w, line in zip(weights, lines, strict=True))) for at in range(size)]
    if not all(lengths):
        raise Unfit("nothing was seen of one kind of work")
    normal = [[0.0] * size for _ in range(size)]
    sums = [0.0] * size
    for weight, line, seconds in zip(weights, lines, right, strict=True):
        scaled = [value / length for value, length in zip(line, lengths, strict=True)]
        for one in range(size):
            sums[one] += weight * scaled[one] * seconds
            for other in range(size):
                normal[one][other] += weight * scaled[one] * scaled[other]
    return [value / length for value, length in zip(_solved(normal, sums), lengths, strict=True)]


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve a linear system by Gauss and Jordan, the largest pivot first."""
    size = len(matrix)
    work = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for at in range(size):
        best = max(range(at, size), key=lambda row: abs(work[row][at]))
        if abs(work[best][at]) < 1e-12:
            raise Unfit("two kinds of work were always seen together, and their costs cannot be told apart")
        work[at], work[best] = work[best], work[at]
        pivot = work[at][at]
        work[at] = [value / pivot for value in work[at]]
        for other in range(size):
            if other != at and work[other][at]:
                factor = work[other][at]
                work[other] = [a - factor * b for a, b in zip(work[other], work[at], strict=True)]
    return [line[size] for line in work]


# -- by simulation ----------------------------------------------------------------------------------------------------


def played(profile: Profile, burst: Burst) -> tuple[list[float], float]:
    """Play a burst on the simulated engine, without jitter. Return the seconds to the first token of each request, from
    its arrival, and the seconds to the last token of all, from the first arrival."""
    exact = msgspec.structs.replace(profile, jitter=0.0)
    engine, front = Engine(engine_config(exact)), Front(exact)
    sequences = [Tokens(prompt, output) for prompt, output in burst.sizes]
    order = sorted(range(len(sequences)), key=burst.at.__getitem__)
    reached = deque((front.reaches(burst.at[number]), sequences[number]) for number in order)
    now = 0.0
    while reached or engine.busy:
        if not engine.busy:
            now = max(now, reached[0][0])
        while reached and reached[0][0] <= now:
            engine.add(reached.popleft()[1], now)
        now = engine.step(now).ends
    return [one.first_token_at - at for one, at in zip(sequences, burst.at, strict=True)], now


def with_front(profile: Profile, bursts: Sequence[Burst], traffic: Sequence[Burst]) -> Profile:
    """The profile with `delay`, which has all of the way in, divided into what requests have the server for alone
    (`front`) and the rest. Bursts say how much that is at most: they get their first tokens as late, on average, as
    they really did. Traffic says what the rest is while others are under way, if its first tokens are not when they
    should be by more than chance: then half of them are as late as they really were."""
    whole = profile.delay

    def mean(front: float) -> float:
        made = msgspec.structs.replace(profile, front=front, delay=whole - front)
        return fmean(fmean(played(made, burst)[0]) for burst in bursts)

    def half(delay: float) -> float:
        late = msgspec.structs.replace(made, delay=delay)
        return median(first for burst in traffic for first in played(late, burst)[0])

    front = _where(mean, fmean(fmean(burst.first) for burst in bursts), whole) if bursts and whole else 0.0
    made = msgspec.structs.replace(profile, front=front, delay=whole - front)
    late = [real - ours for one in traffic for real, ours in zip(one.first, played(made, one)[0], strict=True)]
    if len(late) > 1 and abs(fmean(late)) > SURE * stdev(late) / math.sqrt(len(late)):
        real = median(first for one in traffic for first in one.first)
        return msgspec.structs.replace(made, delay=_where(half, real, real))
    return made


def _where(function: Callable[[float], float], wanted: float, most: float) -> float:
    """Find where a function that does not fall is as large as wanted, from 0 to `most`."""
    if function(0.0) >= wanted:
        return 0.0
    if function(most) <= wanted:
        return most
    low, high = 0.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return low
