"""Times of messages between machines: durations from now, where on one machine they are seconds of its clock.

Whoever sends takes its own time from each; whoever receives adds its own. What is left is the way between them.
"""

from __future__ import annotations

from gateway.frames.messages import (
    ArrivalAsk,
    Ask,
    CallEnd,
    CallFacts,
    FirstByte,
    GrantTerms,
    Held,
    Judgement,
    Message,
    RefusedCall,
    UnreadRequest,
)


def shift(message: Message, by: float) -> None:
    """Add `by` seconds to every time of a message, in place. 0 stands for no time where a field says so."""
    match message:
        case Ask():
            _ask(message, by)
        case FirstByte() | UnreadRequest() | ArrivalAsk():
            message.at += by
        case CallEnd():
            message.at += by
            if message.first_byte is not None:
                message.first_byte += by
        case Held():
            _ask(message.ask, by)
            _terms(message.terms, by)
            message.first_byte += by if message.first_byte else 0.0
        case Judgement():
            _facts(message.facts, by)
        case GrantTerms():
            _terms(message, by)
        case RefusedCall():
            _facts(message.facts, by)
        case _:
            return


def _ask(ask: Ask, by: float) -> None:
    ask.call.arrived += by
    ask.call.deadline += by
    _facts(ask.facts, by)


def _terms(terms: GrantTerms, by: float) -> None:
    terms.taken_at += by
    _facts(terms.facts, by)


def _facts(facts: CallFacts | None, by: float) -> None:
    if facts is not None:
        facts.deadline += by
        facts.ttft_by += by
