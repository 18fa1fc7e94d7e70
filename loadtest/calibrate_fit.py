"""From what was seen of an engine to its latency profile.

Of every observation it is known which work it was, so each is one line of a linear system: so many steps, prompt
tokens, decoding sequences, KV tokens read, and ways through the server around the engine, in so many seconds. It is
solved by weighted least squares: the normal equations (Gauss, 1809), exactly, since there are five unknowns. Weights
are 1/seconds, for an error of a tenth is as bad in a short step as in a long one, and Huber's (1964), found by
reweighting until nothing changes (Holland and Welsch, 1977), for a machine that pauses now and then. A constant that
comes out below 0 is 0, and the others are fitted again without it.

What no line can say, how much of a request's way into the engine it has for itself, is fitted by the simulated engine:
a burst of requests is sent to it until it has the first tokens when the real one had them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from loadtest.engine.engine import Engine, engine_config
from loadtest.engine.latency import Front, Profile
from loadtest.engine.sequence import Sequence as Tokens

NAMES = ("base", "prefill", "decode", "context", "delay")
HUBER = 1.345  # of a normal distribution's deviations: 95 % as efficient as least squares where there are no outliers
NORMAL = 1.4826  # a normal distribution's deviation over its median absolute deviation
ROUNDS = 50
HALVINGS = 30


class Unfit(Exception):
    """What was seen does not say what was to be found; says why."""


class Row(msgspec.Struct, frozen=True):
    """`seconds` for so much work. `ways`: through the server, which a first token has behind it."""

    seconds: float
    steps: float
    prompt: float = 0.0
    decoded: float = 0.0
    context: float = 0.0
    ways: float = 0.0

    @property
    def work(self) -> tuple[float, ...]:
        return self.steps, self.prompt, self.decoded, self.context, self.ways


class Constant(msgspec.Struct, frozen=True):
    """A fitted constant and its standard error, in seconds."""

    value: float
    error: float


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What was fitted to `rows` observations. `explained`: R^2, weighted as the fit is; `residual`: the median of the
    relative errors, `worst`: nine of ten are smaller."""

    constants: dict[str, Constant]
    rows: int
    explained: float
    residual: float
    worst: float

    def seconds(self, row: Row) -> float:
        """What the fit makes of some work."""
        return sum(self.constants[name].value * amount for name, amount in zip(NAMES, row.work, strict=True))


def fit(rows: Sequence[Row]) -> Fit:
    """The constants. Raises Unfit where the observations cannot tell them apart."""
    columns = [at for at in range(len(NAMES)) if any(row.work[at] for row in rows)]
    while True:
        found, covariance, weights = _robust(rows, columns)
        below = [at for at, value in zip(columns, found, strict=True) if value < 0.0]
        if not below:
            break
        columns.remove(min(below, key=lambda at: found[columns.index(at)] / max(row.work[at] for row in rows)))
    constants = {name: Constant(0.0, 0.0) for name in NAMES}
    for place, at in enumerate(columns):
        constants[NAMES[at]] = Constant(found[place], math.sqrt(max(0.0, covariance[place][place])))
    made = Fit(constants=constants, rows=len(rows), explained=0.0, residual=0.0, worst=0.0)
    said = [made.seconds(row) for row in rows]
    weights = [weight / row.seconds**2 for weight, row in zip(weights, rows, strict=True)]
    mean = sum(weight * row.seconds for weight, row in zip(weights, rows, strict=True)) / sum(weights)
    lost = sum(weight * (row.seconds - one) ** 2 for weight, row, one in zip(weights, rows, said, strict=True))
    spread = sum(weight * (row.seconds - mean) ** 2 for weight, row in zip(weights, rows, strict=True))
    errors = sorted(abs(one / row.seconds - 1.0) for row, one in zip(rows, said, strict=True))
    return msgspec.structs.replace(
        made, explained=1.0 - lost / spread if spread else 0.0, residual=median(errors),
        worst=errors[int(0.9 * len(errors))],
    )  # fmt: skip


def _robust(rows: Sequence[Row], columns: Sequence[int]) -> tuple[list[float], list[list[float]], list[float]]:
    """The values of some columns, their covariances, and the weights of the rows."""
    scaled = [[row.work[at] / row.seconds for at in columns] for row in rows]
    weights = [1.0] * len(rows)
    found: list[float] = []
    for _ in range(ROUNDS):
        before = found
        found, inverse = _least_squares(scaled, weights)
        residuals = [1.0 - sum(a * x for a, x in zip(line, found, strict=True)) for line in scaled]
        spread = NORMAL * median(map(abs, residuals)) or 1e-12
        weights = [min(1.0, HUBER * spread / max(abs(one), 1e-15)) for one in residuals]
        if before and all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-15) for a, b in zip(before, found, strict=True)):
            break
    freedom = max(1.0, sum(weights) - len(columns))
    variance = sum(weight * one * one for weight, one in zip(weights, residuals, strict=True)) / freedom
    return found, [[variance * entry for entry in line] for line in inverse], weights


def _least_squares(lines: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[list[float], list[list[float]]]:
    """x that makes `lines` x nearest to 1, and the inverse of the normal matrix. Columns are scaled to one length
    first: nanoseconds of context stand beside milliseconds of base."""
    size = len(lines[0])
    lengths = [math.sqrt(sum(w * line[at] ** 2 for w, line in zip(weights, lines, strict=True))) for at in range(size)]
    if not all(lengths):
        raise Unfit("nothing was seen of one kind of work")
    normal = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for weight, line in zip(weights, lines, strict=True):
        scaled = [value / length for value, length in zip(line, lengths, strict=True)]
        for one in range(size):
            right[one] += weight * scaled[one]
            for other in range(size):
                normal[one][other] += weight * scaled[one] * scaled[other]
    inverse = _inverse(normal)
    found = [sum(a * b for a, b in zip(line, right, strict=True)) for line in inverse]
    return (
        [value / length for value, length in zip(found, lengths, strict=True)],
        [[inverse[i][j] / lengths[i] / lengths[j] for j in range(size)] for i in range(size)],
    )


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """By Gauss and Jordan, the largest pivot first."""
    size = len(matrix)
    work = [[*line, *(float(at == other) for other in range(size))] for at, line in enumerate(matrix)]
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
    return [line[size:] for line in work]


# -- by simulation ----------------------------------------------------------------------------------------------------


def played(profile: Profile, burst: Iterable[tuple[int, int]]) -> tuple[list[float], float]:
    """When the simulated engine has the first token of each request of a burst (tokens of its prompt, of its answer),
    in their order, and when the last of all; in seconds from when they came. Without jitter."""
    exact = msgspec.structs.replace(profile, jitter=0.0)
    engine, front = Engine(engine_config(exact)), Front(exact)
    sequences = [Tokens(prompt, output) for prompt, output in burst]
    coming = [(front.reaches(0.0), sequence) for sequence in sequences]
    now = 0.0
    while coming or engine.busy:
        if not engine.busy:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            engine.add(coming[0][1], now)
            del coming[0]
        now = engine.step(now).ends
    return [sequence.first_token_at for sequence in sequences], now


def with_front(profile: Profile, bursts: Sequence[tuple[Sequence[tuple[int, int]], Sequence[float]]]) -> Profile:
    """The profile with `delay` divided into what requests have the server for alone (`front`) and the rest: so that
    bursts get their first tokens as late, on average, as they really did."""
    whole = profile.delay
    real = sum(sum(times) / len(times) for _, times in bursts)

    def divided(front: float) -> Profile:
        return msgspec.structs.replace(profile, front=front, delay=max(0.0, whole - front))

    def mean(front: float) -> float:
        made = divided(front)
        return sum(sum(played(made, burst)[0]) / len(burst) for burst, _ in bursts)

    low, high = 0.0, whole
    if not bursts or not whole or mean(low) >= real:
        return divided(low)
    if mean(high) <= real:
        return divided(high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if mean(middle) < real else (low, middle)
    return divided(low)
