"""Comparison of prefix-cache estimates by time and by events, on the same conversations."""

from __future__ import annotations

import msgspec
import pytest

from loadtest.lab.figures.affinity import EVENTS, SCENARIOS, hits, run

SHORT = msgspec.structs.replace(SCENARIOS["busy"], blocks=(1024,) * 2, rate=0.8, think=20.0, seconds=90.0, warm=0.0)


@pytest.mark.slow
def test_both_ways_answer_the_same_conversations() -> None:
    by_clock, by_events = run(SHORT, "10m", 1), run(SHORT, EVENTS, 1)
    for result in (by_clock, by_events):
        assert {tried.outcome for tried in result.tries} <= {"ok", "unfinished"}
        assert 0.1 < hits(result.tries) < 0.9
    assert by_clock.tries != by_events.tries, "events change nothing"
    assert run(SHORT, EVENTS, 1).tries == by_events.tries
