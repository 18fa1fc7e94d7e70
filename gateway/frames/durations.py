"""Times of messages between machines: durations from now, where on one machine they are seconds of its clock.

Whoever sends takes its own time from each; whoever receives adds its own. What is left is the way between them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from gateway.frames import messages as frames

TIMES: Final = MappingProxyType[type, tuple[str, ...]](
    {
        frames.CallRequest: ("arrived", "deadline"),
        frames.CallFacts: ("deadline", "ttft_by"),
        frames.FirstByte: ("at",),
        frames.ArrivalAsk: ("at",),
        frames.Prefilled: ("at",),
        frames.CallEnd: ("at", "first_byte"),
        frames.GrantTerms: ("taken_at",),
    }
)
PARTS: Final = MappingProxyType[type, tuple[str, ...]](
    {
        frames.Ask: ("call", "facts"),
        frames.Held: ("ask", "terms"),
        frames.Judgement: ("facts",),
        frames.GrantTerms: ("facts",),
        frames.RefusedCall: ("facts",),
    }
)


def shift(message: Any, by: float) -> None:
    """Add `by` seconds to every time of a message or a part of one, in place."""
    kind = type(message)
    for name in TIMES.get(kind, ()):
        at = getattr(message, name)
        if at is not None:
            setattr(message, name, at + by)
    for name in PARTS.get(kind, ()):
        shift(getattr(message, name), by)
    if isinstance(message, frames.EndedRecords):
        message.calls = [(at + by, record) for at, record in message.calls]
    elif isinstance(message, frames.Held) and message.first_byte:  # 0: not yet
        message.first_byte += by
