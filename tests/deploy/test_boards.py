"""Grafana boards as they are shipped: what the list of panels makes, and of metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loadtest.lab.operate.boards import FOLDER, board_json, texts
from loadtest.lab.operate.panels import BOARDS, Board

ROOT = Path(__file__).parents[2]
METRICS = "".join(
    file.read_text()
    for folder in ("gateway/decider/metrics", "sidecar/control")
    for file in (ROOT / folder).glob("*.py")
)
SUFFIX = re.compile(r"_(total|bucket)$")


def test_the_files_are_what_the_panels_make() -> None:
    assert {file.name: file.read_text() for file in FOLDER.glob("*.json")} == texts(), "run `make generate`"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_lie_side_by_side_and_have_ids_of_their_own(board: Board) -> None:
    panels = board_json(board)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, panel["gridPos"]["y"])
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_metric_of_a_query_is_one_of_ours(board: Board) -> None:
    queries = [query for panel in board.panels for query in panel.queries.values()]
    names = {SUFFIX.sub("", name) for query in queries for name in re.findall(r"\b(?:weir|vllm)_\w+", query)}
    assert names
    unknown = {name for name in names if name not in METRICS and name.removeprefix("weir_engine_") not in METRICS}
    assert unknown == set()


def test_a_board_is_json_that_names_its_source_by_a_variable() -> None:
    for text in texts().values():
        board = json.loads(text)
        assert board["templating"]["list"][0]["name"] == "source"
        assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"${source}"}
