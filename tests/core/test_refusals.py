"""Every refusal of dispatch: its status, whose limit it was, and what to do."""

from __future__ import annotations

import math
import random

import pytest

from gateway.core import refusals
from gateway.core.fleet import Engine
from gateway.core.outcome import Outcome, Refused, refusal_headers
from gateway.core.policy import Policy
from tests.calls import a_call

CALL = a_call(class_name="batch", tenant="acme", prompt_tokens=900, output_tokens=100)


def engines(*seen: bool) -> list[Engine]:
    made = [Engine(str(number), f"http://{number}", Policy()) for number, _ in enumerate(seen)]
    for engine, known in zip(made, seen, strict=True):
        if known:
            engine.health(True, 1.0)
    return made


@pytest.mark.parametrize(
    ("refused", "outcome", "status", "says", "retry_after"),
    [
        (refusals.unknown_model("x", engines(True, True)), Outcome.NOT_FOUND, 404, "'x' does not exist", None),
        (refusals.unknown_model("x", engines(True, False)), Outcome.NO_ENGINE, 503, "Not every engine", 1.0),
        (refusals.unknown_model("x", []), Outcome.NOT_FOUND, 404, "GET /v1/models", None),
        (refusals.forbidden_model(CALL), Outcome.FORBIDDEN, 403, "Tenant 'acme' may not use the model 'm'", None),
        (refusals.no_engine("m"), Outcome.NO_ENGINE, 503, "No engine that serves 'm'", 2.0),
        (refusals.too_large(CALL, 800), Outcome.TOO_LARGE, 413, "1000 tokens of KV cache", None),
        (refusals.too_large(CALL, 800), Outcome.TOO_LARGE, 413, "more than 800 for 'm'", None),
        (refusals.draining(), Outcome.DRAINING, 503, "shutting down", 1.0),
        (refusals.queue_full(CALL, "64 calls", 3.0), Outcome.QUEUE_FULL, 503, "'batch' is full (64 calls)", 3.0),
        (refusals.queue_full(CALL, "64 calls", None), Outcome.QUEUE_FULL, 503, "will not help", None),
        (refusals.displaced(CALL, 3.0), Outcome.SHED, 503, "made room for a more important one", 3.0),
        (refusals.refused_by_mode(CALL, "mode tight", 4.0), Outcome.SHED, 503, "under pressure: mode tight.", 4.0),
        (refusals.hopeless(CALL, 12.34, 3.0), Outcome.HOPELESS, 503, "about 12.3 s of work ahead", 3.0),
        (refusals.hopeless(CALL, 99.0, None), Outcome.HOPELESS, 503, "will not help", None),
        (refusals.shed_late(CALL, 2.5, 3.0), Outcome.SHED, 503, "After 2.5 s in the queue of class 'batch'", 3.0),
        (refusals.expired(CALL, 2.5), Outcome.EXPIRED, 504, "passed after 2.5 s in the queue", 1.0),
    ],
)
def test_what_a_caller_is_told(
    refused: Refused, outcome: Outcome, status: int, says: str, retry_after: float | None
) -> None:
    assert (refused.outcome, refused.status, refused.retry_after) == (outcome, status, retry_after)
    assert says in refused.message


@pytest.mark.parametrize("make", [refusals.displaced, lambda call, place: refusals.hopeless(call, 9.0, place)])
def test_a_kept_place_is_told_to_the_millisecond_and_none_as_do_not_retry(make: object) -> None:
    rng = random.Random(1)
    kept, none = make(CALL, 7.25), make(CALL, None)  # type: ignore[operator] # of a parametrized function
    assert b"retry-after: 8\r\nretry-after-ms: 7250\r\n" in refusal_headers(kept, rng)
    assert b"a place is kept" in kept.body()
    assert b"x-should-retry: false\r\n" in refusal_headers(none, rng)


def test_fields_at_fault_are_named() -> None:
    assert refusals.unknown_model("x", []).param == "model"
    assert (refusals.forbidden_model(CALL).param, refusals.forbidden_model(CALL).code) == ("model", "model_not_allowed")
    assert refusals.too_large(CALL, 1).code == "context_length_exceeded"
    assert math.isinf(engines(False)[0].back_at)
