"""Comparison of runs side by side: their names, their baseline, and the significance of a difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadtest.report.number_format import count
from loadtest.report.records import Run
from loadtest.report.summary import Summary


def title_of(run: Run | Summary, runs: Sequence[Run] | Sequence[Summary]) -> str:
    """Name of a run, with its rate where others have the same name."""
    alone = sum(run.name == other.name for other in runs) == 1
    return run.name if alone else f"{run.name} at {count(run.rate)}/s"


def first_name(runs: Sequence[Run] | Sequence[Summary]) -> str:
    """Name of the run that others are compared with; a simulation's name goes on after a comma, with its number of
    engines."""
    return runs[0].name.partition(", ")[0]


def engines_of(run: Run | Summary) -> int:
    """Number of engines of a simulation, where several numbers are compared; else 0."""
    number = run.name.partition(", ")[2].partition(" ")[0]
    return int(number) if number.isdecimal() else 0


def by_name(summaries: Sequence[Summary], *, engines: bool) -> dict[str, list[Summary]]:
    """The runs of each name, in order; `engines`: whatever the number of engines."""
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        found.setdefault(summary.name.partition(", ")[0] if engines else summary.name, []).append(summary)
    return found


def base_of(summary: Summary, summaries: Sequence[Summary]) -> Summary | None:
    """Return the run to compare with: the first name's run at the same rate, with as many engines; None for that run
    itself."""
    name = ", ".join(filter(None, (first_name(summaries), summary.name.partition(", ")[2])))
    same = (one for one in summaries if one.name == name and one.rate == summary.rate)
    found = next(same, None)
    return None if found is summary else found


def verdict(metric: str, summary: Summary, base: Summary, *, higher: bool | None) -> str:
    """ "good" or "bad" where both runs were repeated and their difference is more than their confidence intervals make
    together, else "". `higher`: whether more of the metric is better; None: neither is."""
    own, other = summary.intervals.get(metric), base.intervals.get(metric)
    if higher is None or own is None or other is None or own.half is None or other.half is None:
        return ""
    apart = own.mean - other.mean
    if abs(apart) <= math.hypot(own.half, other.half):
        return ""
    return "good" if (apart > 0.0) is higher else "bad"
