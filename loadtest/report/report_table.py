"""Report as tables for a terminal.

"As vLLM's" is what `vllm bench serve` would have printed: from the time a request was sent, not from the intended one.
TPOT and ITL know no send time and are the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gateway.shared.printable import printable
from loadtest.report.comparison import base_of, first_name, title_of, verdict
from loadtest.report.number_format import change, count, seconds, share
from loadtest.report.records import Run
from loadtest.report.stats import LAG_BOUND
from loadtest.report.summary import Part, Summary, figure, summarise

OURS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p99", "e2e_p50", "e2e_p99")
VLLMS = ("ttft_from_send_mean", "ttft_from_send_p50", "ttft_from_send_p99", "tpot_mean", "itl_mean",
         "e2e_from_send_mean", "e2e_from_send_p99")  # fmt: skip
# What runs are compared by, and whether more of it is better.
COMPARED = {"goodput": True, "ttft_p50": False, "ttft_p99": False, "tpot_p50": False, "itl_p99": False,
            "e2e_p50": False, "e2e_p99": False}  # fmt: skip


def table(runs: Sequence[Run], *, partial: bool = False) -> Group:
    """Return the tables to print, each within 80 columns, and the remarks, one a line. The tables show what was offered
    and kept, latencies, the figures of vLLM's own benchmark, how requests ended, and how runs differ. Each run has a
    row, and one row for each of its classes below it if there are several."""
    summaries = [summarise(run) for run in runs]
    marked = [Text("partial: the run was broken off", style="bold yellow")] if partial else []
    remarks = [Text(line, style=style) for line, style in _remarks(summaries)]
    tables = [
        _goodput(summaries),
        _latencies("run", OURS, summaries, classes=True),
        _latencies("as vLLM's", VLLMS, summaries, classes=False),
        _ends(summaries),
    ]
    if any(base_of(summary, summaries) for summary in summaries):
        tables.append(_differences(summaries))
    return Group(*marked, *(part for each in tables for part in (each, Text())), *remarks)


def _goodput(summaries: Sequence[Summary]) -> Table:
    rows = _table("run", ("offered /s", "goodput", "goodput /s", "tokens /s", "tries", "fairness", "lag p99"))
    for summary in summaries:
        lag = Text(seconds(summary.lag_p99), style="" if summary.valid else "bold red")
        for title, part in _parts(summary, summaries):
            whole = part is summary.total
            rows.add_row(
                title, count(part.offered_rate), share(part.goodput), count(part.met_rate),
                count(part.completion_token_rate), f"{part.tries:.2f}",
                f"{summary.fairness:.3f}" if whole else "", lag if whole else "",
            )  # fmt: skip
    return rows


def _latencies(first: str, metrics: Sequence[str], summaries: Sequence[Summary], *, classes: bool) -> Table:
    rows = _table(first, [metric.replace("_from_send", "").replace("_", " ") for metric in metrics])
    for summary in summaries:
        parts = _parts(summary, summaries) if classes else [(_title(summary, summaries), summary.total)]
        for title, part in parts:
            values = [figure(part, metric) for metric in metrics]
            rows.add_row(title, *("-" if value is None else seconds(value) for value in values))
    return rows


def _ends(summaries: Sequence[Summary]) -> Table:
    rows = _table("run", ())
    rows.add_column("ended")
    for summary in summaries:
        for title, part in _parts(summary, summaries):
            rows.add_row(title, _endings(part))
    return rows


def _differences(summaries: Sequence[Summary]) -> Table:
    rows = _table(f"against {first_name(summaries)}", [name.replace("_", " ") for name in COMPARED])
    for summary in summaries:
        base = base_of(summary, summaries)
        if base is not None:
            rows.add_row(_title(summary, summaries), *(_difference(name, summary, base) for name in COMPARED))
    return rows


def _difference(name: str, summary: Summary, base: Summary) -> Text:
    """Green and red: told apart by their confidence intervals."""
    own, other = summary.intervals.get(name), base.intervals.get(name)
    if own is None or other is None:
        return Text("-")
    said = f"{100.0 * (own.mean - other.mean):+.2f} pt" if name == "goodput" else change(own.mean, other.mean)
    kind = verdict(name, summary, base, higher=COMPARED[name])
    return Text(said, style={"good": "green", "bad": "red"}.get(kind, ""))


def _table(first: str, columns: Sequence[str]) -> Table:
    """An empty one, without lines: eight columns are 80 characters. A column's name has a word a line."""
    rows = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    rows.add_column(Text(f"\n{printable(first)}"), overflow="fold", min_width=14)
    for name in columns:
        rows.add_column("\n".join(name.rsplit(" ", 1)) if " " in name else f"\n{name}", justify="right", min_width=8)
    return rows


def _parts(summary: Summary, summaries: Sequence[Summary]) -> Iterator[tuple[Text, Part]]:
    """The run, and its classes where there are several."""
    yield _title(summary, summaries), summary.total
    for name, part in summary.classes.items() if len(summary.classes) > 1 else ():
        yield Text(f"  {printable(name)}"), part


def _title(summary: Summary, summaries: Sequence[Summary]) -> Text:
    return Text(printable(title_of(summary, summaries)), style="bold")


def _endings(part: Part) -> Text:
    """The most frequent ways a part's requests ended."""
    said = [
        f"{ending.outcome} {ending.count}" + (f" ({ending.reason})" if ending.reason else "")
        for ending in part.endings[:3]
    ]
    more = len(part.endings) - len(said)
    return Text(printable(", ".join(said)) + (f", {more} more way{'s' if more > 1 else ''}" if more else ""))


def _remarks(summaries: Sequence[Summary]) -> Iterator[tuple[str, str]]:
    """Lines and their styles."""
    for summary in summaries:
        name = printable(title_of(summary, summaries))
        if not summary.valid:
            late = f"late by {seconds(summary.lag_p99)} at p99, more than {seconds(LAG_BOUND)}"
            yield f"{name}: invalid: the sender was {late}", "bold red"
        if summary.repeats > 1:
            halves = {metric: found for metric, found in summary.intervals.items() if found.half is not None}
            said = [f"{metric} {word(halves[metric].mean)} +- {word(halves[metric].half or 0.0)}"
                    for metric, word in (("goodput", share), ("ttft_p99", seconds), ("e2e_p99", seconds))
                    if metric in halves]  # fmt: skip
            yield f"{name}: over {summary.repeats} repeats, at 95 % confidence: {', '.join(said)}", ""
        if summary.total.uncounted:
            yield f"{name}: {summary.total.uncounted} answers told no usage and have no TPOT", "yellow"
