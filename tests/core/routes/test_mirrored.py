"""Answers of one side of a mirror, added up."""

from __future__ import annotations

from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.routes.canary import Answers


def test_answers_are_added_up_by_how_they_ended() -> None:
    answers = Answers()
    for outcome in (Outcome.OK, Outcome.OK, Outcome.UPSTREAM, Outcome.ENGINE_REFUSED, Outcome.QUEUE_FULL):
        record = Record(request_id="r", route="", outcome=outcome, completion_tokens=10, ttft=0.5)
        answers.add(record)
    answers.add(Record(request_id="r", route="", outcome=Outcome.OK, finish="stop"))
    assert answers.results == {"ok": 3, "error": 2, "dropped": 1}
    assert (answers.tokens, answers.ttft, answers.finishes) == (20, 1.0, {"stop": 1})
