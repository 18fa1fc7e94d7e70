"""Request batching: merges calls into one request to an engine, and splits its answer among them.

The items of several calls become one list (`merge_pieces.py`). Rows of the answer go back by their `index`; their
order is never trusted. Vectors pass as the bytes they came in. Usage is shared in proportion to the estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Raw

from gateway.core.batching.merge_pieces import Piece
from gateway.core.request.call import Call

_Index = Annotated[int, msgspec.Meta(ge=0)]
GAIN = 0.125  # weight of the newest gap in the moving average


class BatchWindow:
    """Moving average of the gaps between calls of one key. `at`: arrival of the last one, in monotonic seconds."""

    def __init__(self) -> None:
        self.at = -math.inf
        self._gap = 0.0  # mean gap in seconds, no more than the window

    def wait(self, now: float, window: float) -> float:
        """Seconds that a call which arrives now shall wait for others: the window less the mean gap.

        It is 0 where one other call is expected within the window, and approaches the whole window for short gaps. A
        call after a silence of a window goes at once, and the mean starts anew.
        """
        since = now - self.at
        self.at = now
        if since >= window:
            self._gap = window
        else:
            self._gap += GAIN * (since - self._gap)
        return max(0.0, window - self._gap)


class SplitError(ValueError):
    """The engine's answer to a merged call cannot be split: it is not readable, or has not one row for each item."""


_SUMMED = ("ascii_bytes", "cjk_bytes", "other_bytes", "messages", "token_ids", "prompt_tokens", "output_tokens")


def merge(pieces: Sequence[Piece]) -> Call:
    """Merge pieces of equal key into one call, with all items in order and the earliest of the deadlines.

    The request id is that of the first piece, with the number of the others. Its model stays: it may be what some calls
    have asked for, while others take another model of their route.
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
        others=(),
        merged=True,
        body=msgspec.json.encode(body),
        **{name: sum([getattr(call, name) for call in calls]) for name in _SUMMED},
    )


# -- apart ------------------------------------------------------------------------------------------------------------

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_rows = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decode_index = msgspec.json.Decoder(_Index).decode


def split(answer: bytes, merged: Call, pieces: Sequence[Piece]) -> list[tuple[bytes, int | None]]:
    """For each piece, the answer that its call would have had by itself, and its prompt tokens (None: not reported).

    The engine reports only the sum of the tokens. It is shared in proportion to the estimates, exactly (see `shares`).
    Raises SplitError.
    """
    name = "results" if merged.route.kind == "rerank" else "data"
    try:
        fields: dict[str, Any] = _decode_fields(answer)
        rows = [(_decode_index(row["index"]), row) for row in _decode_rows(fields[name])]
        prompt_tokens, usage = _usage(fields, [piece.call.prompt_tokens for piece in pieces])
        answer_id = msgspec.json.decode(fields.get("id", b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise SplitError(f"its answer is not as expected: {error}") from error
    ends = list(accumulate(piece.items for piece in pieces))
    expected = ends[-1]
    if len(rows) != expected or {index for index, _ in rows} != set(range(expected)):
        raise SplitError(f"it answered {len(rows)} rows to {expected} items, or not one to each")
    if name == "data":  # a ranking stays in the order of its scores
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
        parts.append((msgspec.json.encode(own), prompt_tokens[number]))
    return parts


def _first(row: tuple[int, Any]) -> int:
    return row[0]


def _own_id(answer_id: str, merged: str, own: str, number: int) -> str:
    """A piece's answer id. vLLM derives it from the request's id, and then so does this; else it adds a number."""
    return answer_id.removesuffix(merged) + own if answer_id.endswith(merged) else f"{answer_id}-{number}"


def _usage(fields: dict[str, Any], estimates: Sequence[int]) -> tuple[Sequence[int | None], list[dict[str, Any]]]:
    """Split usage into each piece's prompt tokens and usage object. Members that are no counts (details) are null in
    each."""
    usage = msgspec.json.decode(fields.get("usage", b"null"), type=dict[str, Any] | None) or {}
    parts: list[dict[str, Any]] = [{} for _ in estimates] if usage else []
    prompt_tokens: Sequence[int | None] = [None] * len(estimates)
    for name, value in usage.items():
        counted = shares(value, estimates) if value.__class__ is int and value >= 0 else [None] * len(estimates)
        for part, share in zip(parts, counted, strict=True):
            part[name] = share
        if name == "prompt_tokens" or (name == "total_tokens" and "prompt_tokens" not in usage):
            prompt_tokens = counted
    return prompt_tokens, parts


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """`total` apportioned to `weights` in whole numbers that sum to it (Hamilton's largest remainder method).

    Equal weights where all are 0.
    """
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    parts = [total * weight // whole for weight in weights]
    left = total - sum(parts)
    for number in sorted(range(len(weights)), key=lambda number: -(total * weights[number] % whole))[:left]:
        parts[number] += 1
    return parts
