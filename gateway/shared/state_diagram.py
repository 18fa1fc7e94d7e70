"""State diagram of a transition table, as Mermaid text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

_State = TypeVar("_State")
_Event = TypeVar("_Event", bound=str)


def state_diagram(
    transitions: Mapping[_State, Mapping[_Event, _State]], start: _State, name: Callable[[_State], str]
) -> str:
    """A line per pair of states, with the events that lead from the one to the other. `name`: a state in the text."""
    lines = ["stateDiagram-v2", f"    [*] --> {name(start)}"]
    for state, events in transitions.items():
        edges: dict[_State, list[str]] = {}
        for event, found in events.items():
            edges.setdefault(found, []).append(event)
        lines += [f"    {name(state)} --> {name(found)}: {', '.join(labels)}" for found, labels in edges.items()]
    return "\n".join(lines) + "\n"
