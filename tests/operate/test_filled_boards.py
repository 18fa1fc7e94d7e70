"""Queries of the Grafana boards against a real Prometheus: `make boards`.

A gateway, engines and a sidecar run as processes under traffic that fills every panel: overload, an engine that fails,
a model that is woken, a start that fails. A panel with a query that finds nothing is wrong: its metric was renamed, or
its labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import until
from tests.deploy.test_boards import boards, queries
from tests.operate.site import OperatedSite
from tests.programs import PROMETHEUS, required

WITHIN = 90.0  # seconds for every query to find something
OVERLOAD = 60.0  # calls a second
RATE = "$__rate_interval"  # Grafana's variable for the range of a rate
pytestmark = [pytest.mark.slow, pytest.mark.prometheus]


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
        f"{board['title']}, {title}: {query}"
        for title, query in queries(board)
        if not any(series["value"][1] != "NaN" for series in site.prometheus.query(query.replace(RATE, "5s")))
    ]


def test_every_query_of_every_panel_finds_data(tmp_path: Path) -> None:
    required(PROMETHEUS)
    empty: list[str] = []

    def filled() -> bool:
        empty[:] = [query for board in boards() for query in _empty(site, board)]
        return not empty

    with OperatedSite(tmp_path, "groups: []\n") as site:
        _fill(site)
        until(filled, WITHIN, every=1.0)
    assert empty == []
