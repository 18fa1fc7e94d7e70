"""Properties of request batching: each call gets the answer it would have by itself, and nothing is lost or doubled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.batching.merge_pieces import Piece, piece_of
from gateway.core.batching.merging import BatchWindow, SplitError, merge, shares, split
from gateway.core.request.outcome import Refused
from tests.pooled import EMBEDDINGS, RERANK, SCORE, answer, asked

text = st.text(alphabet='ab é日"\\\n', max_size=6)
texts = st.lists(text, min_size=1, max_size=4)
ids = st.lists(st.integers(0, 9), min_size=1, max_size=3)
pairs = st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.lists(text, min_size=n, max_size=n)] * 2))
inputs = {  # of each kind, bodies that may be merged with each other
    "texts": (EMBEDDINGS, st.builds(lambda value: {"input": value}, text.filter(bool) | texts)),
    "ids": (EMBEDDINGS, st.builds(lambda value: {"input": value}, ids | st.lists(ids, min_size=1, max_size=3))),
    "rerank": (
        RERANK,
        st.fixed_dictionaries({"query": st.just("q"), "documents": texts}, optional={"top_n": st.integers(0, 4)}),
    ),
    "pairs": (SCORE, st.builds(lambda two: {"text_1": two[0], "text_2": two[1]}, pairs)),
    "one": (
        SCORE,
        st.builds(
            lambda one, others: {"text_1": one, "text_2": others},
            st.sampled_from(["x", ["x"]]),
            st.lists(text, min_size=2, max_size=4),
        ),
    ),
}
batches = st.sampled_from(sorted(inputs)).flatmap(
    lambda kind: st.tuples(st.just(inputs[kind][0]), st.lists(inputs[kind][1], min_size=1, max_size=6))
)


def pieces_of(path: str, bodies: Sequence[dict[str, Any]]) -> list[Piece]:
    made = [piece_of(asked(path, body, request_id=f"id{number}")) for number, body in enumerate(bodies)]
    pieces = [piece for piece in made if piece is not None]
    assert len(pieces) == len(bodies)
    assert len({piece.key for piece in pieces}) == 1
    return pieces


@given(batches, st.randoms(use_true_random=False))
def test_each_is_answered_what_it_would_have_been_alone(batch: tuple[str, list[Any]], rng: Any) -> None:
    pieces = pieces_of(*batch)
    merged = merge(pieces)
    status, body = answer(merged)
    assert status == 200
    if "data" in body:
        rng.shuffle(body["data"])
    parts = split(json.dumps(body).encode(), merged, pieces)
    told = 0
    for piece, (own, prompt_tokens) in zip(pieces, parts, strict=True):
        got, alone = json.loads(own), answer(piece.call)[1]
        assert prompt_tokens == got["usage"]["prompt_tokens"] == got["usage"]["total_tokens"]
        told += prompt_tokens
        assert got | {"usage": None} == alone | {"usage": None}
    assert told == body["usage"]["prompt_tokens"]


@given(batches, st.lists(st.tuples(st.sampled_from(["drop", "again", "move"]), st.integers(0, 20)), max_size=3))
def test_rows_that_are_not_exactly_the_items_are_nobodys(batch: tuple[str, list[Any]], changes: list[Any]) -> None:
    pieces = pieces_of(*batch)
    merged = merge(pieces)
    body = answer(merged)[1]
    rows = body["results" if "results" in body else "data"]
    for change, at in changes:
        row = rows[at % len(rows)] if rows else {"index": at}
        if change == "drop" and rows:
            rows.remove(row)
        elif change == "again":
            rows.append(dict(row))
        else:
            row["index"] = at
    whole = sorted(row["index"] for row in rows) == list(range(sum(piece.items for piece in pieces)))
    try:
        split(json.dumps(body).encode(), merged, pieces)
    except SplitError:
        assert not whole
    else:
        assert whole


@given(st.binary(max_size=60) | st.lists(st.dictionaries(st.sampled_from(["index", "x"]), st.integers(-1, 2))).map(
    lambda rows: json.dumps({"data": rows}).encode()
))  # fmt: skip
def test_any_answer_is_split_or_refused(body: bytes) -> None:
    pieces = pieces_of(EMBEDDINGS, [{"input": "a"}, {"input": "b"}])
    with suppress(SplitError):
        assert len(split(body, merge(pieces), pieces)) == 2


values = st.none() | st.booleans() | st.integers(-2, 5) | st.text(max_size=3) | st.just({"content": "x"})
names = st.sampled_from([
    "input", "messages", "encoding_format", "query", "documents", "top_n", "text_1", "text_2", "queries", "items", "x",
])  # fmt: skip


@given(
    st.sampled_from([EMBEDDINGS, RERANK, SCORE]),
    st.dictionaries(names, values | st.lists(values | st.lists(st.integers(0, 3), max_size=2), max_size=3), max_size=6),
)
def test_whatever_the_parser_accepts_is_merged_or_not(path: str, body: dict[str, Any]) -> None:
    with suppress(Refused):
        piece = piece_of(asked(path, body))
        if piece is not None:
            sent = json.loads(merge([piece]).body)
            assert {name: value for name, value in sent.items() if name not in piece.lists} == {
                name: value
                for name, value in ({"model": "m"} | body).items()
                if name not in piece.lists and (name != "top_n" or path != RERANK)
            } or path == SCORE  # where ["x"] against several is sent as "x"
            assert piece.items >= 1


@given(st.integers(0, 10**6), st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_shares_sum_up_and_are_fair_to_one(total: int, weights: list[int]) -> None:
    parts = shares(total, weights)
    assert sum(parts) == total
    whole = sum(weights)
    for weight, part in zip(weights, parts, strict=True):
        exact = total * weight / whole if whole else total / len(weights)
        assert abs(part - exact) < 1


@given(st.lists(st.tuples(st.floats(0, 0.05), st.floats(0.001, 1)), max_size=30))
def test_a_wait_is_within_its_window(calls: list[tuple[float, float]]) -> None:
    pace, now = BatchWindow(), 0.0
    for since, window in calls:
        now += since
        assert 0.0 <= pace.wait(now, window) <= window
