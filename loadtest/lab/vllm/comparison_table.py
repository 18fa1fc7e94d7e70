"""Table of the comparison, and its targets."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from loadtest.lab.vllm.comparison_load import BATCH, INTERACTIVE, KindOutcomes, Side
from loadtest.report.stats import quantile

TARGET = 0.97  # of Weir's interactive calls in time
LAG = 0.05  # seconds of the sender at p99: beyond it, the machine was too busy for times to mean much


def table_of(sides: Sequence[Side]) -> Table:
    """Table with a row for each side."""
    table = Table(
        "", "interactive in time", "first token p50, p99", "batch in time", "tokens/s in time", "sender's lag"
    )
    for side in sides:
        interactive, batch = side.kinds[INTERACTIVE.name], side.kinds[BATCH.name]
        first = f"{quantile(interactive.ttfts, 0.5):.2f}, {quantile(interactive.ttfts, 0.99):.2f} s"
        lag = f"{side.lag * 1e3:.0f} ms" + (" (busy machine)" if side.lag > LAG else "")
        table.add_row(side.name, _share(interactive), first, _share(batch), f"{side.tokens_per_second:,.0f}", lag)
    return table


def ends_of(sides: Sequence[Side]) -> list[str]:
    """Ends of the calls that were not answered in time, in words."""
    return [
        f"{side.name}, {name}: {_ends(counted)}"
        for side in sides
        for name, counted in side.kinds.items()
        if counted.in_time < counted.offered
    ]


def misses(sides: Sequence[Side]) -> list[str]:
    """The targets that Weir misses; none where it was not measured."""
    known = {side.name: side for side in sides}
    weir, direct = known.get("weir"), known.get("direct")
    if weir is None:
        return []
    found: list[str] = []
    share = weir.kinds[INTERACTIVE.name].share
    if share < TARGET:
        found.append(f"{share:.1%} of the interactive calls were in time, not {TARGET:.0%}")
    if direct is not None and weir.tokens_per_second < direct.tokens_per_second:
        found.append(f"{weir.tokens_per_second:,.0f} tokens/s in time, fewer than direct access gives")
    return found


def _share(counted: KindOutcomes) -> str:
    return f"{counted.share:.1%} of {counted.offered}"


def _ends(counted: KindOutcomes) -> str:
    """`ok` is split by whether it was in time."""
    late = counted.ends["ok"] - counted.in_time
    ends = [f"{counted.in_time} in time", *([f"{late} late"] if late else [])]
    return ", ".join([*ends, *(f"{count} {end}" for end, count in counted.ends.most_common() if end != "ok")])
