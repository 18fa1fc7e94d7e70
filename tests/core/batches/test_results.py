"""Results of lines: which answers are tried again, and what stands in the files."""

from __future__ import annotations

import json

import pytest

from gateway.core.batches.results import (
    EXPIRED,
    LATEST,
    TRIES,
    again_in,
    around,
    is_json,
    no_json,
    on_one_line,
    too_long,
    unanswered_line,
)


@pytest.mark.parametrize(
    ("status", "after", "helps", "tries", "wait"),
    [
        (200, None, True, 1, None),
        (400, None, False, 1, None),
        (404, None, True, 9, None),
        (429, 30.0, True, 1, 30.0),
        (429, 3600.0, False, 1, LATEST),  # a time that SDKs would not wait
        (429, None, False, 1, None),  # a prompt larger than its quota
        (503, 0.0, True, 500, 0.1),
        (503, None, True, 1, 2.0),
        (503, None, True, 500, LATEST),
        (500, None, True, 1, 2.0),
        (502, None, True, TRIES - 1, 16.0),
        (502, None, True, TRIES, None),
        (504, 5.0, True, 2, 4.0),  # no engine's fault has a time
        (500, None, False, 1, None),
    ],
)
def test_what_is_tried_again(status: int, after: float | None, helps: bool, tries: int, wait: float | None) -> None:
    assert again_in(status, after, helps, tries) == wait


def test_a_result_is_one_line_of_json() -> None:
    body = b'{"a": [1.50,\n 2],\r\n "b": "\\n\xc3\xa9"}'
    assert is_json(body)
    assert is_json(memoryview(body))
    before, behind = around("r", "a\nb", 200, "q")
    line = before + on_one_line(body) + behind
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "id": "r", "custom_id": "a\nb", "error": None,
        "response": {"status_code": 200, "request_id": "q", "body": {"a": [1.5, 2], "b": "\né"}},
    }  # fmt: skip
    for broken in (b"", b"<html>", b'{"a":', b"[" * 1_000_000 + b"]" * 1_000_000):
        assert not is_json(broken)


def test_a_line_without_an_answer_says_why() -> None:
    for error, code in ((EXPIRED, "batch_expired"), (no_json(200), "upstream_error"), (too_long(), "answer_too_long")):
        result = json.loads(unanswered_line("r", "a", error))
        assert (result["response"], result["error"]["code"]) == (None, code)
