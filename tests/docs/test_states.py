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


def diagram(machine: Any) -> str:
    """A machine's table as Mermaid text: a line per pair of states, with the events that lead from the one to the
    other."""
    special = {states: states.NAMES.__getitem__, mode: str}
    name = special.get(machine, lambda state: state.value)
    lines = ["stateDiagram-v2", f"    [*] --> {name(next(iter(machine.TRANSITIONS)))}"]
    for state, events in machine.TRANSITIONS.items():
        edges: dict[Any, list[str]] = {}
        for event, found in events.items():
            edges.setdefault(found, []).append(event)
        lines += [f"    {name(state)} --> {name(found)}: {', '.join(labels)}" for found, labels in edges.items()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_diagram_has_every_edge_of_its_table_and_no_other(machine: Any) -> None:
    first, start, *lines = diagram(machine).splitlines()
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
    """If not, put what `diagram` says of each into docs/states.md."""
    blocks = fenced((ROOT / "docs" / "states.md").read_text())
    assert [text for language, text in blocks if language == "mermaid"] == [diagram(it) for it in MACHINES]


def test_the_documentation_explains_every_event() -> None:
    text = (ROOT / "docs" / "states.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    explained = [word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])]
    events = [event for it in MACHINES for event in {event for row in it.TRANSITIONS.values() for event in row}]
    assert sorted(explained) == sorted(events)
