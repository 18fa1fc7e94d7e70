"""Times of messages between machines: durations from now, where on one machine they are seconds of its clock.

Whoever sends takes its own time from each; whoever receives adds its own. What is left is the way between them.
"""

from __future__ import annotations

from gateway.frames import messages as frames


def shift(message: frames.Message, by: float) -> None:
    """Add `by` seconds to every time of a message, in place. 0 stands for no time where a field says so."""
    match message:
        case frames.Ask():
            _ask(message, by)
        case frames.FirstByte() | frames.UnreadRequest() | frames.ArrivalAsk():
            message.at += by
        case frames.CallEnd():
            message.at += by
            if message.first_byte is not None:
                message.first_byte += by
        case frames.Held():
            _ask(message.ask, by)
            _terms(message.terms, by)
            message.first_byte += by if message.first_byte else 0.0
        case frames.Judgement():
            _facts(message.facts, by)
        case frames.GrantTerms():
            _terms(message, by)
        case frames.RefusedCall():
            _facts(message.facts, by)
        case _:
            return


def _ask(ask: frames.Ask, by: float) -> None:
    ask.call.arrived += by
    ask.call.deadline += by
    _facts(ask.facts, by)


def _terms(terms: frames.GrantTerms, by: float) -> None:
    terms.taken_at += by
    _facts(terms.facts, by)


def _facts(facts: frames.CallFacts | None, by: float) -> None:
    if facts is not None:
        facts.deadline += by
        facts.ttft_by += by
