"""Grafana boards as they are shipped: their layout, and queries of metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
METRICS = "".join(
    file.read_text()
    for folder in ("gateway/decider/metrics", "sidecar/control")
    for file in (ROOT / folder).glob("*.py")
)

PREFIXES = ("", "weir_", "weir_engine_")  # that rows of a table leave out
SUFFIX = re.compile(r"_(total|bucket)$")


def boards() -> list[dict[str, Any]]:
    """Return the boards of deploy/grafana, as Grafana imports them."""
    return [json.loads(file.read_text()) for file in sorted((ROOT / "deploy/grafana").glob("*.json"))]


def queries(board: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each PromQL query of a board with its panel's title."""
    return [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]


pytestmark = pytest.mark.parametrize("board", boards(), ids=lambda board: board["uid"])


def test_panels_lie_side_by_side_and_have_ids_of_their_own(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    cells = [
        (x, panel["gridPos"]["y"])
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_every_metric_of_a_query_is_one_of_ours(board: dict[str, Any]) -> None:
    names = {SUFFIX.sub("", name) for _, query in queries(board) for name in re.findall(r"\b(?:weir|vllm)_\w+", query)}
    assert names
    unknown = {name for name in names if not any(f'"{name.removeprefix(prefix)}"' in METRICS for prefix in PREFIXES)}
    assert unknown == set()


def test_a_board_names_its_prometheus_by_a_variable(board: dict[str, Any]) -> None:
    assert board["templating"]["list"][0]["name"] == "source"
    sources = [each["datasource"]["uid"] for panel in board["panels"] for each in (panel, *panel["targets"])]
    assert set(sources) == {"${source}"}
