"""Spans of a call, from what was noted on its way: phases follow each other, attempts have their own parents."""

from __future__ import annotations

from itertools import count

from gateway.core.request.call_trace import CallTrace, Span
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.request.trace_context import TraceParent

PARENT = TraceParent("a" * 32, "b" * 16, sampled=True)
BEGAN = 100.0


def traced(parent: TraceParent | None = PARENT) -> CallTrace:
    numbers = count(1)
    return CallTrace(parent, "c" * 32, b"", lambda: f"{next(numbers):016x}")


def record(**more: object) -> Record:
    given = {"queue": 0.3, "ttft": 0.5, "total": 2.0, "engine": "e1", "outcome": Outcome.OK, "status": 200}
    return Record(request_id="r", route="/v1/chat/completions", model="m", **(given | more))  # type: ignore[arg-type]


def times(spans: list[Span]) -> dict[str, tuple[float, float]]:
    return {span.name: (round(span.start - BEGAN, 6), round(span.end - BEGAN, 6)) for span in spans}


def test_each_phase_of_an_answered_call_is_a_span() -> None:
    trace = traced()
    trace.whole, trace.parsed, trace.judged, trace.taken_at = 100.1, 100.15, 100.2, 100.3
    trace.woken = 0.05
    line = trace.attempt("e1", 100.35)
    spans = trace.spans(record(settled=True, prompt_tokens=7, completion_tokens=3, predicted_wait=0.2), BEGAN)
    assert times(spans) == {
        "POST /v1/chat/completions": (0.0, 2.0),
        "weir.read": (0.0, 0.1),
        "weir.admit": (0.1, 0.2),
        "weir.queue": (0.2, 0.3),
        "weir.wake": (0.25, 0.3),
        "weir.attempt": (0.35, 2.0),
        "weir.first_byte": (0.35, 0.5),
        "weir.stream": (0.5, 2.0),
    }
    by_name = {span.name: span for span in spans}
    root, attempt = spans[0], by_name["weir.attempt"]
    assert (root.parent_id, root.kind, root.error) == (PARENT.span_id, "server", "")
    assert {by_name[name].parent_id for name in ("weir.read", "weir.admit", "weir.queue", "weir.attempt")} == {
        root.span_id
    }
    assert by_name["weir.wake"].parent_id == by_name["weir.queue"].span_id
    assert by_name["weir.first_byte"].parent_id == by_name["weir.stream"].parent_id == attempt.span_id
    assert line == b"traceparent: 00-%b-%b-01\r\n" % (PARENT.trace_id.encode(), attempt.span_id.encode())
    assert len({span.span_id for span in spans}) == len(spans)
    facts = root.attributes
    assert (facts["gen_ai.request.model"], facts["weir.engine"], facts["gen_ai.usage.output_tokens"]) == ("m", "e1", 3)
    assert facts["weir.predicted_wait"] == 0.2
    assert "weir.reason" not in facts


def test_a_failed_attempt_ends_where_it_failed_and_says_why() -> None:
    trace = traced(None)
    trace.whole, trace.parsed, trace.judged, trace.taken_at = 100.1, 100.1, 100.1, 100.1
    trace.attempt("e0", 100.2)
    trace.failed("e0", "connect", 100.3)
    trace.attempt("e1", 100.3)
    spans = trace.spans(record(), BEGAN)
    first, second = [span for span in spans if span.name == "weir.attempt"]
    assert (round(first.end - BEGAN, 6), first.error) == (0.3, "connect")
    assert (round(second.end - BEGAN, 6), second.error) == (2.0, "")
    assert sum(span.name == "weir.stream" for span in spans) == 1
    assert (spans[0].parent_id, trace.trace_id) == ("", "c" * 32)


def test_of_two_attempts_that_failed_each_says_its_own_error() -> None:
    trace = traced(None)
    trace.whole = trace.parsed = trace.judged = trace.taken_at = 100.1
    for engine, error, at in (("e0", "connect", 100.3), ("e1", "reset", 100.4)):
        trace.attempt(engine, at - 0.1)
        trace.failed(engine, error, at)
    spans = trace.spans(record(), BEGAN)
    assert [(round(span.end - BEGAN, 6), span.error) for span in spans if span.name == "weir.attempt"] == [
        (0.3, "connect"),
        (0.4, "reset"),
    ]


def test_an_engine_has_one_name_in_all_spans() -> None:
    trace = traced()
    trace.whole = trace.parsed = trace.judged = trace.taken_at = 100.1
    trace.attempt("10.0.0.1:8000", 100.2)
    trace.attempt("e1", 100.3)
    spans = trace.spans(record(engine="10.0.0.1:8000"), BEGAN, {"10.0.0.1:8000": "left"})
    names = [span.attributes["weir.engine"] for span in spans if "weir.engine" in span.attributes]
    assert names == ["left", "left", "e1"]
    assert "weir.first_byte" in times(spans), "the attempt that answered is still known"


def test_a_hedge_that_lost_ends_with_the_others_first_byte() -> None:
    trace = traced()
    trace.whole = trace.parsed = trace.judged = trace.taken_at = 100.1
    trace.attempt("e0", 100.2)
    trace.attempt("e1", 100.3)
    lost = next(span for span in trace.spans(record(ttft=0.5), BEGAN) if span.attributes == {"weir.engine": "e0"})
    assert (lost.end - BEGAN, lost.error) == (0.5, "")


def test_a_grant_of_another_process_came_with_the_judgement() -> None:
    trace = traced()
    trace.whole, trace.parsed, trace.taken_at, trace.judged = 100.1, 100.15, 100.28, 100.3
    found = times(trace.spans(record(), BEGAN))
    assert (found["weir.admit"], found["weir.queue"]) == ((0.1, 0.15), (0.15, 0.28))


def test_a_refused_call_ends_in_the_phase_that_refused_it() -> None:
    trace = traced()
    trace.whole = 100.1
    refused = record(engine="", queue=0.0, ttft=0.0, outcome=Outcome.SHED, status=503, reason="too late")
    found = trace.spans(refused, BEGAN)
    assert times(found)["weir.admit"] == (0.1, 2.0)
    assert len(found) == 3
    assert (found[0].error, found[0].attributes["error.type"]) == (Outcome.SHED.value, Outcome.SHED.value)
    trace.parsed = trace.judged = 100.2
    assert times(trace.spans(refused, BEGAN))["weir.queue"] == (0.2, 2.0)
    trace.whole = 0.0
    assert len(trace.spans(refused, BEGAN)) == 1


def test_an_answer_that_is_whole_at_its_first_byte_has_no_stream() -> None:
    trace = traced()
    trace.whole = trace.parsed = trace.judged = trace.taken_at = 100.1
    trace.attempt("e1", 100.2)
    names = [span.name for span in trace.spans(record(ttft=2.0), BEGAN)]
    assert "weir.stream" not in names
    assert names[-1] == "weir.first_byte"
