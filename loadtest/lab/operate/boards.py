"""Queries of the Grafana boards against a real Prometheus: `python -m loadtest.lab.operate.boards --help`.

A gateway, engines and a sidecar run as processes under traffic that fills every panel: overload, an engine that fails,
a model that is woken, a start that fails. A panel with a query that finds nothing is wrong: its metric was renamed, or
its labels.

Exit status 0: every query of every panel has data; 1: not so; 2: bad arguments, or no Prometheus.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from loadtest.lab.operate.debian import PROMETHEUS, NoProgram
from loadtest.lab.operate.site import OperatedSite
from loadtest.lab.rows import parser_of, terminal
from loadtest.processes import until

FOLDER = Path(__file__).parents[3] / "deploy/grafana"
WITHIN = 90.0  # seconds for every query to find something
OVERLOAD = 60.0  # calls a second
RATE = "$__rate_interval"  # Grafana's variable for the range of a rate


def boards() -> list[dict[str, Any]]:
    """Return the boards of deploy/grafana, as Grafana imports them."""
    return [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]


def queries(board: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each PromQL query of a board with its panel's title."""
    return [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]


def _fill(site: OperatedSite) -> None:
    """Traffic and faults after which no panel may be empty."""
    site.callers("light", 2.0)
    site.callers("flood", OVERLOAD)
    site.callers("small", 2.0, model="other", key=site.key)
    site.chat("one", tier="flex")  # which has the time to wait until it is awake
    site.model_faults("two", {"fail_start": "ValueError: no such model"})
    site.chat("two", timeout=1.0)
    site.engines["a"].kill()


def _empty(site: OperatedSite, board: dict[str, Any]) -> list[str]:
    """Return the queries of a board that find nothing, or no number."""
    return [
        f"{title}: {query}"
        for title, query in queries(board)
        if not any(series["value"][1] != "NaN" for series in site.prometheus.query(query.replace(RATE, "5s")))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; the exit status."""
    parser_of("operate.boards", "Grafana boards: whether each query finds data in a real Prometheus.").parse_args(argv)
    console = terminal()
    try:
        PROMETHEUS.install()
    except NoProgram as error:
        console.print(str(error))
        return 2
    found = boards()
    empty: list[list[str]] = []

    def filled() -> bool:
        empty[:] = [_empty(site, board) for board in found]
        return not any(empty)

    with (
        tempfile.TemporaryDirectory(prefix="weir-boards-") as folder,
        OperatedSite(Path(folder), "groups: []\n") as site,
    ):
        _fill(site)
        until(filled, WITHIN, every=1.0)
    table = Table("board", "panels", "queries", "without data")
    for board, missing in zip(found, empty, strict=True):
        counts = str(len(board["panels"])), str(len(queries(board)))
        table.add_row(board["title"], *counts, "\n".join(missing) or "none")
    console.print(table)
    return 1 if any(empty) else 0


if __name__ == "__main__":
    sys.exit(main())
