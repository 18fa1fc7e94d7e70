"""Ring of ended calls: what lies behind a serial number."""

from __future__ import annotations

from gateway.core.request.record import Record
from gateway.decider.ended_calls import EndedCalls


def test_a_serial_number_beyond_all_calls_has_none_behind_it() -> None:
    ring = EndedCalls(2)
    for number in range(3):
        ring.add(Record(request_id=str(number), route=""), float(number))
    assert [record.request_id for _, record in ring.after(0, 10)[1]] == ["1", "2"]
    assert [record.request_id for _, record in ring.after(2, 10)[1]] == ["2"]
    for serial in (3, 4, 10**30):
        assert ring.after(serial, 10)[1] == ()
