"""Counts by OpenTelemetry's conventions for generative AI: their boundaries, and which calls count where."""

from __future__ import annotations

import pytest

from gateway.core.call_counts import CallCounts
from gateway.core.gen_ai import BOUNDS, GenAiCounts
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record


def record(**more: object) -> Record:
    given: dict[str, object] = {
        "route": "/v1/chat/completions", "model": "m", "engine": "e", "outcome": Outcome.OK, "status": 200,
        "stream": True, "settled": True, "prompt_tokens": 5, "completion_tokens": 11, "ttft": 0.3, "total": 1.3,
    }  # fmt: skip
    return Record(request_id="r", **(given | more))  # type: ignore[arg-type]


def counted(*records: Record) -> dict[tuple[str, str, str], dict[str, int]]:
    counts = GenAiCounts()
    for each in records:
        counts.observe(each, each.model)
    return {key: {name: sum(row.of(name).counts) for name in BOUNDS} for key, row in counts.rows.items()}


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("duration", [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]),
        (
            "first_token",
            [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0],
        ),
        ("per_token", [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]),
        (
            "input",
            [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864],
        ),
    ],
)
def test_the_boundaries_are_the_conventions(name: str, bounds: list[float]) -> None:
    assert list(BOUNDS[name]) == bounds


def test_a_stream_counts_in_all_of_them() -> None:
    assert counted(record()) == {("chat", "m", ""): dict.fromkeys(BOUNDS, 1)}
    counts = GenAiCounts()
    counts.observe(record(), "m")
    assert counts.rows["chat", "m", ""].of("per_token").sum == pytest.approx(0.1)


def test_what_failed_or_came_whole_has_no_speed_of_tokens() -> None:
    whole = counted(record(stream=False))["chat", "m", ""]
    assert (whole["duration"], whole["input"], whole["first_token"], whole["per_token"]) == (1, 1, 0, 0)
    failed = counted(record(outcome=Outcome.SHED, settled=False))["chat", "m", "shed"]
    assert (failed["duration"], failed["input"], failed["first_token"]) == (1, 0, 0)
    one = counted(record(completion_tokens=1))["chat", "m", ""]
    assert (one["first_token"], one["per_token"]) == (1, 0)
    assert counted(record(route="/rerank")) == {}


def test_relays_counts_are_added_up_with_their_exemplars() -> None:
    relay, plain = CallCounts(gen_ai=True), CallCounts()
    traced = record(queue=0.1, trace_id="a" * 32, traced=True)
    relay.observe(traced)
    relay.observe(record(engine="", ttft=0.0, outcome=Outcome.SHED, trace_id="b" * 32, traced=True))
    relay.observe(record(ttft=0.0, trace_id="c" * 32, traced=True))
    plain.observe(record())
    totals = CallCounts()
    for told in (relay.told(), plain.told()):
        totals.add(told)
    row = totals.rows["/v1/chat/completions", "", "m", Outcome.OK]
    assert list(row.ttft.exemplars.values()) == [("a" * 32, 0.3)]
    assert list(row.duration.exemplars.values()) == [("c" * 32, 1.3)]
    refused = totals.rows["/v1/chat/completions", "", "m", Outcome.SHED]
    assert (refused.ttft.exemplars, refused.queue.exemplars) == ({}, {})
    assert {key: sum(row.of("duration").counts) for key, row in totals.gen_ai.rows.items()} == {
        ("chat", "m", ""): 2,
        ("chat", "m", "shed"): 1,
    }
