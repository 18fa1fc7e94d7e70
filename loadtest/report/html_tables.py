"""Tables of the page: runs side by side with their differences, quantiles, and outcomes of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

import msgspec

from loadtest.report.comparison import base_of, first_name, title_of, verdict
from loadtest.report.number_format import change, count, seconds, share
from loadtest.report.summary import Distribution, Part, Summary, figure

FEW = 4  # runs whose classes are in one table with them


class Column(msgspec.Struct, frozen=True):
    """Figure of the comparison, by its name as `summary.figure` takes it. `higher`: whether more of it is better, None
    where neither is."""

    title: str
    metric: str
    word: Callable[[float], str]
    higher: bool | None = None


COLUMNS = (
    Column("offered/s", "offered_rate", count),
    Column("goodput", "goodput", share, higher=True),
    Column("goodput/s", "met_rate", count, higher=True),
    Column("TTFT p50", "ttft_p50", seconds, higher=False),
    Column("TTFT p99", "ttft_p99", seconds, higher=False),
    Column("TPOT p50", "tpot_p50", seconds, higher=False),
    Column("ITL p99", "itl_p99", seconds, higher=False),
    Column("E2E p50", "e2e_p50", seconds, higher=False),
    Column("E2E p99", "e2e_p99", seconds, higher=False),
    Column("output tokens/s", "completion_token_rate", count, higher=True),
)


def comparison(summaries: Sequence[Summary]) -> str:
    """A row for each run and each of its classes, which are folded away where there are many. Runs are compared with
    the first name's run at the same rate."""
    several = any(len(summary.classes) > 1 for summary in summaries)
    compared = any(base_of(summary, summaries) for summary in summaries)
    engines = ", with as many engines" if ", " in summaries[0].name else ""
    same = f"{first_name(summaries)} at the same rate{engines}"
    against = f"; below each figure its difference from {same}" if compared else ""
    said = f'<p class="faint small">The measured part only{escape(against)}.</p>'
    if not several or len(summaries) <= FEW:
        return f"{said}{_comparison(summaries, classes=several)}"
    return (
        f"{said}{_comparison(summaries, classes=False)}<details><summary>The same for every class</summary>"
        f"{_comparison(summaries, classes=True)}</details>"
    )


def _comparison(summaries: Sequence[Summary], *, classes: bool) -> str:
    rows = []
    for summary in summaries:
        base = base_of(summary, summaries)
        title = title_of(summary, summaries)
        rows.append(f'<tr><th scope="row">{escape(title)}</th>{"".join(_cells(summary, base))}</tr>')
        for name, part in summary.classes.items() if classes else ():
            other = base.classes.get(name) if base else None
            cells = "".join(f"<td>{_value(column, part)}{_change(column, part, other)}</td>" for column in COLUMNS)
            rows.append(f'<tr><th scope="row" class="class">{escape(name)}</th>{cells}</tr>')
    label = "runs and their classes" if classes else "runs"
    return _wide(_table(label, ["run", *(column.title for column in COLUMNS)], rows))


def _table(label: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    """A table of rows as they stand."""
    named = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return f'<table aria-label="{label}"><thead><tr>{named}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _wide(table: str) -> str:
    """A table that is scrolled where it has no room."""
    return f'<div class="wide">{table}</div>'


def _cells(summary: Summary, base: Summary | None) -> Iterable[str]:
    for column in COLUMNS:
        own = summary.intervals.get(column.metric)
        half = f"<small>&plusmn; {escape(column.word(own.half))}</small>" if own and own.half else ""
        other = base.total if base else None
        kind = verdict(column.metric, summary, base, higher=column.higher) if base else ""
        yield f"<td>{_value(column, summary.total)}{half}{_change(column, summary.total, other, kind)}</td>"


def _value(column: Column, part: Part) -> str:
    value = figure(part, column.metric)
    return "&ndash;" if value is None else escape(column.word(value))


def _change(column: Column, part: Part, other: Part | None, kind: str = "") -> str:
    value = figure(part, column.metric)
    base = figure(other, column.metric) if other else None
    if value is None or base is None or column.higher is None:
        return ""
    said = f"{100.0 * (value - base):+.2f} points" if column.word is share else change(value, base)
    return f'<small class="{kind}">{escape(said)}</small>'


# -- distributions ----------------------------------------------------------------------------------------------------

LATENCIES = {
    "ttft": "TTFT",
    "ttft_from_send": "TTFT from send",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "e2e_from_send": "E2E from send",
}
FIGURES = ("mean", "std", "p50", "p90", "p95", "p99", "p999", "max")


def distribution_table(summaries: Sequence[Summary], titles: Sequence[str]) -> str:
    """Every latency of every run; "from send" is what `vllm bench serve` would print."""
    rows = []
    for name, label in LATENCIES.items():
        for summary, title in zip(summaries, titles, strict=True):
            distribution: Distribution = getattr(summary.total, name)
            if not distribution.count:
                continue
            figures = "".join(f"<td>{seconds(getattr(distribution, figure))}</td>" for figure in FIGURES)
            rows.append(
                f'<tr><th scope="row">{label}, {escape(title)}</th>{figures}<td>{count(distribution.count)}</td></tr>'
            )
    heads = ["latency", *(figure.replace("p999", "p99.9") for figure in FIGURES), "values"]
    return _table("latencies", heads, rows)


# -- endings ----------------------------------------------------------------------------------------------------------


def endings_table(summaries: Sequence[Summary], titles: Sequence[str]) -> str:
    """The outcomes of every class of every run, with their reasons."""
    rows = (
        f'<tr><th scope="row">{escape(title)}: {escape(name)}</th><td class="text">{escape(ending.outcome)}</td>'
        f'<td class="text">{escape(ending.reason)}</td><td>{ending.count:,}</td>'
        f"<td>{share(ending.count / part.offered)}</td></tr>"
        for summary, title in zip(summaries, titles, strict=True)
        for name, part in summary.classes.items()
        for ending in part.endings
    )
    return _wide(_table("how requests ended", ("class", "outcome", "reason", "requests", "share"), rows))
