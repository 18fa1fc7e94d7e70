"""Report as tables for a terminal, each within 80 columns, and remarks, one a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gateway.shared.printable import printable
from loadtest.report.comparison import title_of
from loadtest.report.number_format import seconds, share
from loadtest.report.records import Run
from loadtest.report.sheets import OFFERED, OURS, VLLMS, Sheet, differences, endings, figures
from loadtest.report.stats import LAG_BOUND
from loadtest.report.summary import Summary, summarise

STYLES = {"good": "green", "bad": "red"}
SHOWN = 3  # ways in which requests of a class ended


def table(runs: Sequence[Run], *, partial: bool = False) -> Group:
    """Return the tables to print, and the remarks: what was offered and kept, latencies, the figures of vLLM's own
    benchmark, how requests ended, and how runs differ."""
    summaries = [summarise(run) for run in runs]
    marked = [Text("partial: the run was broken off", style="bold yellow")] if partial else []
    sheets = [
        figures("run", OFFERED, summaries),
        figures("run", OURS, summaries),
        figures("as vLLM's", VLLMS, summaries, classes=False),
        endings(summaries, [title_of(summary, summaries) for summary in summaries], most=SHOWN),
        differences(summaries),
    ]
    remarks = [Text(line, style=style) for line, style in _remarks(summaries)]
    return Group(*marked, *(each for sheet in sheets if sheet.rows for each in (_table(sheet), Text())), *remarks)


def _table(sheet: Sheet) -> Table:
    """A table without lines: eight columns are 80 characters. A column's name has a word a line."""
    rows = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    rows.add_column(Text(f"\n{printable(sheet.first)}"), overflow="fold", min_width=14)
    for head in sheet.heads:
        words = "\n".join(head.rsplit(" ", 1)) if " " in head else f"\n{head}"
        rows.add_column(words, justify="right", min_width=8, overflow="fold")
    for row in sheet.rows:
        title = Text(f"  {printable(row.title)}") if row.part else Text(printable(row.title), style="bold")
        rows.add_row(title, *(Text(printable(cell.text), style=STYLES.get(cell.style, "")) for cell in row.cells))
    return rows


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
