"""Counts of ended calls: those of several processes add up to what one would have counted."""

from __future__ import annotations

import msgspec
import pytest

from gateway.core.call_counts import CallCounts
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import PrefillNote, Record


def record(**fields: object) -> Record:
    plain = {"request_id": "r", "route": "/v1/chat/completions", "tenant": "t", "class_name": "default", "model": "m"}
    return Record(**{**plain, "engine": "e", "outcome": Outcome.OK, "total": 1.0} | fields)  # type: ignore[arg-type]


RECORDS = [
    record(queue=0.1, ttft=0.2, settled=True, prompt_tokens=5, completion_tokens=7, cached_tokens=2),
    record(queue=0.3, ttft=0.4, traced=True, trace_id="4b" * 16),
    record(predicted_wait=2.0, queue=1.5, attempts=3, affinity_tokens=4, shaped_tokens=6),
    record(engine="", outcome=Outcome.DEADLINE_UNREACHABLE, predicted_wait=8.0, model="who knows"),
    record(reason="deadline", outcome=Outcome.EXPIRED, tenant="other"),
    record(reason="deadline", outcome=Outcome.EXPIRED, tenant="other"),
    record(prefill=PrefillNote(reason="sooner", here=2.0, there=1.0, engine="engine-2")),
    record(prefill=PrefillNote(reason="sooner", here=2.0, there=1.0, engine="engine-2", failure="timeout")),
    record(prefill=PrefillNote(reason="short", here=0.1)),
    record(prefill=PrefillNote(reason="short", here=0.1)),
]


def test_counts_of_several_processes_add_up() -> None:
    one, first, second, both = CallCounts(), CallCounts(), CallCounts(), CallCounts()
    for number, each in enumerate(RECORDS):
        one.observe(each)
        (first, second)[number % 2].observe(each)
    for each in (first, second):
        both.add(each.told())
    assert msgspec.msgpack.decode(both.told())[1] == msgspec.msgpack.decode(one.told())[1]
    assert sorted(map(repr, both.rows)) == sorted(map(repr, one.rows))
    for key, row in one.rows.items():
        for name in row.__slots__:
            mine, theirs = getattr(row, name), getattr(both.rows[key], name)
            assert (mine if isinstance(mine, int) else mine.counts) == (
                theirs if isinstance(theirs, int) else theirs.counts
            )
    assert both.prefills == one.prefills == {("there", "sooner"): 1, ("here", "timeout"): 1, ("here", "short"): 2}
    assert (both.tenants, both.outcomes(), both.calls) == (one.tenants, one.outcomes(), len(RECORDS))


def test_a_model_that_nobody_has_is_no_label() -> None:
    counts = CallCounts(lambda model: model == "m")
    counts.observe(record(engine="", model="invented", outcome=Outcome.NOT_FOUND))
    counts.observe(record(engine="", outcome=Outcome.NOT_FOUND))
    assert sorted(model for _, _, model, _ in counts.rows) == ["m", "other"]


def test_a_whole_answer_tells_no_time_to_its_first_token() -> None:
    counts = CallCounts()
    for stream, ttft in ((True, 0.5), (False, 9.0)):
        counts.observe(record(ttft=ttft, stream=stream))
    (row,) = counts.rows.values()
    assert (row.requests, row.ttft.buckets()[-1][1], row.ttft.sum) == (2, 1, 0.5)


def test_what_is_no_count_is_not_added() -> None:
    counts = CallCounts()
    with pytest.raises(msgspec.MsgspecError):
        counts.add(b"\x91\x01")
    assert not counts.rows
