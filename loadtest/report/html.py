"""Report as one page of HTML: no script, nothing fetched, so it can be mailed, archived and opened offline.

Whatever a server, a policy or a scenario named is text here and nothing else: all of it goes through `escape`. Every
chart has its content in words beside it, for whoever cannot see it, and the figures are in tables as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from loadtest.report import curves
from loadtest.report.comparison import base_of, first_name, title_of
from loadtest.report.number_format import seconds, share
from loadtest.report.records import Run, Slo
from loadtest.report.sheets import OFFERED, OURS, Sheet, differences, distributions, endings, figures
from loadtest.report.stats import LAG_BOUND
from loadtest.report.summary import Summary

FEW = 2  # runs whose latencies need no fold
MANY = 4  # runs over time that need none
FEW_CLASSES = 4  # runs whose classes are in one table with them


def page(runs: Sequence[Run], summaries: Sequence[Summary], *, partial: bool = False) -> str:
    """The whole page. `summaries`: one for each of `runs`, in their order."""
    close = curves.detailed(runs)
    titles = [title_of(run, runs) for run in close]
    own = [summaries[[id(one) for one in runs].index(id(run))] for run in close]
    folder = resources.files("loadtest.report")
    chosen = _chosen(runs, close, titles)
    opened = " open" if len(close) <= FEW else ""
    parts = [
        _section("Over offered load", curves.over_load(summaries)),
        _section("Over the number of engines", curves.over_engines(summaries)),
        _section("Over money", curves.over_money(summaries)),
        f'<h2>Figures</h2><div class="card">{_figures(summaries)}</div>',
        _section("Latencies", curves.distributions(close, titles), chosen),
        f'<details class="card"{opened}><summary>The latencies as figures</summary>'
        f"{_table(distributions(own, titles))}</details>",
        "<h2>How requests ended</h2>",
        f'<div class="card">{_table(endings(own, titles))}</div>',
        *_over_time(close, titles),
    ]
    return (
        (folder / "page.html")
        .read_text()
        .format(
            names=escape(_names(runs)),
            style="".join((folder / name).read_text() for name in ("plots.css", "report.css")),
            length=_length(summaries),
            banners="\n".join(_banners(summaries, partial=partial)),
            parts="\n".join(filter(None, parts)),
            slos=_slos(runs),
            lag_bound=seconds(LAG_BOUND),
            about="\n".join(_about(summary, title_of(summary, summaries)) for summary in summaries),
        )
    )


def _names(runs: Sequence[Run]) -> str:
    """Names that are compared, and the numbers of engines of each."""
    names, _, engines = zip(*(run.name.partition(", ") for run in runs), strict=True)
    numbers = list(dict.fromkeys(number.partition(" ")[0] for number in engines if number))
    over = f"; {', '.join(numbers)} engines" if numbers else ""
    return ", ".join(dict.fromkeys(names)) + over


def _chosen(runs: Sequence[Run], close: Sequence[Run], titles: Sequence[str]) -> str:
    """Runs that are looked at closely, if that is not all of them."""
    if len(close) == len(runs):
        return ""
    names = {run.name for run in runs}
    rates = ": each at its highest rate" if len(names) < len(runs) else ""
    others = f"; {len(names) - len(close)} more are in the figures above alone" if len(names) > len(close) else ""
    return f"Below: {'; '.join(titles)}{rates}{others}."


def _figures(summaries: Sequence[Summary]) -> str:
    """Figures of runs, with their classes, which are folded away where there are many; and how runs differ."""
    folded = len(summaries) > FEW_CLASSES and any(len(summary.classes) > 1 for summary in summaries)

    def tables(*, classes: bool) -> str:
        return "".join(_table(figures("run", columns, summaries, classes=classes)) for columns in (OFFERED, OURS))

    parts = [f'<p class="faint small">The measured part only.</p>{tables(classes=not folded)}']
    if folded:
        parts.append(f"<details><summary>The same for every class</summary>{tables(classes=True)}</details>")
    if any(base_of(summary, summaries) for summary in summaries):
        engines = ", with as many engines" if ", " in summaries[0].name else ""
        same = f"Differences from {first_name(summaries)} at the same rate{engines}."
        parts.append(f'<p class="faint small">{escape(same)}</p>{_table(differences(summaries))}')
    return "".join(parts)


def _table(sheet: Sheet) -> str:
    """A table that is scrolled where it has no room."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in (sheet.first, *sheet.heads))
    rows = []
    for row in sheet.rows:
        cells = [
            f'<td class="{cell.style}">{escape(cell.text)}'
            + (f"<small>&plusmn; {escape(cell.half)}</small></td>" if cell.half else "</td>")
            for cell in row.cells
        ]
        part = ' class="class"' if row.part else ""
        rows.append(f'<tr><th scope="row"{part}>{escape(row.title)}</th>{"".join(cells)}</tr>')
    head, body = f"<thead><tr>{heads}</tr></thead>", f"<tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table>{head}{body}</table></div>'


def _over_time(runs: Sequence[Run], titles: Sequence[str]) -> Iterable[str]:
    """Yield the charts over time. With more than MANY runs, the first run's charts are open and each other run's are in
    a fold."""
    shaded = "Shaded: warm-up and cool-down, which count nowhere else."
    drawn = [[*curves.classes_over_time(run, title), *curves.engines_over_time(run, title)]
             for run, title in zip(runs, titles, strict=True)]  # fmt: skip
    if len(runs) <= MANY:
        yield _section("Over time", [each for charts in drawn for each in charts], shaded)
        return
    yield _section("Over time", drawn[0], shaded)
    for title, charts in zip(titles[1:], drawn[1:], strict=True):
        yield f'<details><summary>{escape(title)}</summary><div class="charts">{"".join(charts)}</div></details>'


def _section(title: str, charts: Sequence[str], remark: str = "") -> str:
    """Charts under a heading; nothing at all where there are none."""
    said = f'<p class="faint small">{escape(remark)}</p>' if remark else ""
    return f'<h2>{escape(title)}</h2>{said}<div class="charts">{"".join(charts)}</div>' if charts else ""


def _length(summaries: Sequence[Summary]) -> str:
    offered = sum(summary.total.offered for summary in summaries)
    repeats = max((summary.repeats for summary in summaries), default=1)
    times = "" if repeats == 1 else f", {repeats} repeats"
    runs = "1 run" if len(summaries) == 1 else f"{len(summaries)} runs"
    return f'<p class="faint">{runs}{times}; {offered:,} requests in the measured part</p>'


def _banners(summaries: Sequence[Summary], *, partial: bool) -> Iterable[str]:
    if partial:
        yield (
            '<p class="card banner warn" role="alert"><b class="warn">Partial.</b> The run was broken off; this is what'
            " there was until then.</p>"
        )
    for summary in summaries:
        title = escape(title_of(summary, summaries))
        if not summary.valid:
            late = f"late by {seconds(summary.lag_p99)} at p99, more than {seconds(LAG_BOUND)}"
            yield (
                f'<p class="card banner bad" role="alert"><b class="bad">Invalid.</b> {title}: the sender was {late}. '
                "These figures say as much about the machine that sent as about the one that answered.</p>"
            )
        if summary.total.uncounted:
            yield (
                f'<p class="card banner warn">{title}: {summary.total.uncounted:,} answers told no usage; they have no '
                "TPOT, and their tokens are in no figure.</p>"
            )


def _slos(runs: Sequence[Run]) -> str:
    slos = list(dict.fromkeys(slo for run in runs for slo in run.slos))
    if not slos:
        return "<p>There was no SLO: every request that was answered in full met it.</p>"
    return "<p>SLO: " + "; ".join(escape(_slo(slo)) for slo in slos) + "</p>"


def _slo(slo: Slo) -> str:
    bounds = {"TTFT": slo.ttft, "TPOT": slo.tpot, "E2E": slo.e2e}
    said = [f"{name} at most {seconds(bound)}" for name, bound in bounds.items() if bound is not None]
    whose = slo.class_name or "every class without its own"
    return f"{whose}: {', '.join(said) or 'an answer'}, for {share(slo.attainment)} of what is offered"


def _about(summary: Summary, title: str) -> str:
    """Description of the run: command, versions and machine, as far as the run says."""
    window = summary.window
    length = "as long as there were requests" if math.isinf(window.duration) else f"{window.duration:g} s"
    told: dict[str, object] = {
        "offered": f"{summary.rate:g} requests/s" if summary.rate else "as they came",
        "repeats": summary.repeats,
        "duration": f"{length}, of which warm-up {window.warmup:g} s and cool-down {window.cooldown:g} s",
        "sender's lag": f"{seconds(summary.lag_p50)} at p50, {seconds(summary.lag_p99)} at p99",
        "fairness": f"{summary.fairness:.3f} over {len(summary.tenants)} tenants",
        **{str(name): value for name, value in summary.meta.items()},
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in told.items())
    return f'<details class="card"><summary>{escape(title)}</summary><dl class="small">{rows}</dl></details>'
