"""Answers of vLLM that only the sidecar asks for, and all that is refused. Metrics: tests/core/answer/test_vllm.py."""

from __future__ import annotations

import pytest

from gateway.shared.vllm.answers import AnswerError
from sidecar.core.vllm import Acknowledgement, Completion, done_from, said_from, sleeping_from, steps_from


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("other 1\n", 0.0),
        ('vllm:iteration_tokens_total_count 7\nvllm:iteration_tokens_total_bucket{le="1"} 9\n', 7.0),
        ('vllm:iteration_tokens_total_count{engine="0"} 7\nvllm:iteration_tokens_total_count{engine="1"} 2\n', 9.0),
        ("vllm:prompt_tokens_total 5\nvllm:generation_tokens_total 6\n", 11.0),
    ],
)
def test_a_number_changes_with_every_step(text: str, steps: float) -> None:
    assert steps_from(text.encode()) == steps


def test_the_other_answers() -> None:
    assert sleeping_from(b'{"is_sleeping":true}') is True
    assert said_from(b'{"choices":[{"text":" Paris","token_ids":[1,2]}]}') == Completion(" Paris", (1, 2))
    assert said_from(b'{"choices":[{"text":" Paris","token_ids":null}]}') == Completion(" Paris")
    assert done_from(b"") == done_from(b"{}") == Acknowledgement()
    assert done_from(b'{"status":"sleeping","level":2}') == Acknowledgement(status="sleeping", level=2)


DEEP = b'{"x":' + b"[" * 100_000


@pytest.mark.parametrize(
    ("reader", "bodies"),
    [
        (sleeping_from, [b'{"is_sleeping":"false"}', b'{"is_sleeping":0}']),
        (said_from, [b'{"choices":[]}', b'{"choices":[{"text":1}]}', b'{"choices":[{"text":"\xff"}]}']),
        (done_from, [b'{"level":"2"}', b'{"success":"no"}']),
        (steps_from, [b"vllm:prompt_tokens_total NaN\n"]),
    ],
)
def test_answers_that_are_refused(reader: object, bodies: list[bytes]) -> None:
    assert callable(reader)
    for body in (*bodies, b"[]", b"null", b"<html>", b"{", DEEP):
        with pytest.raises(AnswerError):
            reader(body)
