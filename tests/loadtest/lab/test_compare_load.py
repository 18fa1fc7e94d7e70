"""Counts of the comparison on a real vLLM, tested without one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.clients.client import Answer
from loadtest.lab.vllm.comparison import arguments
from loadtest.lab.vllm.comparison_load import (
    BATCH,
    INTERACTIVE,
    KINDS,
    CallKind,
    KindOutcomes,
    ScheduledCall,
    Side,
    plan,
    save,
    side,
    together,
)
from loadtest.lab.vllm.comparison_table import ends_of, misses


def an_answer(first: float, last: float, **other: object) -> Answer:
    """A stream to a call that was to be sent at 100 s: first token and end, seconds after that."""
    fields = {"status": 200, "complete": True, "streamed": True, "done": True, "events": 3, **other}
    return Answer(
        intended=100.0,
        sent=100.01,
        first_byte=100.0,
        first_event=100.0 + first,
        finished=100.0 + last,
        prompt_tokens=30,
        completion_tokens=10,
        **fields,  # type: ignore[arg-type] # fields of Answer, passed through
    )


def test_a_seed_gives_the_same_calls_half_of_each_kind() -> None:
    planned = plan(50.0, 60.0, 1)
    assert planned == plan(50.0, 60.0, 1)
    assert planned != plan(50.0, 60.0, 2)
    assert 2700 < len(planned) < 3300
    assert all(0.0 < before.at <= after.at < 60.0 for before, after in pairwise(planned))
    for kind in KINDS:
        own = [call for call in planned if call.kind == kind]
        assert 0.45 < len(own) / len(planned) < 0.55
        assert {len(call.prompt.split()) for call in own} == {kind.words}


@pytest.mark.parametrize(
    ("kind", "answer", "in_time", "end"),
    [
        (INTERACTIVE, an_answer(0.9, 40.0), True, "ok"),
        (INTERACTIVE, an_answer(1.1, 1.2), False, "ok"),
        (INTERACTIVE, an_answer(0.9, 2.0, done=False, complete=False), False, "cut"),
        (INTERACTIVE, an_answer(0.9, 2.0, timed_out=True), False, "given_up"),
        (BATCH, an_answer(25.0, 29.9), True, "ok"),
        (BATCH, an_answer(0.1, 30.1), False, "ok"),
        (
            BATCH,
            Answer(intended=100.0, sent=100.0, finished=100.1, status=503, complete=True, reason="shed"),
            False,
            "shed",
        ),
    ],
)
def test_a_call_is_in_time_by_its_kinds_target_from_when_it_was_to_be_sent(
    kind: CallKind, answer: Answer, in_time: bool, end: str, tmp_path: Path
) -> None:
    planned = [ScheduledCall(0.0, kind, "words")]
    counted = side("weir", planned, [answer], 60.0).kinds[kind.name]
    assert (counted.offered, counted.in_time, dict(counted.ends)) == (1, int(in_time), {end: 1})
    assert counted.tokens == (40 if in_time else 0)
    save(tmp_path / "calls", planned, [answer])
    assert json.loads((tmp_path / "calls").read_text())["in_time"] is in_time


def a_side(name: str, share: float, tokens: int) -> Side:
    counted = KindOutcomes(offered=100, in_time=round(share * 100), tokens=tokens)
    counted.ends.update(ok=100)
    return Side(name=name, seconds=60.0, kinds={INTERACTIVE.name: counted, BATCH.name: KindOutcomes()}, lag=0.01)


@pytest.mark.parametrize(
    ("sides", "missed"),
    [
        ([a_side("weir", 0.97, 600), a_side("direct", 0.05, 600)], []),
        ([a_side("weir", 0.96, 600)], ["96.0% of the interactive calls were in time, not 97%"]),
        (
            [a_side("weir", 1.0, 599), a_side("direct", 1.0, 6000)],
            ["10 tokens/s in time, fewer than direct access gives"],
        ),
        ([a_side("direct", 0.05, 600)], []),
    ],
)
def test_targets(sides: list[Side], missed: list[str]) -> None:
    assert misses(sides) == missed


def test_rounds_are_added_up() -> None:
    (weir, direct) = together([a_side("weir", 0.9, 60), a_side("direct", 0.1, 6), a_side("weir", 1.0, 60)])
    assert (weir.seconds, weir.kinds["interactive"].share, weir.tokens_per_second) == (120.0, 0.95, 1.0)
    assert direct.seconds == 60.0
    assert ends_of([weir]) == ["weir, interactive: 190 in time, 10 late"]


@pytest.mark.parametrize("argv", [["--sides", "nginx"], ["--seconds", "0"], ["--policy", "absent.yaml"]])
def test_bad_arguments(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(argv)
    assert ended.value.code == 2
