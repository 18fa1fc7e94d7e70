"""Reference pages of operators' files: equal to the generated ones, with a description of every field."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest

from gateway.cli import main as gateway
from gateway.core.policy.policy import Policy
from gateway.core.policy.schema import reference_text
from gateway.core.policy.types import Bounds
from gateway.shared.files.reference import reference_of
from gateway.shared.files.schema import schema_of
from gateway.shared.files.units import Seconds
from loadtest.load import scenario
from sidecar.cli import main as sidecar
from sidecar.core import config
from tests.docs.markdown import ROOT

PAGES: dict[str, tuple[Callable[[], str], type[msgspec.Struct]]] = {
    "policy": (reference_text, Policy),
    "sidecar-file": (config.reference_text, config.SidecarConfig),
    "scenario": (scenario.reference_text, scenario.Scenario),
}
COMMANDS = {
    "policy": (gateway, ["check", "--reference"]),
    "sidecar-file": (sidecar, ["check", "--reference"]),
    "scenario": (gateway, ["check", "--scenario", "--reference"]),
}
FIELD = re.compile(r"^`(\w+)`\n: (.+)\n: (.+)$", re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name: str) -> None:
    """If not: make generate"""
    assert (ROOT / "docs" / f"{name}.md").read_text() == PAGES[name][0]()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_the_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, flags = COMMANDS[name]
    assert command(flags) == 0
    assert capsys.readouterr().out == PAGES[name][0]()


@pytest.mark.parametrize("name", PAGES)
def test_every_field_has_a_meaning_and_a_value(name: str) -> None:
    text, kind = PAGES[name][0](), PAGES[name][1]
    top = schema_of(kind, "")
    fields = [field for struct in (top, *top["$defs"].values()) for field in struct["properties"]]
    assert sorted(found[0] for found in FIELD.findall(text)) == sorted(fields)


class Part(msgspec.Struct, frozen=True):
    """A part. `rest`: how long it rests; * is none."""

    shorthand: ClassVar[str] = "rest"

    rest: Annotated[Seconds, Bounds(ge=1, le=3600)] = 1.5
    words: tuple[Literal["a", "b"], ...] = ("a",)


class Whole(msgspec.Struct, frozen=True):
    """A whole. `first`: comes first. `other`: any of them; `need`: what it cannot do without. `more`: by name."""

    need: Seconds
    first: Part = Part()
    other: Part | None = Part(rest=3.0)
    more: Mapping[Literal["x"], Part] = {}
    free: Any = None


def test_a_mapping_at_several_places_has_one_section() -> None:
    lines = reference_of(Whole, "Title", "Lead.", "elsewhere").splitlines()
    assert lines[:4] == ["# Title", "", "Lead.", ""]
    assert lines[lines.index("## Top level"):] == [
        "## Top level", "", "A whole.", "",
        "`need`", ": What it cannot do without.", ": Time; required.", "",
        "`first`", ": Comes first.",
        ": Time from 1s to 1h or [mapping](#first); default `{rest: 1500ms, words: [a]}`.", "",
        "`other`", ": Any of them.", ": Time from 1s to 1h or [mapping](#first); default `{rest: 3s, words: [a]}`.", "",
        "`more`", ": By name.", ": Mapping of NAME (x) to: time from 1s to 1h or [mapping](#first); default none.", "",
        "`free`", ": Any JSON value; default null.", "",
        "## `first`", "", "A part.", "", "Also at `other`, `more.NAME`.", "",
        "`rest`", r": How long it rests; \* is none.", ": Time from 1s to 1h; default `1500ms`.", "",
        "`words`", ": List of: a or b; default `[a]`.",
    ]  # fmt: skip


class Several(msgspec.Struct, frozen=True):
    """Several wholes."""

    first: Part = Part()
    other: Part = Part(rest=3.0)


def test_defaults_that_differ_by_place_stand_elsewhere() -> None:
    text = reference_of(Several, "Title", "Lead.", "[there](a.yaml)")
    assert ": Time from 1s to 1h; default [there](a.yaml)." in text
    assert ": List of: a or b; default `[a]`." in text


class Alone(msgspec.Struct, frozen=True):
    """Holder of a part."""

    part: Part = Part()


def test_a_section_does_not_repeat_the_one_sentence_of_its_field() -> None:
    text = reference_of(Alone, "Title", "Lead.", "elsewhere")
    assert "`part`\n: A part." in text
    assert "## `part`\n\n`rest`" in text


class Many(msgspec.Struct, frozen=True):
    """Many parts. `a`, `b`, `c`, `d`, `e`, `f`: another."""

    a: Part = Part()
    b: Part = Part()
    c: Part = Part()
    d: Part = Part()
    e: Part = Part()
    f: Part = Part()


def test_of_many_places_of_a_section_the_first_are_named() -> None:
    assert "Also at `b`, `c`, `d` and 2 more that link here." in reference_of(Many, "Title", "Lead.", "")
