"""Times between machines: every time of every message is moved, and nothing else is."""

from __future__ import annotations

import copy
import math
from typing import Any

import msgspec
import pytest

from gateway.core.request.outcome import Outcome
from gateway.frames.durations import shift
from gateway.frames.messages import (
    AllHeld,
    ArrivalAsk,
    Ask,
    CallEnd,
    CallFacts,
    FirstByte,
    FromDecider,
    FromRelay,
    GrantTerms,
    Held,
    Judgement,
    RefusedCall,
    UnreadRequest,
)

T = 1000.0  # a time of day of this machine; durations are far below


def facts() -> CallFacts:
    return CallFacts("default", T + 30, math.inf, 1, 2, 3, 4, "m")


def ask(known: CallFacts | None = None) -> Ask:
    return Ask(
        1, "id", "/v1/chat/completions", "m", "t", 1, T, T + 60, False, None, 1, 1, 0, 0, 0, 1, 0, (), 0, b"", "",
        5.0, 7.0, False, True, facts=known,
    )  # fmt: skip


MESSAGES: list[Any] = [
    ask(),
    ask(facts()),
    FirstByte(1, T),
    UnreadRequest("t", 1, T, "", Outcome.OK),
    ArrivalAsk(1, 0, "t", 1, T),
    CallEnd(1, T),
    CallEnd(1, T, first_byte=T - 1),
    Held(ask(facts()), "e", "http://e", 0, 1, 2, 0.5, T, 0.0),
    Held(ask(facts()), "e", "http://e", 0, 1, 2, 0.5, T, T + 1),
    Judgement(1, 0, facts(), b""),
    GrantTerms(1, 0, 3, "e", "e", "http://e", 0.1, 0.2, 5, T, 0, 0, 0.5, 0, 0.5, 2.0, facts(), b""),
    RefusedCall(1, 0, Outcome.OK, "m", None, None, 1.0, b"", True, "", False, "", "", None, False, facts(), 0.5),
    RefusedCall(1, 0, Outcome.OK, "m", None, None, 1.0, b"", True, "", False, "", "", None, False, None, 0.5),
    AllHeld(0, []),
]


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
