"""Class of a call, and the deadlines that follow."""

from __future__ import annotations

import math

import pytest

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import TrafficClass, When
from gateway.core.request.classes import ClassRules, claim, classify
from gateway.core.request.routes import ROUTES
from tests.calls import a_call

RULES = ClassRules(
    Policy(
        classes={
            "interactive": TrafficClass(ttft=2.0, deadline=60.0),
            "default": TrafficClass(ttft=10.0, deadline=300.0),
            "long_context": TrafficClass(deadline=600.0, when=When(prompt_tokens=8000)),
            "offline": TrafficClass(deadline=3600.0, when=When(routes=("embedding",), models=("e5", "bge"))),
        }
    )
)
EMBEDDING = ROUTES[b"/v1/embeddings"]


def classified(default_class: str | None = None, best: int = 0, **fields: object) -> tuple[str, float, float]:
    """Class, and seconds from arrival to its deadline and to its first token."""
    call = a_call(arrived=100.0, **fields)
    classify(call, RULES, default_class, best)
    return call.class_name, call.deadline - 100.0, call.ttft_by - 100.0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "default"),
        ({"asked_class": "interactive"}, "interactive"),
        ({"prompt_tokens": 8000}, "default"),
        ({"prompt_tokens": 8001}, "long_context"),
        ({"prompt_tokens": 8001, "asked_class": "interactive"}, "interactive"),
        ({"route": EMBEDDING, "model": "bge"}, "offline"),
        ({"route": EMBEDDING, "model": "other"}, "default"),
        ({"model": "bge"}, "default"),
        ({"route": EMBEDDING, "model": "bge", "prompt_tokens": 9000}, "long_context"),
        ({"default_class": "interactive"}, "interactive"),
        ({"default_class": "interactive", "prompt_tokens": 9000}, "long_context"),
        ({"default_class": "interactive", "asked_class": "offline"}, "offline"),
        ({"best": 1, "asked_class": "interactive"}, "default"),
        ({"best": 1, "asked_class": "offline"}, "offline"),
        ({"best": 3}, "offline"),
        ({"best": 1, "default_class": "interactive"}, "default"),
        ({"default_class": "gone"}, "default"),  # by a reload while the body came, as is a rank beyond the last
        ({"best": 9}, "offline"),
    ],
)
def test_the_first_that_applies_and_never_above_the_best(fields: dict[str, object], expected: str) -> None:
    assert classified(**fields)[0] == expected  # type: ignore[arg-type] # both kinds of field in one table


@pytest.mark.parametrize(
    ("fields", "deadline", "ttft"),
    [
        ({}, 300.0, 10.0),
        ({"asked_class": "long_context"}, 600.0, math.inf),
        ({"asked_deadline": 5.0}, 5.0, 10.0),
        ({"asked_deadline": 5.0, "sdk_timeout": 3.0}, 3.0, 10.0),
        ({"sdk_timeout": 20.0}, 20.0, 10.0),
        ({"sdk_timeout": 20.0, "asked_class": "interactive"}, 20.0, 2.0),
    ],
)
def test_what_a_class_promises(fields: dict[str, object], deadline: float, ttft: float) -> None:
    assert classified(**fields)[1:] == (deadline, ttft)  # type: ignore[arg-type]


def test_order_and_rank_are_the_policys() -> None:
    assert RULES.order == ("interactive", "default", "long_context", "offline")
    assert [RULES.rank[name] for name in RULES.order] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("asked", "claimed", "found"),
    [
        ("", "batch", "batch"),
        ("interactive", "batch", "batch"),
        ("batch", "default", "batch"),
        ("default", "default", "default"),
        ("interactive", "gone", "interactive"),
    ],
)
def test_a_tokens_class_is_the_best_and_that_of_calls_that_name_none(asked: str, claimed: str, found: str) -> None:
    call = a_call(asked_class=asked)
    claim(call, ClassRules(Policy()), claimed)
    assert call.asked_class == found
