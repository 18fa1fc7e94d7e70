"""Shaping of output limits: the cap that applies, and the body under it."""

from __future__ import annotations

import json
import math

import pytest

from gateway.core.admission.shaping import Shaping, cap, shape_body, shaped_header
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import ShapingTier

ORDER = ("interactive", "default", "batch")
BY_WATERMARK = (ShapingTier(kv_above=0.8, max_tokens=1024), ShapingTier(kv_above=0.9, max_tokens=256))
BUT_BATCH = (
    ShapingTier(kv_above=0.9, max_tokens=100, except_=("batch",)),
    ShapingTier(kv_above=0.95, max_tokens=64, except_=()),
)


@pytest.mark.parametrize(
    ("tiers", "watermark", "class_name", "expected"),
    [
        ((), 1.0, "batch", None),
        (BY_WATERMARK, 0.8, "batch", None),
        (BY_WATERMARK, 0.81, "batch", 1024),
        (BY_WATERMARK, 0.91, "batch", 256),
        (BY_WATERMARK[::-1], 0.91, "batch", 256),
        (BY_WATERMARK, 1.0, "interactive", None),
        (BUT_BATCH, 0.91, "interactive", 100),
        (BUT_BATCH, 0.91, "batch", None),
        (BUT_BATCH, 0.96, "batch", 64),
        (BUT_BATCH, 0.96, "interactive", 64),  # an empty `except` spares nobody
    ],
)
def test_the_smallest_cap_of_the_tiers_that_apply(
    tiers: tuple[ShapingTier, ...], watermark: float, class_name: str, expected: int | None
) -> None:
    assert cap(tiers, watermark, class_name, ORDER) == expected


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("chat", '{"model":"m","max_tokens":4096}', '{"model":"m","max_tokens":256}'),
        ("chat", '{"max_completion_tokens":4096,"model":"m"}', '{"max_completion_tokens":256,"model":"m"}'),
        (
            "chat",
            '{"max_tokens":9999,"max_completion_tokens":4096}',
            '{"max_tokens":256,"max_completion_tokens":256}',
        ),
        # What was smaller stays: vLLM goes by the other, and nothing is raised.
        ("chat", '{"max_tokens":10,"max_completion_tokens":4096}', '{"max_tokens":10,"max_completion_tokens":256}'),
        ("chat", '{"model":"m"}', '{"model":"m","max_completion_tokens":256}'),
        ("chat", '{"max_tokens":null,"a":1}', '{"max_tokens":null,"a":1,"max_completion_tokens":256}'),
        ("chat", '{"max_completion_tokens":null,"max_tokens":300}', '{"max_completion_tokens":null,"max_tokens":256}'),
        ("chat", '{"max_completion_tokens":null}', '{"max_completion_tokens":256}'),
        ("completion", '{"prompt":"x"}', '{"prompt":"x","max_tokens":256}'),
        ("completion", '{"max_tokens":1000}', '{"max_tokens":256}'),
        ("message", '{"max_tokens":1000}', '{"max_tokens":256}'),
        ("response", '{"max_output_tokens":1000,"max_tokens":5000}', '{"max_output_tokens":256,"max_tokens":5000}'),
        ("response", '{"input":"x"}', '{"input":"x","max_output_tokens":256}'),
        # vLLM answers 400 to min_tokens above max_tokens.
        ("chat", '{"max_tokens":1000,"min_tokens":500}', '{"max_tokens":256,"min_tokens":256}'),
        ("chat", '{"max_tokens":257,"min_tokens":257}', '{"max_tokens":256,"min_tokens":256}'),
        ("chat", '{"max_tokens":1000,"min_tokens":256}', '{"max_tokens":256,"min_tokens":256}'),
        ("completion", '{"min_tokens":300}', '{"min_tokens":256,"max_tokens":256}'),
        ("completion", '{"max_tokens":300,"min_tokens":null}', '{"max_tokens":256,"min_tokens":null}'),
        # What is not changed keeps its bytes, whatever it looks like.
        (
            "chat",
            ' { "caf\u00e9" : "\\u00e9\u6f22" , "max_tokens" : 999,\n"n": 1e2,"o": [ 1 , {"max_tokens": 9999} ] } \r\n',
            '{"caf\u00e9":"\\u00e9\u6f22","max_tokens":256,"n":1e2,"o":[ 1 , {"max_tokens": 9999} ]}',
        ),
        ("chat", '{"max_tokens":1,"a":2,"max_tokens":999,"a":3}', '{"max_tokens":256,"a":3}'),
    ],
)
def test_bodies(kind: str, body: str, expected: str) -> None:
    assert shape_body(body.encode(), kind, 256).decode() == expected


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", b'{"max_tokens": 256} '),
        ("chat", b' {"max_completion_tokens":  3, "min_tokens": 2}'),
        ("response", b'{"max_output_tokens":256, "max_tokens": 9}'),
        ("message", b'{"max_tokens":256, "thinking": null}'),
    ],
)
def test_a_body_that_asks_for_no_more_is_left_alone(kind: str, body: bytes) -> None:
    assert shape_body(body, kind, 256) is body


@pytest.mark.parametrize(
    ("thinking", "max_tokens", "expected"),
    [
        ('{"type":"enabled","budget_tokens":4000}', 4001, None),
        ('{"type":"enabled","budget_tokens":4000}', 4000, '{"type":"enabled","budget_tokens":3999}'),
        (
            '{"budget_tokens":4000,"display":"omitted","type":"enabled"}',
            1025,
            '{"budget_tokens":1024,"display":"omitted","type":"enabled"}',
        ),
        ('{"type":"enabled","budget_tokens":4000}', 1024, '{"type":"disabled"}'),
        ('{"type":"adaptive"}', 256, None),
        ('{"type":"disabled"}', 256, None),
        ("null", 256, None),
        ('{"type":"enabled","budget_tokens":"much"}', 256, None),  # the engine will say what is wrong
        ("[1]", 256, None),
    ],
)
def test_thoughts_that_no_longer_fit_give_way(thinking: str, max_tokens: int, expected: str | None) -> None:
    body = f'{{"max_tokens":8000,"thinking":{thinking}}}'
    found = shape_body(body.encode(), "message", max_tokens).decode()
    assert found == f'{{"max_tokens":{max_tokens},"thinking":{expected or thinking}}}'
    other = json.loads(shape_body(body.encode(), "chat", max_tokens))
    assert other["thinking"] == json.loads(thinking), "only a message has such a rule"


def test_the_header_says_what_was_made_of_what() -> None:
    assert shaped_header(256, 4096) == b"x-weir-max-tokens: 256; asked=4096\r\n"


@pytest.mark.parametrize(("tiers", "above"), [((), math.inf), (BY_WATERMARK, 0.8), (BY_WATERMARK[::-1], 0.8)])
def test_below_this_no_tier_applies(tiers: tuple[ShapingTier, ...], above: float) -> None:
    assert Shaping(Policy(shaping=tiers)).above == above
