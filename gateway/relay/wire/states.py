"""States of a client connection: TRANSITIONS are all there are; any other raises KeyError.

    HEAD -> BODY -> ANSWER -> HEAD, and from each of them an end: LINGER -> CLOSED, or CLOSED at once

Requests of a connection are served one at a time. HEAD with an empty buffer is an idle connection. In ANSWER the socket
is still read, so that a client that leaves is seen at once. In LINGER the last answer is written, and what the client
still sends is read and dropped: closing on unread bytes would reset the connection and take the answer with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

State = int  # a member of an Enum is hashed by a call, twice for each request
NAMES: Final = ("head", "body", "answer", "linger", "closed")
HEAD, BODY, ANSWER, LINGER, CLOSED = range(len(NAMES))
Event = Literal["wait", "call", "answer", "refuse", "close", "reset", "lost"]
ENDED: Final[Mapping[Event, State]] = MappingProxyType({"close": CLOSED, "reset": CLOSED, "lost": CLOSED})

TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType({
    HEAD: {"wait": BODY, "call": ANSWER, "refuse": LINGER, **ENDED},
    BODY: {"call": ANSWER, "refuse": LINGER, **ENDED},
    ANSWER: {"answer": HEAD, "refuse": LINGER, **ENDED},
    LINGER: {**ENDED},
    CLOSED: {**ENDED},
})  # fmt: skip


def after(event: Event) -> Mapping[State, State]:
    """Column of the table for one event: the next state by state. Use the mapping itself, because a look-up costs less
    than a method call."""
    return MappingProxyType({state: events[event] for state, events in TRANSITIONS.items() if event in events})
