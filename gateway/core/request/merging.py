"""Calls that one request to an engine can answer together, and how its answer is taken apart again.

Only what the engine reads item by item is merged: texts to embed, documents to rank for one query, pairs to score. The
items of several calls become one list, and the rows that answer them go back by their `index`; order is never trusted.
Every other field must be the same byte for byte, so what a call is answered does not depend on who came beside it.
Vectors pass as the bytes they came in.

Calls of different tenants are not merged, though no engine could tell. A merged call waits in one tenant's line: beside
a heavy tenant's calls a light one's would wait for that tenant's turn, and one of the two would pay for both.

Where a model ranks documents against each other (a listwise reranker) instead of each by itself, `batching.rerank` and
`batching.score` must stay off: company changes its answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Raw

from gateway.core.policy.traffic import Batching, Merge
from gateway.core.request.call import Call

GAIN = 0.125  # weight of the newest gap in the mean one
KEY_AT_MOST = 16 * 1024  # bytes of the fields that must be equal: they are kept for as long as the key is
DEADLINE_STEPS = 8.0  # per doubling: merged calls allow times within 9 % of each other

_Lists = dict[str, list[Raw]]
_Index = Annotated[int, msgspec.Meta(ge=0)]
_TEXT, _LIST = b'"['  # the first byte of a JSON value


class SplitError(ValueError):
    """The engine's answer to a merged call cannot be taken apart: not one row for each item, or not readable."""


class Piece(msgspec.Struct, kw_only=True, gc=False):
    """What one call brings to a merged one.

    Calls with equal `key` may be merged. `lists` are concatenated, `fields` are the rest of the body and the same in
    all. `items`: the rows of an answer that are its own, of which a ranking's first `top_n` are wanted (0: all).
    """

    call: Call
    key: Hashable
    items: int
    lists: _Lists
    fields: dict[str, Raw]
    top_n: int = 0


def rule_of(batching: Batching, call: Call) -> Merge | None:
    """The policy for calls of this kind; None: they are not merged."""
    kind = call.route.kind
    if kind == "embedding":
        return batching.embeddings
    if kind == "rerank":
        return batching.rerank
    return batching.score if kind == "score" else None


_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode


def piece_of(call: Call) -> Piece | None:
    """The call as a part of a merged one; None where it must go by itself: what is not plain text or token ids, what
    is answered in another form than JSON, what only the engine can judge, and what says much beside its items."""
    reader = _READERS.get(call.route.kind)
    if reader is None or call.stream or call.media:
        return None
    fields = _decode_fields(call.body)
    read = reader(fields)
    if read is None or sum([len(memoryview(value)) for value in fields.values()]) > KEY_AT_MOST:
        return None
    form, lists, top_n = read
    # A merged call must be done by the earliest of its deadlines: nobody is to fail by a neighbour in more of a hurry.
    allowed = round(DEADLINE_STEPS * math.log2(max(0.001, call.deadline - call.arrived)))
    rest = sorted([(name, bytes(value)) for name, value in fields.items()])
    key = (call.route.path, call.model, call.class_name, call.tenant, allowed, form, *lists, *rest)
    items = len(next(iter(lists.values())))
    return Piece(call=call, key=key, items=items, lists=lists, fields=fields, top_n=top_n)


_Read = tuple[str, _Lists, int] | None  # the form of the items, the lists, top_n


def _embedding(fields: dict[str, Raw]) -> _Read:
    """Texts and token ids are not mixed: vLLM's `input` is all of one form."""
    raw = fields.pop("input", None)
    if raw is None or memoryview(raw)[0] not in (_TEXT, _LIST):
        return None  # messages
    encoding = fields.get("encoding_format")
    if encoding is not None and bytes(encoding) not in (b'"float"', b'"base64"'):
        return None  # bytes: not a JSON answer
    view = memoryview(raw)
    if view[0] == _LIST and bytes(view[1:32]).lstrip()[:1].isdigit():
        return "ids", {"input": [raw]}, 0
    items = _items(raw)
    firsts = {memoryview(item)[0] for item in items}
    if len(firsts) != 1:
        return None
    return "ids" if _LIST in firsts else "text", {"input": items}, 0


def _rerank(fields: dict[str, Raw]) -> _Read:
    """The query stays among the fields that must be equal. The merged call asks for all, and each is given its top."""
    documents, top_n, query = fields.pop("documents", None), fields.pop("top_n", None), fields.get("query")
    if documents is None or query is None or memoryview(documents)[0] != _LIST or memoryview(query)[0] != _TEXT:
        return None
    top = b"0" if top_n is None else bytes(top_n)
    texts = _texts(documents)
    return ("text", {"documents": texts}, int(top)) if texts and top.isdigit() and len(top) < 10 else None


def _score(fields: dict[str, Raw]) -> _Read:
    """Pairs are merged with pairs; one text against several only with the same text against others."""
    left = [name for name in ("text_1", "queries", "data_1") if name in fields]
    right = [name for name in ("text_2", "documents", "items", "data_2") if name in fields]
    if len(left) != 1 or len(right) != 1:
        return None
    ones, others = _texts(fields.pop(left[0])), _texts(fields.pop(right[0]))
    if not ones or not others:
        return None
    if len(ones) == len(others):
        return "text", {left[0]: ones, right[0]: others}, 0
    if len(ones) > 1:
        return None
    fields[left[0]] = ones[0]
    return "text", {right[0]: others}, 0


_READERS: dict[str, Callable[[dict[str, Raw]], _Read]] = {"embedding": _embedding, "rerank": _rerank, "score": _score}


def _items(raw: Raw) -> list[Raw]:
    return _decode_list(raw) if memoryview(raw)[0] == _LIST else [raw]


def _texts(raw: Raw) -> list[Raw] | None:
    """One text or several; None where anything else is among them."""
    items = _items(raw)
    return items if all(memoryview(item)[0] == _TEXT for item in items) else None


# -- together ---------------------------------------------------------------------------------------------------------

_SUMMED = ("ascii_bytes", "cjk_bytes", "other_bytes", "messages", "token_ids", "prompt_tokens", "output_tokens")


def merge(pieces: Sequence[Piece]) -> Call:
    """One call for all of them, which have the same key: the items of each in turn, by the earliest deadline.

    Its request id is made of the first's.
    """
    first = pieces[0]
    calls = [piece.call for piece in pieces]
    body: dict[str, Any] = dict(first.fields)
    for name in first.lists:
        body[name] = [item for piece in pieces for item in piece.lists[name]]
    return msgspec.structs.replace(
        first.call,
        request_id=f"{first.call.request_id}+{len(pieces) - 1}",
        arrived=min([call.arrived for call in calls]),
        deadline=min([call.deadline for call in calls]),
        ttft_by=min([call.ttft_by for call in calls]),
        session=0,
        merged=True,
        body=msgspec.json.encode(body),
        **{name: sum([getattr(call, name) for call in calls]) for name in _SUMMED},
    )


# -- apart ------------------------------------------------------------------------------------------------------------

_decode_rows = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decode_index = msgspec.json.Decoder(_Index).decode


def split(answer: bytes, merged: Call, pieces: Sequence[Piece]) -> list[tuple[bytes, int | None]]:
    """What each call would have been answered by itself, and the prompt tokens that are its share (None: not told).

    The engine tells only the sum of the tokens: it is shared in proportion to the estimates, exactly (see `shares`).
    Raises SplitError.
    """
    name = "results" if merged.route.kind == "rerank" else "data"
    try:
        fields: dict[str, Any] = _decode_fields(answer)
        rows = [(_decode_index(row["index"]), row) for row in _decode_rows(fields[name])]
        told, usage = _usage(fields, [piece.call.prompt_tokens for piece in pieces])
        answer_id = msgspec.json.decode(fields.get("id", b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise SplitError(f"its answer is not as expected: {error}") from error
    ends = list(accumulate(piece.items for piece in pieces))
    expected = ends[-1]
    if len(rows) != expected or {index for index, _ in rows} != set(range(expected)):
        raise SplitError(f"it answered {len(rows)} rows to {expected} items, or not one to each")
    if name == "data":  # a ranking is in the order of its scores
        rows.sort(key=_first)
    owners = [number for number, piece in enumerate(pieces) for _ in range(piece.items)]
    owned: list[list[dict[str, Any]]] = [[] for _ in pieces]
    for index, row in rows:
        number = owners[index]
        row["index"] = Raw(b"%d" % (index - ends[number] + pieces[number].items))
        owned[number].append(row)
    parts = []
    for number, piece in enumerate(pieces):
        own = fields.copy()
        own[name] = owned[number][: piece.top_n] if piece.top_n else owned[number]
        if isinstance(answer_id, str):
            own["id"] = _own_id(answer_id, merged.request_id, piece.call.request_id, number)
        if usage:
            own["usage"] = usage[number]
        parts.append((msgspec.json.encode(own), told[number]))
    return parts


def _first(row: tuple[int, Any]) -> int:
    return row[0]


def _own_id(answer_id: str, merged: str, own: str, number: int) -> str:
    """vLLM makes an answer's id of the request's: then each gets what it would have got, else a number after it."""
    return answer_id.removesuffix(merged) + own if answer_id.endswith(merged) else f"{answer_id}-{number}"


def _usage(fields: dict[str, Any], estimates: Sequence[int]) -> tuple[Sequence[int | None], list[dict[str, Any]]]:
    """Each call's prompt tokens and usage object. What is no count (details of the whole) is null in each."""
    usage = msgspec.json.decode(fields.get("usage", b"null"), type=dict[str, Any] | None) or {}
    parts: list[dict[str, Any]] = [{} for _ in estimates] if usage else []
    told: Sequence[int | None] = [None] * len(estimates)
    for name, value in usage.items():
        counted = shares(value, estimates) if value.__class__ is int and value >= 0 else [None] * len(estimates)
        for part, share in zip(parts, counted, strict=True):
            part[name] = share
        if name == "prompt_tokens" or (name == "total_tokens" and "prompt_tokens" not in usage):
            told = counted
    return told, parts


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in proportion to `weights`, in whole numbers that sum to it: the largest remainders get what is left
    over (Hamilton's method). Equal weights where all are 0."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    parts = [total * weight // whole for weight in weights]
    left = total - sum(parts)
    for number in sorted(range(len(weights)), key=lambda number: -(total * weights[number] % whole))[:left]:
        parts[number] += 1
    return parts


# -- how long to wait for others --------------------------------------------------------------------------------------


class Pace:
    """How close upon each other calls of one key come. `at`: when the last one came."""

    __slots__ = ("_gap", "at")

    def __init__(self) -> None:
        self.at = -math.inf
        self._gap = 0.0  # mean seconds between calls, no more than the window

    def wait(self, now: float, window: float) -> float:
        """A call has come: how long is it worth waiting for others? The window, less the mean gap.

        So it grows from 0, where one other is expected within the window, up to all of it. A call that comes after a
        window's silence goes at once, and what was learned before the silence is forgotten.
        """
        since = now - self.at
        self.at = now
        if since >= window:
            self._gap = window
        else:
            self._gap += GAIN * (since - self._gap)
        return max(0.0, window - self._gap)
