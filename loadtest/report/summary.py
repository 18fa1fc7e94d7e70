"""Summary of one run in figures, for the table, the page and `report.json`.

All repeats of a run are one sample here, except in `intervals`, where each is one observation. Latencies are seconds,
of requests that were ok; `goodput` is the share of the *offered* requests that met their SLO: what was refused, failed,
broke off or never came counts against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gateway.shared.fields import made_of
from loadtest.report.records import Run, Slo, Window
from loadtest.report.sketch import Sketch
from loadtest.report.stats import LAG_BOUND, Interval, interval, jain, slo_of
from loadtest.report.tally import Attainment, ClassTally, Tally, tallies_of

LATENCIES = ("ttft", "ttft_from_send", "tpot", "itl", "e2e", "e2e_from_send")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of `count` values: exact, or, above `sketch.EXACT` values, quantiles within 0.4 %."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float
    exact: bool


class Ending(msgspec.Struct, frozen=True):
    """Count of requests that ended in one way."""

    outcome: str
    reason: str
    count: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Class of a run, or all of them together. Rates are per second of the measured part."""

    offered: int
    ok: int
    met: int
    goodput: float  # met / offered; 1.0 where nothing was offered
    tries: float  # requests sent for each that was offered
    offered_rate: float
    ok_rate: float
    met_rate: float
    prompt_token_rate: float
    completion_token_rate: float
    cached: float  # share of the prompt tokens that the engine had in its cache
    uncounted: int  # ok streams without a usage, which have no TPOT
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    ttft_from_send: Distribution  # as `vllm bench serve` has it, and the next
    e2e_from_send: Distribution
    endings: list[Ending]  # most frequent first
    slo: Slo | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run. `lag_p99` is the worst repeat's; `valid`: it is at most LAG_BOUND.

    `fairness`: Jain's index over the tenants' goodputs, so that who asks for more than others is not owed more.
    """

    name: str
    rate: float
    repeats: int
    seconds: float
    valid: bool
    lag_p50: float
    lag_p99: float
    total: Part
    classes: dict[str, Part]
    intervals: dict[str, Interval]  # 95 %, over repeats
    fairness: float
    tenants: dict[str, Attainment]
    window: Window
    meta: Mapping[str, object]


METRICS = (  # that have intervals
    "goodput", "met_rate", "completion_token_rate",
    *(f"{latency}_{quantile}" for latency in ("ttft", "tpot", "itl", "e2e") for quantile in ("p50", "p99")),
)  # fmt: skip


def figure(part: Part, metric: str) -> float | None:
    """Figure of a part by its name: a field's, or a latency's and a quantile's as `ttft_p99`. None: nothing has it."""
    latency, _, quantile = metric.rpartition("_")
    distribution = getattr(part, latency, None)
    if isinstance(distribution, Distribution):
        return float(getattr(distribution, quantile)) if distribution.count else None
    return float(getattr(part, metric)) if part.offered or metric != "goodput" else None


def summarise(run: Run) -> Summary:
    """The figures of a run."""
    tallies = tallies_of(run)
    seconds = sum(tally.seconds for tally in tallies)
    classes = merged_classes(tallies)
    tenants = _tenants(tallies)
    lag = Sketch()
    for tally in tallies:
        lag.merge(tally.lag)
    lag_p99 = max(tally.lag.quantile(0.99) for tally in tallies)
    return made_of(
        Summary,
        run,
        repeats=len(tallies),
        seconds=seconds,
        valid=lag_p99 <= LAG_BOUND,
        lag_p50=lag.quantile(0.5),
        lag_p99=lag_p99,
        total=_part(merged(classes.values()), seconds),
        classes={name: _part(classes[name], seconds, slo_of(run.slos, name)) for name in sorted(classes)},
        intervals=_intervals(tallies),
        fairness=jain(share.met / share.offered for share in tenants.values()),
        tenants={name: tenants[name] for name in sorted(tenants)},
    )


def missed(slos: Sequence[Slo], summary: Summary) -> list[str]:
    """List the SLOs that a run missed, in words that begin with the class: attainment below an SLO's, a class without
    offered requests, and a sender so late that the figures mean nothing. Results must have been counted against the
    same SLOs (`Run.slos`)."""
    found = []
    if not summary.valid:
        why = f"the sender was late by {summary.lag_p99 * 1e3:.1f} ms at p99, more than {LAG_BOUND * 1e3:.0f} ms"
        why += ": send less, or from a machine with nothing else to do"
        found.append(f"invalid: {why}")
    for slo in slos:
        if slo.class_name and slo.class_name not in summary.classes:
            found.append(f"{slo.class_name}: no request of this class was offered")
    for name, part in summary.classes.items():
        own = slo_of(slos, name)
        if own is not None and part.goodput < own.attainment:
            rate = f"{part.goodput:.4f}, below {own.attainment:g}"
            found.append(f"{name}: {part.met} of {part.offered} requests met it: {rate}")
    return found


def merged(parts: Iterable[ClassTally]) -> ClassTally:
    """Tally of all that these have counted."""
    total = ClassTally()
    for part in parts:
        total.merge(part)
    return total


def merged_classes(tallies: Sequence[Tally]) -> dict[str, ClassTally]:
    """Every class over all repeats."""
    names = {name for tally in tallies for name in tally.classes}
    return {name: merged(tally.classes[name] for tally in tallies if name in tally.classes) for name in names}


def _tenants(tallies: Sequence[Tally]) -> dict[str, Attainment]:
    found: dict[str, Attainment] = {}
    for tally in tallies:
        for name, share in tally.tenants.items():
            own = found.setdefault(name, Attainment())
            own.offered += share.offered
            own.met += share.met
    return found


def _part(part: ClassTally, seconds: float, slo: Slo | None = None) -> Part:
    per_second = 1.0 / seconds if seconds else 0.0
    endings = sorted(part.outcomes.items(), key=lambda item: (-item[1], item[0]))
    return made_of(
        Part,
        part,
        goodput=part.met / part.offered if part.offered else 1.0,
        tries=part.tries / part.offered if part.offered else 0.0,
        offered_rate=part.offered * per_second,
        ok_rate=part.ok * per_second,
        met_rate=part.met * per_second,
        prompt_token_rate=part.prompt_tokens * per_second,
        completion_token_rate=part.completion_tokens * per_second,
        cached=part.cached_tokens / part.prompt_tokens if part.prompt_tokens else 0.0,
        **{name: _distribution(getattr(part, name)) for name in LATENCIES},
        endings=[Ending(outcome, reason, count) for (outcome, reason), count in endings],
        slo=slo,
    )


def _distribution(sketch: Sketch) -> Distribution:
    quantiles = dict(zip(QUANTILES, sketch.quantiles(list(QUANTILES.values())), strict=True))
    return Distribution(
        count=len(sketch), mean=sketch.mean, std=sketch.deviation, max=sketch.largest, exact=sketch.exact, **quantiles
    )


def _intervals(tallies: Sequence[Tally]) -> dict[str, Interval]:
    """Metrics that a repeat has no value of (nothing was ok) are intervals of the others."""
    parts = [_part(merged(tally.classes.values()), tally.seconds) for tally in tallies]
    found = {name: [value for part in parts if (value := figure(part, name)) is not None] for name in METRICS}
    return {name: interval(values) for name, values in found.items() if values}
