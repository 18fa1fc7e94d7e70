"""Mergeable parts of a call: the list items that an engine reads one by one, and the key of calls that may be merged.

Three kinds of call are merged: texts to embed, documents to rank for one query, pairs to score. All other fields must
be equal byte for byte, so an answer does not depend on the calls merged with it.

Calls of different tenants are not merged, though no engine could tell. A merged call waits in one tenant's queue. A
light tenant's call would then wait for a heavy tenant's turn, and one of the two would pay for both.

`batching.rerank` and `batching.score` must stay off for listwise rerankers. They rank documents against each other, so
other calls' documents change their answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType

import msgspec
from msgspec import Raw

from gateway.core.policy.traffic import BatchedKind, Merge
from gateway.core.request.call import Call

KINDS: Mapping[str, BatchedKind] = MappingProxyType(
    {
        "embedding": "embeddings",  # by kind of route
        "rerank": "rerank",
        "score": "score",
    }
)
KEY_AT_MOST = 16 * 1024  # bytes of the fields that must be equal: the key keeps them in memory
DEADLINE_STEPS = 8.0  # per doubling: deadlines of merged calls are within 9 % of each other

_Lists = dict[str, list[Raw]]
_TEXT, _LIST = b'"['  # the first byte of a JSON value


class Piece(msgspec.Struct, kw_only=True, gc=False):
    """Part of a merged call that comes from one call.

    Calls with equal `key` may be merged. `lists`: the lists to concatenate. `fields`: the rest of the body, equal in
    all pieces. `items`: the number of its rows in the answer. `top_n`: the rows that a ranking's client wants (0: all).
    """

    call: Call
    key: Hashable
    items: int
    lists: _Lists
    fields: dict[str, Raw]
    top_n: int = 0


def rule_of(batching: Mapping[BatchedKind, Merge], call: Call) -> Merge | None:
    """The batching rule for calls of this kind; None: they are not merged."""
    kind = KINDS.get(call.route.kind)
    return None if kind is None else batching.get(kind)


_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode


def piece_of(call: Call) -> Piece | None:
    """The call as a part of a merged call; None where it must be sent by itself.

    Not merged are: items other than plain text or token ids; answers other than JSON; fields that only the engine can
    judge; and bodies with long fields beside the items (KEY_AT_MOST).
    """
    reader = _READERS.get(call.route.kind)
    if reader is None or call.stream or call.media:
        return None
    fields = _decode_fields(call.body)
    read = reader(fields)
    if read is None or sum([len(memoryview(value)) for value in fields.values()]) > KEY_AT_MOST:
        return None
    form, lists, top_n = read
    # A merged call has the earliest of its deadlines. No call shall fail because of another's much shorter one.
    allowed = round(DEADLINE_STEPS * math.log2(max(0.001, call.deadline - call.arrived)))
    rest = sorted([(name, bytes(value)) for name, value in fields.items()])
    key = (call.route.path, call.model, call.class_name, call.tenant, allowed, form, *lists, *rest)
    items = len(next(iter(lists.values())))
    return Piece(call=call, key=key, items=items, lists=lists, fields=fields, top_n=top_n)


_Items = tuple[str, _Lists, int] | None  # the form of the items, the lists, top_n


def _embedding(fields: dict[str, Raw]) -> _Items:
    """Texts to embed. They are not mixed with token ids: vLLM's `input` is all of one form."""
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


def _rerank(fields: dict[str, Raw]) -> _Items:
    """Documents to rank. The query stays among the fields that must be equal. The merged call asks for all rows, and
    each client gets its `top_n`."""
    documents, top_n, query = fields.pop("documents", None), fields.pop("top_n", None), fields.get("query")
    if documents is None or query is None or memoryview(documents)[0] != _LIST or memoryview(query)[0] != _TEXT:
        return None
    top = b"0" if top_n is None else bytes(top_n)
    texts = _texts(documents)
    return ("text", {"documents": texts}, int(top)) if texts and top.isdigit() and len(top) < 10 else None


def _score(fields: dict[str, Raw]) -> _Items:
    """Pairs to score. Pairs are merged with pairs; one text against several only with the same text against others."""
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


_READERS: dict[str, Callable[[dict[str, Raw]], _Items]] = {"embedding": _embedding, "rerank": _rerank, "score": _score}


def _items(raw: Raw) -> list[Raw]:
    return _decode_list(raw) if memoryview(raw)[0] == _LIST else [raw]


def _texts(raw: Raw) -> list[Raw] | None:
    """A text or a list of texts; None where anything else is among them."""
    items = _items(raw)
    return items if all(memoryview(item)[0] == _TEXT for item in items) else None
