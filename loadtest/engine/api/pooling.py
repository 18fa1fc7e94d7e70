"""Embeddings, scores, ranks: prompts are read by the same scheduler and nothing is written.

Numbers are drawn from the text, so the same text has the same vector and two texts that share words are not closer
than two that do not: enough to see that answers reach the right caller, not enough to search with.
"""

from __future__ import annotations

import array
import base64
import hashlib
import math
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from loadtest.engine import tokens
from loadtest.engine.api.checks import ApiError, Limits, check_model, decode, encode, output_room
from loadtest.engine.api.generate import Form, Generation
from loadtest.engine.api.http import Connection
from loadtest.engine.api.openai import prompts_of
from loadtest.engine.sequence import Sequence

DIMENSIONS = 64


class PoolingBody(msgspec.Struct):
    """The fields that are read, of all these routes: which of them are required is the route's business."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: str = "float"
    dimensions: int | None = None
    query: Any = None
    documents: Any = None
    top_n: int | None = None
    queries: Any = None
    text_1: Any = None
    text_2: Any = None
    priority: int = 0
    cache_salt: str | None = None


Row = Callable[[bytes], dict[str, Any]]  # of a text
DECODER = msgspec.json.Decoder(PoolingBody)


class PoolingForm:
    """Form of an answer that is sent, by `whole`, once every text is read. It has no streams."""

    def __init__(self, model: str, whole: Callable[[Generation], bytes]) -> None:
        self.model = model
        self.whole = whole


def _gather(
    connection: Connection, limits: Limits, model: str, texts: list[bytes], asked: PoolingBody,
    whole: Callable[[Generation], bytes],
) -> Generation:  # fmt: skip
    form = cast("Form", PoolingForm(model, whole))
    generation = Generation(connection, form, stream=False, prompt=sum(map(tokens.count, texts)), limits=limits)
    for sequence in readings(texts, asked, model, limits):
        generation.add(sequence, [])
    return generation


def readings(texts: list[bytes], asked: PoolingBody, model: str, limits: Limits) -> Iterator[Sequence]:
    """Sequences of texts that are only read. Raises ApiError."""
    for data in texts:
        prompt = tokens.count(data)
        output_room(limits, prompt, None, "input")
        hashes = tokens.block_hashes(data, (model, "pooling", asked.cache_salt))
        yield Sequence(prompt, 0, hashes=hashes, reason="stop", priority=asked.priority)


def inputs(asked: PoolingBody) -> list[bytes]:
    """Texts of which embeddings are asked for. Raises ApiError."""
    if asked.messages is not None:
        return [tokens.chat(asked.messages)]
    if not asked.input:
        raise ApiError(400, "1 validation error:\n  input: Field required", type="Bad Request", param="input")
    return prompts_of(asked.input)


def vector(data: bytes, dimensions: int) -> list[float]:
    """The text's point on the unit sphere."""
    values = [byte - 127.5 for byte in hashlib.shake_128(data).digest(dimensions)]
    length = math.hypot(*values)
    return [value / length for value in values]


def _usage(generation: Generation) -> dict[str, Any]:
    prompt = generation.prompt
    return {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0, "prompt_tokens_details": None}


def _listed(
    connection: Connection, limits: Limits, asked: PoolingBody, texts: list[bytes], id: str, row: Row
) -> Generation:
    """An answer under way that lists a row for each text. Raises ApiError."""
    model, created = check_model(limits, asked.model), int(time.time())

    def whole(generation: Generation) -> bytes:
        rows = [{"index": index} | row(data) for index, data in enumerate(texts)]
        head = {"id": id, "object": "list", "created": created, "model": model}
        return encode(head | {"data": rows, "usage": _usage(generation)})

    return _gather(connection, limits, model, texts, asked, whole)


def embeddings(connection: Connection, body: bytes, request_id: str, limits: Limits) -> Generation:
    """`/v1/embeddings` under way. Raises ApiError."""
    asked = decode(DECODER, body)
    if asked.encoding_format not in ("float", "base64"):
        raise ApiError(400, "encoding_format must be float or base64.", param="encoding_format")

    def one(data: bytes) -> dict[str, Any]:
        value: Any = vector(data, asked.dimensions or DIMENSIONS)
        if asked.encoding_format == "base64":
            value = base64.b64encode(array.array("f", value).tobytes()).decode()
        return {"object": "embedding", "embedding": value}

    return _listed(connection, limits, asked, inputs(asked), f"embd-{request_id}", one)


def score(connection: Connection, body: bytes, request_id: str, limits: Limits) -> Generation:
    """`/score` under way: one text against each of several, or pairwise. Raises ApiError."""
    asked = decode(DECODER, body)
    left = _side(asked, ("text_1", "queries"))
    right = _side(asked, ("text_2", "documents"))
    if len(left) not in (1, len(right)):
        raise ApiError(400, "Input lengths must be either 1:1, 1:N or N:N")
    pairs = [(left[0] if len(left) == 1 else left[index]) + other for index, other in enumerate(right)]
    return _listed(
        connection, limits, asked, pairs, f"score-{request_id}", lambda data: {"object": "score", "score": _score(data)}
    )


def rerank(connection: Connection, body: bytes, request_id: str, limits: Limits) -> Generation:
    """`/rerank` under way: documents by falling score. Raises ApiError."""
    asked = decode(DECODER, body)
    model = check_model(limits, asked.model)
    query = _side(asked, ("query",))[0]
    documents = asked.documents if isinstance(asked.documents, list) else [asked.documents]
    pairs = [query + other for other in _side(asked, ("documents",))]
    top = asked.top_n if asked.top_n is not None and asked.top_n > 0 else len(pairs)

    def whole(generation: Generation) -> bytes:
        scores = sorted(((_score(data), -index) for index, data in enumerate(pairs)), reverse=True)
        results = [
            {"index": -index, "document": _document(documents[-index]), "relevance_score": value}
            for value, index in scores[:top]
        ]
        usage = {"prompt_tokens": generation.prompt, "total_tokens": generation.prompt}
        return encode({"id": f"rerank-{request_id}", "model": model, "usage": usage, "results": results})

    return _gather(connection, limits, model, pairs, asked, whole)


def _side(asked: PoolingBody, names: tuple[str, ...]) -> list[bytes]:
    for name in names:
        value = getattr(asked, name)
        if value is not None and value != []:
            return [_text(one) for one in (value if isinstance(value, list) else [value])]
    raise ApiError(400, f"1 validation error:\n  {names[0]}: Field required", type="Bad Request", param=names[0])


def _text(value: Any) -> bytes:
    if isinstance(value, dict):
        value = value.get("content", value.get("text", value))
    return tokens.content(value)


def _document(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"text": value, "multi_modal": None}


def _score(data: bytes) -> float:
    """0..1, from the text."""
    return zlib.crc32(data) / 0xFFFFFFFF
