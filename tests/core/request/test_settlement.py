"""Settlement of a call: bounds on an engine's numbers, and the estimate where it reported too little."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.request.routes import ROUTES
from gateway.core.request.settlement import MOST, PER_CALL, TURNS, clamped_usage, possible_output
from tests.calls import a_call

LIE = 2**40
SIZE = 1000  # bytes: 1,200 tokens at most, and a template's 4,096 and 64


@pytest.mark.parametrize(
    ("fields", "context", "expected"),
    [
        ({"max_tokens": 10}, 100_000, (1200 + PER_CALL + 64, 10)),
        ({"max_tokens": 10, "n": 3}, 100_000, (1200 + PER_CALL + 64, 30)),
        ({"max_tokens": 10, "shaped": 4}, 100_000, (1200 + PER_CALL + 64, 4)),
        ({"max_tokens": 10}, 500, (500, 10)),
        ({}, 500, (500, 500)),
        ({}, None, (1200 + PER_CALL + 64, MOST)),
        ({"media": 2, "max_tokens": 1}, 5000, (5000, 1)),
        ({"messages": 3, "max_tokens": 1}, 500, (1500, 1)),
        ({"route": ROUTES[b"/v1/responses"], "max_tokens": 1}, 500, (500 * TURNS, 500 * TURNS)),
        ({"route": ROUTES[b"/v1/rerank"], "messages": 4}, 100_000, (4800 + PER_CALL + 256, 100_000)),
    ],
)  # fmt: skip
def test_an_engine_is_believed_no_more_than_can_be(
    fields: dict[str, Any], context: int | None, expected: tuple[int, int]
) -> None:
    call = a_call(**fields)
    assert clamped_usage(call, SIZE, LIE, LIE, lambda _: context) == expected
    assert clamped_usage(call, SIZE, 7, 1, lambda _: context) == (7, 1)


@pytest.mark.parametrize(
    ("fields", "known", "seconds", "expected"),
    [
        ({"asked": 100}, 0, 0.0, 0),
        ({"asked": 100}, 5, 0.11, 8),  # two tokens and a begun one
        ({"asked": 100}, 5, -1.0, 5),
        ({"asked": 100, "n": 4}, 8, 0.1, 16),
        ({"asked": 100, "n": 2}, 0, 60.0, 200),
        ({"asked": 100, "shaped": 10}, 0, 60.0, 10),
        ({"asked": 10}, 99, 0.0, 10),
        ({"asked": 0}, 99, 60.0, 0),
    ],
)
def test_what_can_have_been_written_is_no_more_than_was_asked_for(
    fields: dict[str, Any], known: int, seconds: float, expected: int
) -> None:
    assert possible_output(a_call(**fields), known, seconds, 0.05) == expected
