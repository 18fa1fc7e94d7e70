"""Ring of ended calls: what lies behind a serial number, and what ended after a time."""

from __future__ import annotations

from gateway.core.request.record import COPY, MEMBER, Record
from gateway.decider.ended_calls import EndedCalls


def test_a_serial_number_beyond_all_calls_has_none_behind_it() -> None:
    ring = EndedCalls(2)
    for number in range(3):
        ring.add(Record(request_id=str(number), route=""), float(number))
    assert [record.request_id for _, record in ring.after(0, 10)[1]] == ["1", "2"]
    assert [record.request_id for _, record in ring.after(2, 10)[1]] == ["2"]
    for serial in (3, 4, 10**30):
        assert ring.after(serial, 10)[1] == ()


def ring_of(kept: int, *ends: float) -> EndedCalls:
    """A ring that was told of calls which ended at these times, in this order."""
    ring = EndedCalls(kept)
    for end in ends:
        ring.add(Record(request_id=str(end), route=""), end)
    return ring


def test_calls_that_are_told_late_hide_none_that_were_told_before() -> None:
    """As those of a relay that had no decider for a time."""
    ring = ring_of(9, 94.0, 96.0, 98.0, 70.0, 95.0, 97.0)
    assert [at for at, _ in ring.since(95.0)] == [98.0, 97.0, 96.0]
    assert [at for at, _ in ring.since(60.0)] == [98.0, 97.0, 96.0, 95.0, 94.0, 70.0]
    assert [record.request_id for _, record in ring.after(3, 2)[1]] == ["70.0", "95.0"], "serials are not moved"


def test_a_full_ring_reaches_back_to_the_latest_end_that_it_may_have_forgotten() -> None:
    assert ring_of(3, 94.0, 96.0, 70.0, 97.0).reach(100.0, 60.0) == 4.0
    assert ring_of(2, 94.0, 96.0, 70.0, 97.0).reach(100.0, 60.0) == 4.0, "the call of 70.0 came after that of 96.0"


def test_copies_for_mirrors_are_no_callers() -> None:
    ring = EndedCalls()
    for number, side in enumerate((MEMBER, COPY, MEMBER)):
        ring.add(Record(request_id=side, route="", mirrored=side), float(number))
    ring.add(Record(request_id="other", route=""), 3.0)
    assert [record.request_id for _, record in ring.callers(0.0)] == ["other", MEMBER]
    assert len(ring.since(0.0)) == 3
