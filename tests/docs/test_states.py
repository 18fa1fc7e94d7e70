"""Diagrams in docs/states.md: equal to those generated from the state machines' tables."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

from gateway.core.admission import mode
from gateway.core.cluster import election
from gateway.core.engines import breaker
from gateway.core.engines.breaker import BreakerState
from gateway.relay.wire import states
from sidecar.core import lifecycle
from tests.docs.markdown import ROOT, fenced

MACHINES = (breaker, mode, lifecycle, states, election)
NAMES: dict[ModuleType, Any] = {  # from a word of the diagram to the state
    breaker: BreakerState,
    mode: lambda word: mode.Mode[word.upper()],
    lifecycle: lifecycle.State,
    states: states.NAMES.index,
    election: election.MemberState,
}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_diagram_has_every_edge_of_its_table_and_no_other(machine: Any) -> None:
    first, start, *lines = machine.diagram().splitlines()
    assert first == "stateDiagram-v2"
    begin = re.fullmatch(r"    \[\*\] --> (\w+)", start)
    assert begin is not None
    assert NAMES[machine](begin[1]) is next(iter(machine.TRANSITIONS))
    drawn = set()
    for line in lines:
        found = re.fullmatch(r"    (\w+) --> (\w+): (\w+(?:, \w+)*)", line)
        assert found is not None, line
        drawn |= {(NAMES[machine](found[1]), event, NAMES[machine](found[2])) for event in found[3].split(", ")}
    table = machine.TRANSITIONS.items()
    assert drawn == {(state, event, found) for state, events in table for event, found in events.items()}
    assert len(lines) == len({(state, found) for state, _, found in drawn}), "a line per pair of states"


def test_the_documentation_shows_the_diagrams() -> None:
    """If not, put what the `diagram()` of each says into docs/states.md."""
    blocks = fenced((ROOT / "docs" / "states.md").read_text())
    assert [text for language, text in blocks if language == "mermaid"] == [it.diagram() for it in MACHINES]


def test_the_documentation_explains_every_event() -> None:
    text = (ROOT / "docs" / "states.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    explained = [word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])]
    events = [event for it in MACHINES for event in {event for row in it.TRANSITIONS.values() for event in row}]
    assert sorted(explained) == sorted(events)
