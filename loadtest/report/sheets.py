"""Tables of a report, as a terminal and the page show them: figures of runs and of their classes, side by side.

"As vLLM's" is what `vllm bench serve` would have printed: from the time a request was sent, not from the intended one.
TPOT and ITL know no send time and are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from loadtest.report.comparison import base_of, first_name, title_of, verdict
from loadtest.report.number_format import change, count, seconds, share
from loadtest.report.summary import LATENCIES, Distribution, Part, Summary, figure

OF_RUNS = ("fairness", "lag_p99")  # figures that classes have not
QUANTILES = ("mean", "std", "p50", "p90", "p95", "p99", "p999", "max")


class SheetCell(msgspec.Struct, frozen=True):
    """`style`: good, bad, or text for words. `half`: half of a confidence interval, to show where there is room."""

    text: str
    style: str = ""
    half: str = ""


class SheetRow(msgspec.Struct, frozen=True):
    """Figures of a run, or of a `part` of it, in a table below the run."""

    title: str
    cells: Sequence[SheetCell]
    part: bool = False


class Sheet(msgspec.Struct, frozen=True):
    """Table. `first`: head of the titles."""

    first: str
    heads: Sequence[str]
    rows: Sequence[SheetRow]


class Column(msgspec.Struct, frozen=True):
    """Figure by its name as `summary.figure` takes it. `higher`: whether more of it is better."""

    metric: str
    word: Callable[[float], str] = seconds
    head: str = ""
    higher: bool = False


OFFERED = (
    Column("offered_rate", count, "offered /s"),
    Column("goodput", share),
    Column("met_rate", count, "goodput /s"),
    Column("completion_token_rate", count, "tokens /s"),
    Column("tries", "{:.2f}".format),
    Column("fairness", "{:.3f}".format),
    Column("lag_p99"),
)
OURS = tuple(map(Column, ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p99", "e2e_p50", "e2e_p99")))
VLLMS = tuple(map(Column, ("ttft_from_send_mean", "ttft_from_send_p50", "ttft_from_send_p99", "tpot_mean", "itl_mean",
                           "e2e_from_send_mean", "e2e_from_send_p99")))  # fmt: skip
COMPARED = (Column("goodput", share, higher=True), *(column for column in OURS if column.metric != "tpot_p99"))


def figures(first: str, columns: Sequence[Column], summaries: Sequence[Summary], *, classes: bool = True) -> Sheet:
    """A row for each run, and one for each of its classes below it if there are several."""
    rows = []
    for summary in summaries:
        parts = [(title_of(summary, summaries), summary.total)]
        parts += summary.classes.items() if classes and len(summary.classes) > 1 else ()
        for title, part in parts:
            cells = [_cell(column, summary, part) for column in columns]
            rows.append(SheetRow(title, cells, part=part is not summary.total))
    return Sheet(first, _heads(columns), rows)


def differences(summaries: Sequence[Summary]) -> Sheet:
    """Differences of each run from the first name's run at the same rate, with as many engines."""
    pairs = [(summary, base) for summary in summaries if (base := base_of(summary, summaries)) is not None]
    rows = [
        SheetRow(title_of(summary, summaries), [_difference(column, summary, base) for column in COMPARED])
        for summary, base in pairs
    ]
    return Sheet(f"against {first_name(summaries)}", _heads(COMPARED), rows)


def distributions(summaries: Sequence[Summary], titles: Sequence[str]) -> Sheet:
    """Every latency of every run; "from send" is as vLLM's."""
    rows = []
    for name in LATENCIES:
        for summary, title in zip(summaries, titles, strict=True):
            own: Distribution = getattr(summary.total, name)
            cells = [*(seconds(getattr(own, quantile)) for quantile in QUANTILES), count(own.count)]
            if own.count:
                rows.append(SheetRow(f"{name.replace('_', ' ')}, {title}", list(map(SheetCell, cells))))
    return Sheet("latency", [*(quantile.replace("p999", "p99.9") for quantile in QUANTILES), "values"], rows)


def endings(summaries: Sequence[Summary], titles: Sequence[str], most: int | None = None) -> Sheet:
    """The outcomes of every class of every run, with their reasons: the `most` frequent, None: all."""
    rows = []
    for summary, title in zip(summaries, titles, strict=True):
        for name, part in summary.classes.items():
            for ending in part.endings[:most]:
                words = SheetCell(ending.outcome, "text"), SheetCell(ending.reason, "text")
                counts = SheetCell(f"{ending.count:,}"), SheetCell(share(ending.count / part.offered))
                rows.append(SheetRow(f"{title}: {name}", [*words, *counts]))
    return Sheet("class", ("outcome", "reason", "requests", "share"), rows)


def _heads(columns: Sequence[Column]) -> list[str]:
    return [column.head or column.metric.replace("_from_send", "").replace("_", " ") for column in columns]


def _cell(column: Column, summary: Summary, part: Part) -> SheetCell:
    whole = part is summary.total
    if column.metric in OF_RUNS:
        late = column.metric == "lag_p99" and not summary.valid
        return SheetCell(column.word(getattr(summary, column.metric)) if whole else "", "bad" if late else "")
    value = figure(part, column.metric)
    interval = summary.intervals.get(column.metric) if whole else None
    half = "" if interval is None or interval.half is None else column.word(interval.half)
    return SheetCell("-" if value is None else column.word(value), half=half)


def _difference(column: Column, summary: Summary, base: Summary) -> SheetCell:
    own, other = summary.intervals.get(column.metric), base.intervals.get(column.metric)
    if own is None or other is None:
        return SheetCell("-")
    shares = column.word is share
    said = f"{100.0 * (own.mean - other.mean):+.2f} pt" if shares else change(own.mean, other.mean)
    return SheetCell(said, verdict(column.metric, summary, base, higher=column.higher))
