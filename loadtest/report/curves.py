"""Charts of the page: runs and their tallies as series of points."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from loadtest.report.comparison import by_name, engines_of
from loadtest.report.number_format import count, seconds, share
from loadtest.report.plots import Axis, Line, axis_over, chart
from loadtest.report.records import MONEY, EngineSample, Run
from loadtest.report.sketch import Sketch
from loadtest.report.summary import Summary, merged
from loadtest.report.tally import Timeline, tallies_of

DETAILED = 8  # runs whose distributions and timelines are drawn
ENGINES = 8  # lines of a chart of engines; of more of them, only the least, the mean and the most
POINTS = 240  # of an engine's line over time
CLASS_BINS = 80  # of a class's: fewer, so that a Poisson process is not mostly noise
GRID = [step / 100 for step in range(100)] + [0.995, 0.999, 1.0]
SHARES = Axis(label="cumulative share", word=lambda value: f"{100 * value:.0f} %")


def detailed(runs: Sequence[Run]) -> list[Run]:
    """The runs to look at closely: of every name the one at its highest rate, the first few of them."""
    best: dict[str, Run] = {}
    for run in runs:
        if run.name not in best or run.rate > best[run.name].rate:
            best[run.name] = run
    return list(best.values())[:DETAILED]


# -- over offered load ------------------------------------------------------------------------------------------------


def over_load(summaries: Sequence[Summary]) -> list[str]:
    """Goodput against offered load, and the share of each class that met its SLO; nothing for a single load."""
    if len({summary.rate for summary in summaries}) < 2:
        return []
    rates = [summary.total.offered_rate for summary in summaries]
    x = axis_over("offered, requests/s", rates)
    top = max(summary.total.met_rate for summary in summaries)
    lines = [Line(name="all that is offered", points=[(0.0, 0.0), (min(x.high, top * 1.15),) * 2], faint=True)]
    classes = sorted({name for summary in summaries for name in summary.classes})
    for style, name in enumerate(dict.fromkeys(summary.name for summary in summaries)):
        own = sorted((one for one in summaries if one.name == name), key=lambda one: one.total.offered_rate)
        points = [(one.total.offered_rate, one.total.met_rate) for one in own]
        known = [one.intervals.get("met_rate") for one in own]
        halves = [found.half if found else None for found in known]
        lines.append(Line(name=name, points=points, style=style, marked=True, whiskers=halves))
    words = ". ".join(
        f"{line.name}: " + ", ".join(f"{count(value)} of {count(at)} offered" for at, value in line.points)
        for line in lines[1:]
    )
    y = axis_over("goodput, requests/s", [value * 1.1 for line in lines[1:] for _, value in line.points])
    drawn = [chart("Goodput against offered load", words, x, y, lines)]
    if len(classes) > 1:
        drawn.extend(_met(name, summaries, x, _offered, "/s") for name in classes)
    return drawn


def over_engines(summaries: Sequence[Summary]) -> list[str]:
    """The share of each class that met its SLO, against the number of engines of a simulation; nothing where there is
    one number alone, or several rates."""
    numbers = {engines_of(summary) for summary in summaries}
    if len(numbers) < 2 or len({summary.name for summary in summaries}) < len(summaries):
        return []
    x = Axis(label="engines", high=1.04 * max(numbers), whole=True)
    classes = sorted({name for summary in summaries for name in summary.classes})
    return [_met(name, summaries, x, engines_of, " engines") for name in classes]


def over_money(summaries: Sequence[Summary]) -> list[str]:
    """The share of all calls that met their SLO, against what providers cost; nothing without providers or SLOs."""
    judged = [summary for summary in summaries if any(part.slo for part in summary.classes.values())]
    paid = [summary for summary in judged if MONEY in summary.meta]
    return (
        [_met("", paid, axis_over("money an hour at providers", map(_money, paid)), _money, " an hour")] if paid else []
    )


def _offered(summary: Summary) -> float:
    return summary.total.offered_rate


def _money(summary: Summary) -> float:
    return float(str(summary.meta[MONEY]))


def _met(class_name: str, summaries: Sequence[Summary], x: Axis, of: Callable[[Summary], float], unit: str) -> str:
    """Draw the attainment of a class by run, "": of all calls. `of`: the x value of a summary; `unit`: its unit in
    words."""
    lines = []
    for style, (name, group) in enumerate(by_name(summaries, engines=of is not _offered).items()):
        own = [(of(one), one.classes.get(class_name) if class_name else one.total) for one in group]
        points = sorted((at, part.goodput) for at, part in own if part is not None)
        lines.append(Line(name=name, points=points, style=style, marked=True))
    words = ". ".join(
        f"{line.name}: " + ", ".join(f"{share(value)} at {count(at)}{unit}" for at, value in line.points)
        for line in lines
    )
    y = Axis(label="met their SLO", high=1.04, word=SHARES.word)
    what = f"{class_name}: requests" if class_name else "calls"
    return chart(f"{what} that met their SLO", words, x, y, lines)


# -- distributions ----------------------------------------------------------------------------------------------------


def distributions(runs: Sequence[Run], titles: Sequence[str]) -> list[str]:
    """The cumulative distributions of TTFT, ITL and E2E, of requests that were ok."""
    totals = [merged(part for tally in tallies_of(run) for part in tally.classes.values()) for run in runs]
    drawn = []
    for name, label in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "E2E")):
        sketches: list[Sketch] = [getattr(total, name) for total in totals]
        lines, said = [], []
        for style, (title, sketch) in enumerate(zip(titles, sketches, strict=True)):
            if not len(sketch):
                continue
            values = sketch.quantiles(GRID)
            lines.append(Line(name=title, points=list(zip(values, GRID, strict=True)), style=style))
            said.append(f"{title}: half below {seconds(values[50])}, 99 of 100 below {seconds(values[99])}")
        if lines:
            x = axis_over(label, _inner(lines), log=True, word=seconds)
            drawn.append(chart(f"{label}, cumulative", ". ".join(said), x, SHARES, lines))
    return drawn


def _inner(lines: Iterable[Line]) -> list[float]:
    """The x that an axis is made for: a few very quick or very slow ones are at its edges."""
    return [at for line in lines for at, q in line.points if 0.01 <= q <= 0.999]


# -- over time --------------------------------------------------------------------------------------------------------


def classes_over_time(run: Run, title: str) -> list[str]:
    """Draw for every class what was offered and what of it met its SLO, by the intended time; all repeats averaged."""
    tallies = tallies_of(run)
    timeline = Timeline(CLASS_BINS)
    for tally in tallies:
        timeline.merge(tally.timeline)
    per_second = 1.0 / (timeline.width * len(tallies))
    longest = max((len(bins) for bins in timeline.bins.values()), default=0) * timeline.width
    drawn = []
    for class_name, bins in sorted(timeline.bins.items()):
        middles = [(number + 0.5) * timeline.width for number in range(len(bins))]
        offered = [bin.offered * per_second for bin in bins]
        good = [bin.met * per_second for bin in bins]
        lines = [
            Line(name="offered", points=list(zip(middles, offered, strict=True)), faint=True),
            Line(name="met its SLO", points=list(zip(middles, good, strict=True))),
        ]
        asked = sum(bin.offered for bin in bins)
        words = f"{sum(bin.met for bin in bins)} of {asked} requests of {class_name} met their SLO."
        x = Axis(label="intended send time, s", high=longest)
        drawn.append(chart(f"{title}: {class_name}", words, x, axis_over("requests/s", offered), lines, _cut(run)))
    return drawn


def engines_over_time(run: Run, title: str) -> list[str]:
    """KV cache usage of every engine, and the queues; of the first repeat. Nothing where the target told nothing."""
    series = [sample for sample in run.series if sample.repeat == 0]
    if not series:
        return []
    end = max(1.0, *(sample.at for sample in series))
    x = Axis(label="time, s", high=end)
    drawn = []
    engines: dict[str, list[EngineSample]] = defaultdict(list)
    for sample in series:
        engines[sample.engine].append(sample)
    real = {name: samples for name, samples in sorted(engines.items()) if name}
    if real:
        used = {name: _thinned(((one.at, one.kv) for one in samples), end) for name, samples in real.items()}
        lines = _summed_up(used) if len(used) > ENGINES else _lines(used)
        means = {name: sum(one.kv for one in samples) / len(samples) for name, samples in real.items()}
        words = ", ".join(f"{name or 'target'}: {share(mean)} on average" for name, mean in means.items())
        y = Axis(label="KV cache in use", high=1.04, word=SHARES.word)
        drawn.append(chart(f"{title}: KV cache", words, x, y, lines, _cut(run)))
    queues = {
        "running": _total(samples=series, end=end, of="running", engines=bool(real)),
        "waiting in engines": _total(samples=series, end=end, of="waiting", engines=True),
        "waiting before them": _total(samples=series, end=end, of="waiting", engines=False),
    }
    queues = {name: points for name, points in queues.items() if points}
    words = ", ".join(f"{name}: at most {count(max(value for _, value in points))}" for name, points in queues.items())
    y = axis_over("requests", [value for points in queues.values() for _, value in points])
    y = msgspec.structs.replace(y, whole=True)
    drawn.append(chart(f"{title}: queue depth", words, x, y, _lines(queues), _cut(run)))
    return drawn


def _cut(run: Run) -> list[tuple[float, float]]:
    """Spans that do not count: warm-up and cool-down."""
    window = run.window
    after = [(window.ends, window.duration)] if window.cooldown and math.isfinite(window.duration) else []
    return ([(0.0, window.warmup)] if window.warmup else []) + after


def _lines(named: dict[str, list[tuple[float, float]]]) -> list[Line]:
    return [Line(name=name, points=points, style=style) for style, (name, points) in enumerate(named.items())]


def _summed_up(named: dict[str, list[tuple[float, float]]]) -> list[Line]:
    """The least, the mean and the most of many engines."""
    at: dict[float, list[float]] = defaultdict(list)
    for points in named.values():
        for time, value in points:
            at[time].append(value)
    return _lines(
        {
            "fullest": [(time, max(values)) for time, values in sorted(at.items())],
            f"mean of {len(named)}": [(time, sum(values) / len(values)) for time, values in sorted(at.items())],
            "emptiest": [(time, min(values)) for time, values in sorted(at.items())],
        }
    )


def _total(*, samples: Sequence[EngineSample], end: float, of: str, engines: bool) -> list[tuple[float, float]]:
    """The sum of something over all engines, or that of the target as a whole, over time."""
    by_engine: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if bool(sample.engine) == engines:
            by_engine[sample.engine].append((sample.at, getattr(sample, of)))
    total: dict[float, float] = defaultdict(float)
    for points in by_engine.values():
        for time, value in _thinned(points, end):
            total[time] += value
    return sorted(total.items())


def _thinned(points: Iterable[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """Means over equal bins of at least a second, at their middles."""
    width = max(1.0, end / POINTS)
    bins: dict[int, list[float]] = defaultdict(list)
    for at, value in points:
        bins[int(at / width)].append(value)
    return [((number + 0.5) * width, sum(values) / len(values)) for number, values in sorted(bins.items())]
