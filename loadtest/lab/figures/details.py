"""Details of the runs behind the figures: each class's tries, their endings and their waits."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from loadtest.lab.figures.runs import Measured, Setting
from loadtest.lab.rows import percent
from loadtest.report.stats import quantile
from loadtest.simulate.simulated_client import Try


def details_of(setting: Setting) -> Table:
    """Every class of every run: how its tries ended, how long those that were answered waited."""
    table = Table("run", "class", "tries/s", "ended", "queue p50, p99", "ttft p50, p99")
    for what, outcome in setting.known.items():
        tries = measured(setting, outcome)
        for name in sorted({tried.class_name for tried in tries}):
            own = [tried for tried in tries if tried.class_name == name]
            ends = Counter(tried.outcome for tried in own).most_common()
            good = [tried for tried in own if tried.outcome == "ok"]
            table.add_row(
                what,
                name,
                f"{len(own) / setting.measured:.1f}",
                ", ".join(f"{end} {percent(count / len(own))}" for end, count in ends),
                _times([tried.queue for tried in good if tried.queue >= 0.0]),
                _times([tried.first_byte - tried.sent for tried in good]),
            )
    return table


def _times(values: list[float]) -> str:
    return f"{quantile(values, 0.5):.2f}, {quantile(values, 0.99):.2f} s" if values else ""


def measured(setting: Setting, outcome: Measured) -> list[Try]:
    """The tries that ended in the measured part of a run, but not by its end."""
    tries = outcome.result.tries
    return [t for t in tries if setting.warm <= t.finished < setting.ends and t.outcome != "unfinished"]
