"""Picture of the README: drawn from the figures beside it, which are what the command measures."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from loadtest.clients.calls import Try
from loadtest.lab.figures.picture import FACTORS, FOLDER, PARTS, arguments, measured_again, share_of, written
from loadtest.lab.figures.picture_points import SIDES, ClassShare, Picture, table
from loadtest.lab.figures.picture_svg import draw
from loadtest.lab.figures.runs import Setting
from loadtest.simulate.inprocess import ClassTarget

FIGURES = Path(__file__).parents[3] / "docs" / "figures.md"


@pytest.fixture
def picture() -> Picture:
    return msgspec.json.decode((FOLDER / "picture.json").read_bytes(), type=Picture)


def test_the_picture_and_the_table_are_of_the_figures_beside_them(picture: Picture) -> None:
    drawn = (FOLDER / "picture.svg").read_text()
    assert draw(picture) == drawn
    assert written(picture) == (FOLDER / "picture.json").read_text()
    assert "\n".join(table(picture)) in FIGURES.read_text()
    assert {(point.side, point.factor) for point in picture.points} == {(s, f) for s in SIDES for f in FACTORS}
    for element in ET.fromstring(drawn).iter():  # noqa: S314 # our own file
        assert not any(name.endswith(("href", "src")) for name in element.attrib)
    assert "prefers-color-scheme: dark" in drawn
    assert "url(" not in drawn


def test_a_share_is_of_calls_that_were_to_be_sent_in_the_measured_part() -> None:
    def a_try(sent: float, finished: float, number: int = 1, outcome: str = "ok") -> Try:
        return Try("chat", number, sent, sent, first_byte=finished, finished=finished, outcome=outcome)

    tries = [
        a_try(59.0, 61.0),  # began before and is answered in time: what comes in and goes out is counted, not whose
        a_try(100.0, 101.0),
        a_try(100.0, 100.1, outcome="shed"),
        a_try(101.0, 102.0, number=2),
        a_try(100.0, 103.0),  # late
        a_try(179.0, 181.0),  # after the measured part
    ]
    setting = Setting(warm=60.0, measured=120.0)
    setting.targets = {"chat": ClassTarget(ttft=2.0, deadline=30.0)}
    assert share_of(setting, tries, "chat") == ClassShare(offered=4, in_time=3, first=2)


@pytest.mark.slow
def test_a_point_is_what_the_command_measures_and_other_sides_stay_as_they_are(picture: Picture) -> None:
    found = measured_again(picture, ["weir"], 1, factors=[0.5], seeds=[1])
    stay = [point for point in picture.points if point.side != "weir"]
    kept = next(point for point in picture.points if (point.side, point.factor, point.seed) == ("weir", 0.5, 1))
    assert found == msgspec.structs.replace(picture, points=[kept, *stay])


def test_the_command_line_names_what_is_measured_again() -> None:
    assert arguments([]).only == list(PARTS)
    assert arguments(["--only", "weir,agents", "--jobs", "3"]).only == ["weir", "agents"]
    assert arguments(["--draw-only"]).only == []
    for wrong in ("--only=weir,agent", "--jobs=0"):
        with pytest.raises(SystemExit):
            arguments([wrong])
