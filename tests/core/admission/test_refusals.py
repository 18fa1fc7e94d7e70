"""Refusals of dispatch: status, owner of the limit, and advice."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from gateway.core.admission import refusals
from gateway.core.admission.decision import Foretold, Reason, Refuse
from gateway.core.engines.breaker import Ending
from gateway.core.engines.engine import Engine
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused, refusal_headers
from tests.calls import a_call

LONG = Foretold(ready=4.0, wait=2000.0, ttft=0.5, tpot=0.01)
CALL = a_call(class_name="batch", tenant="acme", prompt_tokens=900, output_tokens=100)


def told(reason: Reason, due_in: float | None = None, **why: object) -> Refused:
    """The refusal of CALL for this reason, as its caller gets it."""
    return refusals.refused(Refuse(reason=reason, **why), CALL, 0.0, due_in)  # type: ignore[arg-type]


def engines(*seen: bool) -> list[Engine]:
    made = [Engine(str(number), f"http://{number}", Policy()) for number, _ in enumerate(seen)]
    for engine, known in zip(made, seen, strict=True):
        if known:
            engine.check(True, 1.0)
    return made


@pytest.mark.parametrize(
    ("refused", "outcome", "status", "says", "retry_after"),
    [
        (told(Reason.UNKNOWN_MODEL, engines=engines(True, True)), Outcome.NOT_FOUND, 404, "'m' does not exist", None),
        (told(Reason.UNKNOWN_MODEL, engines=engines(True, False)), Outcome.NO_ENGINE, 503, "Not every engine", 1.0),
        (told(Reason.UNKNOWN_MODEL, reports_awaited=True), Outcome.NO_ENGINE, 503, "awaits its sidecars' reports", 1.0),
        (told(Reason.UNKNOWN_MODEL), Outcome.NOT_FOUND, 404, "GET /v1/models", None),
        (told(Reason.UNKNOWN_MODEL, away=True), Outcome.NOT_FOUND, 404, "the machine that had it is away", None),
        (refusals.forbidden_model(CALL), Outcome.FORBIDDEN, 403, "Tenant 'acme' may not use the model 'm'", None),
        (told(Reason.NO_ENGINE), Outcome.NO_ENGINE, 503, "No engine that serves 'm' can be given calls now.", 2.0),
        (told(Reason.TOO_LARGE, largest=800), Outcome.TOO_LARGE, 413, "1000 tokens of KV cache", None),
        (told(Reason.TOO_LARGE, largest=800), Outcome.TOO_LARGE, 413, "more than 800 for 'm'", None),
        (told(Reason.UNAFFORDABLE, words="cloud"), Outcome.NO_ENGINE, 503, "is not set aside", 1.0),
        (
            told(Reason.UNAFFORDABLE, words="cloud", retry_in=60.0),
            Outcome.RATE_LIMITED,
            429,
            "no room for what this call",
            60.0,
        ),
        (
            told(Reason.UNAFFORDABLE, words="cloud", retry_in=60.0),
            Outcome.RATE_LIMITED,
            429,
            "until the next begins",
            60.0,
        ),
        (
            told(Reason.UNAFFORDABLE, words="cloud", retry_in=5.0),
            Outcome.RATE_LIMITED,
            429,
            "until calls under way have ended",
            5.0,
        ),
        (
            told(Reason.UNAFFORDABLE, words="cloud", retry_in=math.inf),
            Outcome.RATE_LIMITED,
            429,
            "even with nothing spent",
            None,
        ),
        (refusals.keys_awaited(), Outcome.UPSTREAM, 502, "keys of its issuer are being read", 1.0),
        (told(Reason.DRAINING), Outcome.DRAINING, 503, "shutting down", 1.0),
        (
            told(Reason.QUEUE_FULL, 3.0, words="64 calls"),
            Outcome.QUEUE_FULL,
            503,
            "'batch' for 'm' is full: its lim",
            3.0,
        ),
        (told(Reason.QUEUE_FULL, words="64 calls"), Outcome.QUEUE_FULL, 503, "minute is booked out", 61.0),
        (
            told(Reason.DISPLACED, 3.0, words="default"),
            Outcome.SHED,
            503,
            "a call of class 'default', which is more",
            3.0,
        ),
        (told(Reason.MODE, words="mode tight", wait=4.0), Outcome.SHED, 503, "under pressure: mode tight.", 4.0),
        (
            told(Reason.TOO_LATE, 3.0, foretold=LONG),
            Outcome.DEADLINE_UNREACHABLE,
            503,
            "would be too late: its",
            3.0,
        ),
        (
            told(Reason.TOO_LATE, foretold=LONG),
            Outcome.DEADLINE_UNREACHABLE,
            503,
            "The next minute is booked out.",
            61.0,
        ),
        (told(Reason.SHED_LATE, 3.0, foretold=LONG), Outcome.SHED, 503, "has become too late: its", 3.0),
        (told(Reason.NOT_READY, foretold=LONG), Outcome.MODEL_UNAVAILABLE, 503, "is being made ready. This call", 4.0),
        (
            refusals.engine_failed("engine-1", "10.0.0.1:8000", "at 10.0.0.1", "reset"),
            Outcome.UPSTREAM,
            502,
            "engine-1 failed: reset",
            1.0,
        ),
        (refusals.wrong_answer("Not JSON."), Outcome.UPSTREAM, 502, "Not JSON.", 1.0),
        (refusals.no_first_byte(), Outcome.EXPIRED, 504, "before the engine's first byte", None),
        (refusals.cut_by_deadline(), Outcome.EXPIRED, 504, "before the end of the answer", None),
        (refusals.cut_by_drain(), Outcome.DRAINING, 503, "shutting down", 1.0),
        (refusals.bug("r7"), Outcome.BUG, 500, "report request id r7", None),
        (told(Reason.EXPIRED, waited=2.5), Outcome.EXPIRED, 504, "passed after 2.5 s in the queue", 1.0),
    ],
)
def test_what_a_caller_is_told(
    refused: Refused, outcome: Outcome, status: int, says: str, retry_after: float | None
) -> None:
    assert (refused.outcome, refused.status, refused.retry_after) == (outcome, status, retry_after)
    assert says in refused.message


@pytest.mark.parametrize(
    "made",
    [
        lambda place: told(Reason.DISPLACED, place, words="batch"),
        lambda place: told(Reason.TOO_LATE, place, foretold=LONG),
        lambda place: told(Reason.SHED_LATE, place, foretold=LONG),
        lambda place: told(Reason.QUEUE_FULL, place, words="1 calls"),
    ],
)
def test_a_kept_place_is_told_to_the_millisecond_and_none_as_do_not_retry_within_a_minute(
    made: Callable[[float | None], Refused],
) -> None:
    rng = random.Random(1)
    kept, none = made(7.25), made(None)
    assert b"retry-after: 8\r\nretry-after-ms: 7250\r\n" in refusal_headers(kept, rng)
    assert b"Try again in 8 s: a place is kept." in kept.body()
    assert b"retry-after: 61\r\nx-should-retry: false\r\n" in refusal_headers(none, rng)
    assert b"Try again in 61 s." in none.body()


@pytest.mark.parametrize(
    ("call", "now", "foretold", "says"),
    [
        (
            a_call(arrived=10.0, ttft_by=12.0),
            10.0,
            Foretold(wait=2.9, ttft=0.31, tpot=0.01),
            "its first token would come after 3.2 s (2.9 s until its turn, 0.31 s from there to its first token), and "
            "class 'default' allows 2.0 s",
        ),
        (
            a_call(arrived=10.0, deadline=310.0, expected_tokens=10_400),
            10.0,
            Foretold(wait=0.02, ttft=0.4, tpot=0.03),
            "its last token would come after 312 s (0.40 s from there to its first token, 312 s to write the 10400 "
            "tokens that such answers have), and its deadline is 300 s",
        ),
        (  # its first token would be in time
            a_call(arrived=10.0, ttft_by=70.0, deadline=16.0),
            10.0,
            Foretold(ready=7.0, ttft=0.01, tpot=0.03),
            "its last token would come after 7.0 s (7.0 s until its model is ready), and its deadline is 6.0 s",
        ),
        (  # its body came slowly, and it has waited
            a_call(arrived=10.0, ttft_by=12.0),
            14.0,
            Foretold(waited=1.0, ttft=0.01, tpot=0.03),
            "its first token would come after 4.0 s (3.0 s since it began to come in, 1.0 s in the queue so far), and "
            "class 'default' allows 2.0 s",
        ),
        (
            a_call(deadline=9.0),
            0.0,
            Foretold(ttft=0.3, tpot=0.1),
            "its last token would come after 0.30 s (0.30 s",
        ),
        (a_call(ttft_by=0.25), 0.0, Foretold(ttft=0.3, tpot=0.1), "allows 0.25 s"),
        (  # in time but for the margin
            a_call(ttft_by=10.0, deadline=300.0),
            0.0,
            Foretold(ready=9.7, ttft=0.1, tpot=0.1),
            "its first token would come after 9.8 s (9.7 s until its model is ready, 0.10 s from there to its first "
            "token), and class 'default' allows 10.0 s, of which 0.50 s are kept for the way",
        ),
        (
            a_call(deadline=0.02),
            0.0,
            Foretold(ttft=0.03, tpot=0.1),
            "would come after 0.03 s, and its deadline is 0.02 s",
        ),
    ],
)
def test_the_times_that_add_up_are_told_beside_the_target_they_break(
    call: Call, now: float, foretold: Foretold, says: str
) -> None:
    assert says in refusals.lateness(foretold, call, now)


def test_an_engine_that_may_be_given_no_calls_is_counted_by_why() -> None:
    down, drained, failing = engines(False, True, True)
    drained.draining = True
    for _ in range(100):
        failing.breaker.ended(failing.breaker.sent(1.0), Ending.FAILURE, 1.0)
    message = told(Reason.NO_ENGINE, engines=[down, drained, failing]).message
    assert message == "No engine that serves 'm' can be given calls now (of 3: 1 down, 1 drained, 1 failing)."
    assert told(Reason.NO_ENGINE, engines=engines(True)).message.endswith("calls now.")


def test_fields_at_fault_are_named() -> None:
    assert told(Reason.UNKNOWN_MODEL).param == "model"
    assert (refusals.forbidden_model(CALL).param, refusals.forbidden_model(CALL).code) == ("model", "model_not_allowed")
    assert told(Reason.TOO_LARGE, largest=1).code == "context_length_exceeded"
    assert math.isinf(engines(False)[0].health.back_at)
