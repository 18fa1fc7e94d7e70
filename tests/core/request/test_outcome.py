"""Outcomes: one row of the status table for each, and the refusal that its caller receives."""

from __future__ import annotations

import json
import random

import pytest

from gateway.core.request.outcome import STATUS, Outcome, Refused, got, refusal_headers
from gateway.core.request.record import Record


def headers(refused: Refused, seed: int = 0) -> dict[str, str]:
    lines = refusal_headers(refused, random.Random(seed)).decode()
    assert lines.endswith("\r\n")
    told = dict(line.split(": ", 1) for line in lines.split("\r\n")[:-1])
    assert told.pop("link") == f'</outcomes/{told["x-weir-reason"]}>; rel="help"'
    return told


def test_every_ending_that_we_answer_has_a_row() -> None:
    passed_on = {Outcome.OK, Outcome.ENGINE_REFUSED}
    assert set(STATUS) == set(Outcome) - passed_on
    assert all(400 <= advice.status < 600 for advice in STATUS.values())


@pytest.mark.parametrize(
    ("outcome", "status", "words"),
    [
        (Outcome.OK, 200, "200 (ok)"),
        (Outcome.UPSTREAM, 500, "500 (upstream)"),
        (Outcome.TRUNCATED, 200, "200, broken off (truncated)"),
        (Outcome.UPSTREAM, 200, "200, then an error (upstream)"),
        (Outcome.CLIENT_GONE, 499, "no answer (client_gone)"),
    ],
)
def test_a_caller_got_a_status_and_an_ending(outcome: Outcome, status: int, words: str) -> None:
    assert got(outcome, status) == words


def test_a_record_begins_as_our_fault() -> None:
    assert Record(request_id="r", route="/").outcome is Outcome.BUG


@pytest.mark.parametrize("outcome", STATUS)
def test_the_error_object_has_all_four_fields_and_the_tables_words(outcome: Outcome) -> None:
    refused = Refused(outcome, "what happened")
    advice = STATUS[outcome]
    assert refused.status == advice.status
    error = {"message": "what happened", "type": advice.type, "param": None, "code": advice.code}
    assert json.loads(refused.body()) == {"error": error}
    assert headers(refused)["x-weir-reason"] == outcome.value


def test_param_and_code_of_ones_own() -> None:
    error = json.loads(Refused(Outcome.BAD_REQUEST, "no", param="n", code="c").body())["error"]
    assert (error["param"], error["code"]) == ("n", "c")


@pytest.mark.parametrize("outcome", [outcome for outcome in STATUS if not STATUS[outcome].retry])
def test_what_no_retry_helps_says_so_and_names_no_time(outcome: Outcome) -> None:
    told = headers(Refused(outcome, "no", retry_after=5.0))
    assert told == {"x-weir-reason": outcome.value, "x-should-retry": "false"}


def test_no_advice_where_none_is_known() -> None:
    refused = Refused(Outcome.EXPIRED, "late", headers=b"x-more: 1\r\n")
    assert headers(refused) == {"x-more": "1", "x-weir-reason": "expired"}


@pytest.mark.parametrize(
    ("wanted", "least", "most"),
    [(0.0, 1.0, 1.25), (0.3, 1.0, 1.25), (8.0, 8.0, 10.0), (55.0, 55.0, 60.0), (60.0, 60.0, 60.0)],
)
def test_retry_after_is_whole_seconds_within_a_minute_jittered_upwards(
    wanted: float, least: float, most: float
) -> None:
    seen = set()
    for seed in range(50):
        refused = Refused(Outcome.QUEUE_FULL, "full.", retry_after=wanted)
        told = headers(refused, seed)
        assert headers(refused, seed + 1) == told, "jittered once"
        seconds, milliseconds = int(told["retry-after"]), int(told["retry-after-ms"])
        assert least * 1000 - 1 <= milliseconds <= most * 1000
        assert 1 <= seconds <= 60
        assert 0 <= seconds * 1000 - milliseconds <= 1000
        assert json.loads(refused.body())["error"]["message"] == f"full. Try again in {seconds} s."
        seen.add(milliseconds)
    assert len(seen) > 10 or wanted == 60.0


@pytest.mark.parametrize(
    ("wanted", "words"),
    [(60.5, "61 s"), (125.0, "125 s"), (3600.0, "3600 s (1 h 0 min)"), (86_399.2, "86400 s (24 h 0 min)")],
)
def test_above_a_minute_the_truth_is_told_and_no_client_waits_for_it(wanted: float, words: str) -> None:
    refused = Refused(Outcome.RATE_LIMITED, "Too much.", retry_after=wanted)
    told = headers(refused)
    assert told == {
        "x-weir-reason": "rate_limited",
        "retry-after": words.split(maxsplit=1)[0],
        "x-should-retry": "false",
    }
    assert refused.full_message == f"Too much. Try again in {words}."


def test_a_kept_place_is_told_as_it_is() -> None:
    refused = Refused(Outcome.QUEUE_FULL, "full.", retry_after=7.25, kept=True)
    told = headers(refused)
    assert (told["retry-after"], told["retry-after-ms"]) == ("8", "7250")
    assert refused.full_message == "full. Try again in 8 s: a place is kept."


def test_no_client_is_told_to_come_back_too_early() -> None:
    told = headers(Refused(Outcome.RATE_LIMITED, "Too much.", retry_after=3.0004, kept=True))
    assert (told["retry-after"], told["retry-after-ms"]) == ("4", "3001")


def test_a_refusal_in_a_tenants_own_words() -> None:
    refused = Refused(Outcome.RATE_LIMITED, "too much", retry_after=1.0)
    refused.replace(402, b'{"pay": "more"}')
    assert (refused.status, refused.body()) == (402, b'{"pay": "more"}')
    assert b"x-weir-reason: rate_limited" in refusal_headers(refused, random.Random(1)), "machines are told as ever"
