"""Answers of an engine to embeddings, rerank and score, for tests of batching: equal inputs, equal rows."""

from __future__ import annotations

import json
import zlib
from typing import Any

from gateway.core.request.call import Call, CallSettings
from gateway.core.request.cost import CostModel
from gateway.core.request.parser import parse
from gateway.core.request.routes import ROUTES

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"


def asked(path: str, body: dict[str, Any], *, now: float = 0.0, request_id: str = "r", **headers: str) -> Call:
    """A call as the pipeline has it before it is admitted: parsed, its prompt estimated."""
    given = {"content-type": "application/json"} | headers
    lines = {name.replace("_", "-").encode(): value.encode() for name, value in given.items()}
    data = json.dumps({"model": "m"} | body).encode()
    settings = CallSettings()
    call = parse(ROUTES[path.encode()], lines, data, settings=settings, request_id=request_id, tenant="t", now=now)
    CostModel().estimate(call, None)
    return call


def tokens(text: Any) -> int:
    """Prompt tokens of one text, or of a list of ids."""
    return len(text) + 2


def answer(call: Call) -> tuple[int, dict[str, Any]]:
    """Status and body, as vLLM's: the prompt "bad" is a 400 for the whole request, "broken" a 500."""
    body = json.loads(call.body)
    if call.route.kind == "embedding":
        items = body["input"] if isinstance(body["input"], list) else [body["input"]]
        items = [items] if isinstance(items[0], int) else items
        rows = [{"index": at, "object": "embedding", "embedding": row(item)} for at, item in enumerate(items)]
    elif call.route.kind == "score":
        left, right = (value if isinstance(value, list) else [value] for value in (body["text_1"], body["text_2"]))
        items = [one + other for one, other in zip(left * len(right) if len(left) == 1 else left, right, strict=True)]
        rows = [{"index": at, "object": "score", "score": row(item)[0]} for at, item in enumerate(items)]
    else:
        items = [body["query"] + text for text in body["documents"]]
        rows = [
            {"index": at, "document": {"text": text}, "relevance_score": row(item)[0]}
            for at, (item, text) in enumerate(zip(items, body["documents"], strict=True))
        ]
        rows.sort(key=lambda one: -one["relevance_score"])
        rows = rows[: body.get("top_n") or len(rows)]
    for word, status in (("bad", 400), ("broken", 500)):
        if word in items:
            return status, {"error": {"message": f"{word} input in {call.request_id}", "code": status}}
    total = sum(map(tokens, items))
    usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None}
    name = "results" if call.route.kind == "rerank" else "data"
    return 200, {"id": f"embd-{call.request_id}", "model": "m", name: rows, "usage": usage, "created": 1}


def row(item: Any) -> list[float]:
    """A vector that no other input has."""
    data = item.encode() if isinstance(item, str) else repr(item).encode()
    return [zlib.crc32(data) / 2**32, len(data) / 7]
