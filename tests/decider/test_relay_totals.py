"""Totals of relays: each is counted once, whoever has told of it, and however many have ended."""

from __future__ import annotations

import msgspec

from gateway.core.call_counts import CallCounts
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.decider.relays.totals import MOST_LEFT, LeftRelay, RelayTotals
from gateway.frames.messages import RelayCounts


def counts(calls: int, connections: int = 0) -> RelayCounts:
    made = CallCounts()
    for _ in range(calls):
        made.observe(Record(request_id="r", route="/v1/completions", outcome=Outcome.OK))
    return RelayCounts(made.told(), calls, connections, 0, {400: 1}, {}, {}, 0, 0, 0)


def test_a_relay_that_has_left_keeps_its_calls_and_has_no_connections() -> None:
    totals = RelayTotals(lambda _: True)
    totals.told((1, 1), counts(2, connections=7))
    totals.leaves((1, 1), 100)
    totals.leaves((2, 1), 101)  # it has told nothing
    assert [(each.ended, each.connections) for each in totals.all()] == [(2, 0)]
    totals.told((1, 1), counts(3, connections=1))  # it has only lost its connection
    assert [(each.ended, each.connections) for each in totals.all()] == [(3, 1)]
    assert totals.left() == []


def test_batches_of_a_relay_that_has_left_are_told_by_the_one_that_works_them_now() -> None:
    totals = RelayTotals(lambda pid: pid == 100)
    for key, states in (((1, 1), {"in_progress": 1}), ((2, 1), {})):
        of_batches = {"lines": {"completed": 2}, "line_calls": 8, "batch_states": states}
        totals.told(key, msgspec.structs.replace(counts(1), **of_batches))
    totals.leaves((1, 1), 100)
    left, stays = totals.all()
    assert (left.lines, left.line_calls, left.batch_states) == ({"completed": 2}, 0, {})
    assert (stays.lines, stays.line_calls) == ({"completed": 2}, 8)
    for number in range(2, 2 * MOST_LEFT):
        totals.told((3, number), msgspec.structs.replace(counts(1), lines={"completed": 1}, lost_spans=1))
        totals.leaves((3, number), 1000 + number)
    assert sum(each.lines["completed"] for each in totals.all()) == 4 + 2 * MOST_LEFT - 2
    assert sum(each.lost_spans for each in totals.all()) == 2 * MOST_LEFT - 2


def test_another_decider_counts_those_that_have_left_once() -> None:
    totals, after = RelayTotals(lambda _: True), RelayTotals(lambda _: True)
    totals.told((1, 1), counts(2))
    totals.leaves((1, 1), 100)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(totals.left()), type=list[LeftRelay])
    after.told((3, 9), counts(1))
    for _ in range(2):
        after.take(told)
    assert after.ended == 3


def test_the_ended_are_added_up_and_those_that_live_are_not() -> None:
    totals = RelayTotals(lambda pid: pid == 1)
    totals.told((9, 9), counts(5))
    totals.leaves((9, 9), 1)
    for number in range(1, 3 * MOST_LEFT):
        totals.told((1, number), counts(1))
        totals.leaves((1, number), 1000 + number)
    assert totals.ended == 5 + 3 * MOST_LEFT - 1
    assert sum(each.refusals[400] for each in totals.all()) == 3 * MOST_LEFT
    assert len(totals.left()) <= MOST_LEFT + 1
    totals.told((9, 9), counts(6))
    assert totals.ended == 6 + 3 * MOST_LEFT - 1
