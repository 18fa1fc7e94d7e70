"""Times between machines: every time of every message is moved, and nothing else is."""

from __future__ import annotations

import copy
import math
from typing import Any, get_args

import msgspec
import pytest

from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.frames.calls import ask_of, refusal_of
from gateway.frames.durations import PARTS, TIMES, shift
from gateway.frames.messages import (
    AllHeld,
    ArrivalAsk,
    Ask,
    CallEnd,
    CallFacts,
    EndedRecords,
    EngineTerms,
    FirstByte,
    FromDecider,
    FromRelay,
    GrantTerms,
    Held,
    Judgement,
    Prefilled,
)
from tests.calls import a_call

T = 1000.0  # a time of day of this machine; durations are far below


def facts() -> CallFacts:
    return CallFacts("default", T + 30, math.inf, 1, 2, 3, 4, "m")


def ask(known: CallFacts | None = None) -> Ask:
    call = a_call(arrived=T, deadline=T + 60, asked_deadline=5.0, sdk_timeout=7.0)
    asked = ask_of(1, call, 1, wait=True)
    asked.facts = known
    return asked


def terms() -> GrantTerms:
    return GrantTerms(1, 0, 3, EngineTerms("e", "e", "http://e", 0.1, 0.2), 5, T, 0, 0, 0.5, facts(), hedge_after=2.0)


REFUSAL = Refused(Outcome.OK, "m", retry_after=1.0)


MESSAGES: list[Any] = [
    ask(),
    ask(facts()),
    FirstByte(1, T),
    ArrivalAsk(1, 0, "t", 1, T),
    CallEnd(1, T),
    CallEnd(1, T, first_byte=T - 1),
    Held(ask(facts()), terms(), 0.0),
    Held(ask(facts()), terms(), T + 1),
    Judgement(1, 0, facts(), b""),
    terms(),
    refusal_of(1, 0, REFUSAL, facts()),
    refusal_of(1, 0, REFUSAL),
    Prefilled(1, 0, T, "", "", ""),
    EndedRecords([(T, Record(request_id="a", route="/b")), (T + 1, Record(request_id="b", route="/b"))]),
    AllHeld(0, []),
]
# Durations, and seconds since 1970.
NO_TIMES = {
    "CallRequest": {"asked_deadline", "sdk_timeout"},
    "CallFacts": {"predicted_wait", "woken"},
    "GrantTerms": {"expected", "hedge_after"},
    "AttemptFailed": {"pause"},
    "RetryAnswer": {"pause"},
    "DrainOrder": {"within"},
    "Hello": {"started"},
    "Held": {"first_byte"},  # moved where it is no 0
}


def times(value: Any) -> list[float]:
    """The numbers of a message that are times of day."""
    found = []
    for each in msgspec.to_builtins(value):
        nested = times_of(each)
        found += nested
    return found


def times_of(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [time for each in value for time in times_of(each)]
    return [value] if isinstance(value, float) and T / 2 < value < math.inf else []


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_time_of_day_leaves_the_machine_and_each_comes_back(message: Any) -> None:
    sent = copy.deepcopy(message)
    before = times(sent)
    shift(sent, -T)
    assert times(sent) == []
    union = FromRelay if isinstance(message, FromRelay) else FromDecider
    come = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=union)
    shift(come, T)
    assert times(come) == pytest.approx(before)
    assert come == message


def test_every_number_that_may_be_a_time_is_judged() -> None:
    kinds = {*get_args(FromRelay), *get_args(FromDecider), *TIMES, *PARTS}
    for kind in kinds:
        numbers = {each.name for each in msgspec.structs.fields(kind) if each.type in (float, float | None)}
        assert numbers == {*TIMES.get(kind, ()), *NO_TIMES.get(kind.__name__, ())}, kind
