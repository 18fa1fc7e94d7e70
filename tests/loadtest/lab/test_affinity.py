"""Comparison of prefix-cache estimates without and with cache events, on the same conversations."""

from __future__ import annotations

import msgspec
import pytest

from loadtest.lab.figures.affinity import ESTIMATE, EVENTS, SCENARIOS, hits, run

SHORT = msgspec.structs.replace(SCENARIOS["busy"], blocks=(1024,) * 2, rate=0.8, think=20.0, seconds=90.0, warm=0.0)


@pytest.mark.slow
def test_both_ways_answer_the_same_conversations() -> None:
    alone, by_events = run(SHORT, ESTIMATE, 1), run(SHORT, EVENTS, 1)
    for result in (alone, by_events):
        assert {tried.outcome for tried in result.tries} <= {"ok", "unfinished"}
        assert 0.1 < hits(result.tries) < 0.9
    assert alone.tries != by_events.tries, "events change nothing"
    assert run(SHORT, EVENTS, 1).tries == by_events.tries
