"""Request batching: the calls that may be merged, the merged request, and each call's share of the answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.core.batching.merge_pieces import KEY_AT_MOST, Piece, piece_of, rule_of
from gateway.core.batching.merging import BatchWindow, SplitError, merge, shares, split
from gateway.core.policy.traffic import Merge
from gateway.core.request.call import Call
from tests.calls import a_call
from tests.pooled import EMBEDDINGS, RERANK, SCORE, answer, asked

CHAT = "/v1/chat/completions"
IMAGE = {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}


def piece(path: str, body: dict[str, Any], **more: Any) -> Piece:
    made = piece_of(asked(path, body, **more))
    assert made is not None
    return made


def embedding(*texts: str, **more: Any) -> Piece:
    return piece(EMBEDDINGS, {"input": list(texts)}, **more)


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


# -- which ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        (EMBEDDINGS, {"input": "a"}, {"input": "b"}),
        (EMBEDDINGS, {"input": "a"}, {"input": ["b", "c"]}),
        (EMBEDDINGS, {"input": [1, 2]}, {"input": [[3], [4, 5]]}),
        (EMBEDDINGS, {"input": "a", "user": "u", "dimensions": 8}, {"dimensions": 8, "user": "u", "input": "b"}),
        (EMBEDDINGS, {"input": "a", "encoding_format": "base64"}, {"input": "b", "encoding_format": "base64"}),
        (EMBEDDINGS, {"input": "a", "stream": False}, {"input": "b", "stream": False}),
        (RERANK, {"query": "q", "documents": ["a"]}, {"query": "q", "documents": ["b", "c"]}),
        (RERANK, {"query": "q", "documents": ["a"], "top_n": 3}, {"query": "q", "documents": ["b"]}),
        ("/v2/rerank", {"query": "q", "documents": ["a"]}, {"query": "q", "documents": ["b"]}),
        (SCORE, {"text_1": "a", "text_2": "b"}, {"text_1": ["c", "d"], "text_2": ["e", "f"]}),
        (SCORE, {"text_1": "a", "text_2": ["b", "c"]}, {"text_1": ["a"], "text_2": ["d", "e", "f"]}),
        (SCORE, {"queries": "a", "items": ["b"]}, {"queries": "a", "items": "c"}),
    ],
)
def test_these_may_be_merged(path: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert piece(path, one).key == piece(path, other).key


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        (EMBEDDINGS, {"input": "a"}, {"input": "a", "model": "other"}),
        (EMBEDDINGS, {"input": "a"}, {"input": [1]}),
        (EMBEDDINGS, {"input": ["a"]}, {"input": [[1]]}),
        (EMBEDDINGS, {"input": "a"}, {"input": "a", "dimensions": 8}),
        (EMBEDDINGS, {"input": "a", "dimensions": 8}, {"input": "a", "dimensions": 8.0}),
        (EMBEDDINGS, {"input": "a", "encoding_format": "float"}, {"input": "a", "encoding_format": "base64"}),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 8}, {"input": "a", "truncate_prompt_tokens": 9}),
        (EMBEDDINGS, {"input": "a", "user": "u"}, {"input": "a", "user": "v"}),
        (EMBEDDINGS, {"input": "a", "x": {"y": 1}}, {"input": "a", "x": {"y": 2}}),
        (RERANK, {"query": "q", "documents": ["a"]}, {"query": "p", "documents": ["a"]}),
        (RERANK, {"query": "q", "documents": ["a"]}, {"query": "q", "documents": ["a"], "return_documents": False}),
        (SCORE, {"text_1": "a", "text_2": ["b", "c"]}, {"text_1": "x", "text_2": ["b", "c"]}),
        (SCORE, {"text_1": "a", "text_2": ["b", "c"]}, {"text_1": "a", "text_2": "b"}),
        (SCORE, {"text_1": "a", "text_2": "b"}, {"queries": "a", "documents": "b"}),
    ],
)
def test_these_may_not(path: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert piece(path, one).key != piece(path, other).key


def test_paths_classes_tenants_and_times_allowed_are_kept_apart() -> None:
    body = {"query": "q", "documents": ["a"]}
    plain = piece(RERANK, body)
    assert piece("/rerank", body).key != plain.key
    assert piece(RERANK, body, x_weir_class="batch", x_weir_deadline_ms="300000").key != plain.key
    assert piece(RERANK, body, x_weir_deadline_ms="270000").key != plain.key, "its class allows 300 s"
    assert piece(RERANK, body, x_weir_deadline_ms="297000").key == plain.key
    assert piece(RERANK, body, now=77.7).key == plain.key
    other_tenant = piece_of(msgspec.structs.replace(plain.call, tenant="other"))
    assert other_tenant is not None
    assert other_tenant.key != plain.key


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        ("/pooling", {"input": "a"}),
        (EMBEDDINGS, {"messages": [{"role": "user", "content": "hi"}]}),
        (EMBEDDINGS, {"input": ["a", [1]]}),
        (EMBEDDINGS, {"input": "a", "encoding_format": "bytes"}),
        (EMBEDDINGS, {"input": "a", "encoding_format": None}),
        (RERANK, {"query": "q", "documents": "a"}),
        (RERANK, {"query": "q", "documents": ["a", {"content": "b"}]}),
        (RERANK, {"query": {"content": "q"}, "documents": ["a"]}),
        (RERANK, {"query": "q", "documents": ["a", IMAGE]}),
        (RERANK, {"query": "q", "documents": ["a"], "top_n": None}),
        (RERANK, {"query": "q", "documents": ["a"], "top_n": -1}),
        (RERANK, {"query": "q", "documents": ["a"], "top_n": 10**12}),
        (SCORE, {"text_1": ["a", "b"], "text_2": "c"}),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}),
        (SCORE, {"text_1": {"content": "a"}, "text_2": "b"}),
        (SCORE, {"text_1": "a", "text_2": ["b", {"content": "c"}]}),
        (SCORE, {"text_1": "a", "queries": None, "text_2": "b"}),
        (SCORE, {"text_1": "a", "text_2": "b", "items": None}),
    ],
)
def test_these_go_by_themselves(path: str, body: dict[str, Any]) -> None:
    assert piece_of(asked(path, body)) is None


def test_one_that_says_much_beside_its_items_goes_by_itself() -> None:
    """What must be equal is remembered for as long as its key is."""
    assert piece_of(asked(EMBEDDINGS, {"input": "x" * 100_000, "x": "y" * 8000})) is not None
    assert piece_of(asked(EMBEDDINGS, {"input": "x", "x": "y" * (KEY_AT_MOST + 1)})) is None


@pytest.mark.parametrize("body", [b"{}", b'{"query":"q"}', b'{"documents":["d"]}'])
@pytest.mark.parametrize("path", [EMBEDDINGS, RERANK, SCORE])
def test_a_body_that_no_parser_has_seen_is_not_merged(path: str, body: bytes) -> None:
    call = asked(EMBEDDINGS, {"input": "a"})
    call = msgspec.structs.replace(call, route=asked(path, EXAMPLES[path]).route, body=body)
    assert piece_of(call) is None


EXAMPLES = {
    EMBEDDINGS: {"input": "a"},
    RERANK: {"query": "q", "documents": ["a"]},
    SCORE: {"text_1": "a", "text_2": "b"},
}


@pytest.mark.parametrize(
    ("path", "rule"), [(EMBEDDINGS, 1), (RERANK, 2), (SCORE, 3), ("/classify", None), (CHAT, None)]
)
def test_the_policy_has_a_rule_for_each_kind(path: str, rule: int | None) -> None:
    rules = {name: Merge(max_items=at) for at, name in enumerate(("embeddings", "rerank", "score"), 1)}
    other = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"input": "a"}
    body = EXAMPLES.get(path, other)
    found = rule_of(rules, asked(path, body))
    assert (found and found.max_items) == rule


# -- together ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "bodies", "sent"),
    [
        (EMBEDDINGS, [{"input": "a"}, {"input": ["b", "c"]}], {"model": "m", "input": ["a", "b", "c"]}),
        (EMBEDDINGS, [{"input": [1, 2]}, {"input": [[3]]}], {"model": "m", "input": [[1, 2], [3]]}),
        (
            RERANK,
            [{"query": "q", "documents": ["a"], "top_n": 1}, {"query": "q", "documents": ["b"]}],
            {"model": "m", "query": "q", "documents": ["a", "b"]},
        ),
        (
            SCORE,
            [{"text_1": "a", "text_2": "b"}, {"text_1": ["c"], "text_2": ["d"]}],
            {"model": "m", "text_1": ["a", "c"], "text_2": ["b", "d"]},
        ),
        (
            SCORE,
            [{"text_1": "a", "text_2": ["b", "c"]}, {"text_1": ["a"], "text_2": ["d", "e"]}],
            {"model": "m", "text_1": "a", "text_2": ["b", "c", "d", "e"]},
        ),
    ],
)
def test_what_is_sent(path: str, bodies: list[dict[str, Any]], sent: dict[str, Any]) -> None:
    pieces = [piece(path, body) for body in bodies]
    assert json.loads(merge(pieces).body) == sent
    items = max(len(value) for value in sent.values() if isinstance(value, list))
    assert sum(one.items for one in pieces) == items


def test_items_and_fields_are_sent_as_the_bytes_they_came_in() -> None:
    call = asked(EMBEDDINGS, {"input": "a"})
    first = msgspec.structs.replace(call, body=b'{"input": [ "\\u00e9" ,"b"],"model":"m", "x": [1.50, 1e2 ]}')
    other = msgspec.structs.replace(call, body=b'{ "x": [1.50, 1e2 ],"model":"m","input":"\\/" }')
    pieces = [piece_of(first), piece_of(other)]
    assert pieces[0] is not None
    assert pieces[1] is not None
    assert merge([pieces[0], pieces[1]]).body == b'{"model":"m","x":[1.50, 1e2 ],"input":["\\u00e9","b","\\/"]}'


def test_the_merged_call_is_the_sum_of_its_parts_and_as_urgent_as_the_most_urgent() -> None:
    calls = [
        asked(EMBEDDINGS, {"input": text}, request_id=text, now=now) for text, now in (("a", 5.0), ("日本" * 9, 4.0))
    ]
    calls[0].ttft_by = 7.0
    ids = asked(EMBEDDINGS, {"input": [[1, 2, 3]]})
    pieces = [made for call in calls if (made := piece_of(call)) is not None]
    merged = merge(pieces)
    assert merged.request_id == "a+1"
    assert (merged.arrived, merged.deadline, merged.ttft_by) == (4.0, 304.0, 7.0)
    for name in ("ascii_bytes", "cjk_bytes", "other_bytes", "messages", "token_ids", "prompt_tokens", "cost"):
        assert getattr(merged, name) == sum(getattr(call, name) for call in calls), name
    assert merged.cjk_bytes > 0
    assert merge([made for made in (piece_of(ids),) if made]).token_ids == 3
    assert (calls[0].request_id, calls[0].prompt_tokens) == ("a", calls[0].cost), "the calls are as they were"


# -- apart ------------------------------------------------------------------------------------------------------------


def test_each_gets_its_own_rows_by_index_and_its_own_id() -> None:
    pieces = [embedding("a", request_id="one"), embedding("b", "c", request_id="two")]
    merged = merge(pieces)
    _, body = answer(merged)
    body["data"].reverse()
    for made, (own, told) in zip(pieces, split(encoded(body), merged, pieces), strict=True):
        alone = answer(made.call)[1]
        got = json.loads(own)
        assert told == got["usage"]["prompt_tokens"] == got["usage"]["total_tokens"]
        assert got | {"usage": None} == alone | {"usage": None}
        assert list(got) == list(alone), "fields in their order"


def test_vectors_are_the_bytes_the_engine_wrote() -> None:
    pieces = [embedding("a"), embedding("b")]
    body = b'{"data":[{"embedding":[1.500, -2E-3],"index":1},{"index":0,"embedding":"AACAPw=="}]}'
    assert [own for own, _ in split(body, merge(pieces), pieces)] == [
        b'{"data":[{"index":0,"embedding":"AACAPw=="}]}',
        b'{"data":[{"embedding":[1.500, -2E-3],"index":0}]}',
    ]


def test_a_ranking_keeps_its_order_and_each_its_top() -> None:
    bodies = [{"query": "q", "documents": ["a", "b", "c"], "top_n": 2}, {"query": "q", "documents": ["d", "e"]}]
    pieces = [piece(RERANK, body) for body in bodies]
    merged = merge(pieces)
    scores = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.2, 4: 0.8}
    rows = [{"index": at, "relevance_score": scores[at]} for at in (1, 4, 2, 3, 0)]
    usage = {"total_tokens": 50}
    parts = split(encoded({"id": "x", "results": rows, "usage": usage}), merged, pieces)
    assert [[one["index"] for one in json.loads(own)["results"]] for own, _ in parts] == [[1, 2], [1, 0]]
    assert [json.loads(own)["id"] for own, _ in parts] == ["x-0", "x-1"], "an id that is not made of the request's"
    assert [told for _, told in parts] == shares(50, [made.call.prompt_tokens for made in pieces])


@pytest.mark.parametrize(
    ("usage", "parts", "told"),
    [
        ({"prompt_tokens": 10, "total_tokens": 10}, [{"prompt_tokens": 5, "total_tokens": 5}] * 2, [5, 5]),
        (
            {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 0, "prompt_tokens_details": {"cached": 9}},
            [
                {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0, "prompt_tokens_details": None},
                {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 0, "prompt_tokens_details": None},
            ],
            [2, 1],
        ),
        ({"total_tokens": 6}, [{"total_tokens": 3}, {"total_tokens": 3}], [3, 3]),
        ({"prompt_tokens": None, "total_tokens": 6}, [{"prompt_tokens": None, "total_tokens": 3}] * 2, [None, None]),
        ({"prompt_tokens": -1}, [{"prompt_tokens": None}] * 2, [None, None]),
        ({"prompt_tokens": True}, [{"prompt_tokens": None}] * 2, [None, None]),
        ({}, [{}, {}], [None, None]),
        (None, [None, None], [None, None]),
    ],
)
def test_usage_is_shared(usage: Any, parts: list[Any], told: list[int | None]) -> None:
    pieces = [embedding("a"), embedding("b")]
    body = {"data": [{"index": 0}, {"index": 1}], "usage": usage, "id": 7}
    got = split(encoded(body), merge(pieces), pieces)
    assert [json.loads(own)["usage"] for own, _ in got] == parts
    assert [json.loads(own)["id"] for own, _ in got] == [7, 7]
    assert [count for _, count in got] == told


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (10, [1, 1], [5, 5]),
        (10, [1, 1, 1], [4, 3, 3]),
        (7, [5, 3, 2], [4, 2, 1]),  # 3.5, 2.1, 1.4
        (1, [1, 100], [0, 1]),
        (5, [0, 0], [3, 2]),
        (0, [1, 2], [0, 0]),
    ],
)
def test_the_largest_remainders_get_what_is_left(total: int, weights: list[int], expected: list[int]) -> None:
    assert shares(total, weights) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"garbage",
        b"{}",
        b'{"results":[{"index":0},{"index":1}]}',
        b'{"data":null}',
        b'{"data":[{"index":0}]}',
        b'{"data":[{"index":0},{"index":0}]}',
        b'{"data":[{"index":0},{"index":2}]}',
        b'{"data":[{"index":0},{"index":1},{"index":1}]}',
        b'{"data":[{"index":0},{"index":1},{"index":2}]}',
        b'{"data":[{"index":0},{"index":-1}]}',
        b'{"data":[{"index":0},{"index":"1"}]}',
        b'{"data":[{"index":0},{"no":1}]}',
        b'{"data":[{"index":0},{"index":1}],"usage":7}',
        b'{"data":[{"index":0},{"index":1}],"id":"\xff"}',
        b'{"data":[{"index":0},{"index":1}',
        b'{"data":' + b"[" * 9999,
    ],
)
def test_an_answer_without_exactly_its_rows_is_nobodys(body: bytes) -> None:
    pieces = [embedding("a"), embedding("b")]
    with pytest.raises(SplitError, match=r"its answer is not as expected|it answered \d rows to 2 items"):
        split(body, merge(pieces), pieces)


# -- how long to wait -------------------------------------------------------------------------------------------------


def test_a_lone_call_does_not_wait_and_the_window_grows_with_the_rate() -> None:
    window = 0.02
    assert BatchWindow().wait(5.0, window) == 0.0

    def settled(gap: float) -> float:
        pace = BatchWindow()
        return [pace.wait(number * gap, window) for number in range(100)][-1]

    waits = [settled(gap) for gap in (0.020, 0.019, 0.010, 0.001, 0.0)]
    assert waits == pytest.approx([0.0, 0.001, 0.010, 0.019, 0.020], abs=1e-6)


def test_silence_is_forgotten_about() -> None:
    pace = BatchWindow()
    for number in range(100):
        pace.wait(number * 0.001, 0.02)
    assert pace.wait(1.0, 0.02) == 0.0
    assert pace.wait(1.0, 0.02) == pytest.approx(0.0025), "the second of a burst: an eighth of the window"


def test_a_shrunken_window_is_not_exceeded() -> None:
    pace = BatchWindow()
    for number in range(100):
        assert pace.wait(number * 0.001, 0.02 if number < 50 else 0.005) <= (0.02 if number < 50 else 0.005)


def test_a_call_of_another_kind_is_not_looked_at() -> None:
    never: Call = a_call(body=b"not json")
    assert piece_of(never) is None
