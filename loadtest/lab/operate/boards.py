"""Grafana boards, made of the list of panels, and their queries against a real Prometheus:
`python -m loadtest.lab.operate.boards --help`.

`--write` writes deploy/grafana. Without it a gateway, engines and a sidecar run as processes under traffic that fills
every panel: overload, an engine that fails, a model that is woken, a start that fails. A panel with a query that finds
nothing is wrong: its metric was renamed, or its labels.

Exit status 0: every query of every panel has data; 1: not so; 2: bad arguments, or no Prometheus.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from loadtest.lab.operate.debian import PROMETHEUS, NoProgram
from loadtest.lab.operate.panels import BOARDS, RATE, Board, Panel
from loadtest.lab.operate.site import OperatedSite
from loadtest.lab.rows import terminal
from loadtest.processes import until

FOLDER = Path(__file__).parents[3] / "deploy/grafana"
WIDTH, HEIGHT = 12, 8  # of a panel, in Grafana's grid of 24 columns
WITHIN = 90.0  # seconds for every query to find something
OVERLOAD = 60.0  # calls a second
SOURCE = {"type": "prometheus", "uid": "${source}"}


def board_json(board: Board) -> dict[str, Any]:
    """The board as Grafana imports it; its Prometheus is chosen at the top."""
    panels, x, y = [], 0, 0
    for number, panel in enumerate(board.panels, 1):
        width = 2 * WIDTH if panel.wide else WIDTH
        if x + width > 2 * WIDTH:
            x, y = 0, y + HEIGHT
        panels.append(_panel(panel, number, {"x": x, "y": y, "w": width, "h": HEIGHT}))
        x += width
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["weir"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def texts() -> dict[str, str]:
    """The files of deploy/grafana, by name."""
    return {
        f"{board.uid.removeprefix('weir-')}.json": json.dumps(board_json(board), indent=1) + "\n" for board in BOARDS
    }


def _fill(site: OperatedSite) -> None:
    """Traffic and faults after which no panel may be empty."""
    site.callers("light", 2.0)
    site.callers("flood", OVERLOAD)
    site.callers("small", 2.0, model="other", key=site.key)
    site.chat("one", tier="flex")  # which has the time to wait until it is awake
    site.model_faults("two", {"fail_start": "ValueError: no such model"})
    site.chat("two", timeout=1.0)
    site.engines["a"].kill()


def _empty(site: OperatedSite) -> list[tuple[Board, Panel, str]]:
    """Queries that find nothing, or no number."""
    return [
        (board, panel, query)
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries.values()
        if not any(series["value"][1] != "NaN" for series in site.prometheus.query(query.replace(RATE, "5s")))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Write or run and print; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.operate.boards",
        description="Grafana boards: their JSON, and whether each query finds data in a real Prometheus.",
    )
    parser.add_argument("--write", action="store_true", help="write the JSON into deploy/grafana, and nothing else")
    if parser.parse_args(argv).write:
        for name, text in texts().items():
            (FOLDER / name).write_text(text)
        return 0
    console = terminal()
    try:
        PROMETHEUS.install()
    except NoProgram as error:
        console.print(str(error))
        return 2
    missing: list[tuple[Board, Panel, str]] = []

    def filled() -> bool:
        missing[:] = _empty(site)
        return not missing

    with (
        tempfile.TemporaryDirectory(prefix="weir-boards-") as folder,
        OperatedSite(Path(folder), "groups: []\n") as site,
    ):
        _fill(site)
        until(filled, WITHIN, every=1.0)
    table = Table("board", "panels", "queries", "without data")
    for board in BOARDS:
        empty = [f"{panel.title}: {query}" for of, panel, query in missing if of is board]
        queries = sum(len(panel.queries) for panel in board.panels)
        table.add_row(board.title, str(len(board.panels)), str(queries), "\n".join(empty) or "none")
    console.print(table)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
