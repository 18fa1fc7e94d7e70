"""From path, headers and body to a `Call`: the one place that reads what a client asks for.

Bad input raises `Refused` naming the field at fault and changes nothing. Unknown JSON fields pass through untouched:
a body is edited by splicing, never by re-encoding what we did not change.
"""

from __future__ import annotations

import msgspec


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the fixed route table.

    `kind` is `chat`, `completion`, `response`, `message` (these generate tokens), `embedding`, `rerank`, `score`,
    `pooling`, `classify`, `tokenize`, `audio` (these do not), or `models`, `health` (answered here).
    """

    path: str
    kind: str
    methods: tuple[str, ...] = ("POST",)
    generates: bool = False


def _routes() -> dict[bytes, Route]:
    rows = [
        Route(path="/v1/chat/completions", kind="chat", generates=True),
        Route(path="/v1/completions", kind="completion", generates=True),
        Route(path="/v1/responses", kind="response", generates=True),
        Route(path="/v1/messages", kind="message", generates=True),
        Route(path="/v1/embeddings", kind="embedding"),
        Route(path="/v1/rerank", kind="rerank"),
        Route(path="/rerank", kind="rerank"),
        Route(path="/v2/rerank", kind="rerank"),
        Route(path="/v1/score", kind="score"),
        Route(path="/score", kind="score"),
        Route(path="/pooling", kind="pooling"),
        Route(path="/classify", kind="classify"),
        Route(path="/tokenize", kind="tokenize"),
        Route(path="/detokenize", kind="tokenize"),
        Route(path="/v1/audio/transcriptions", kind="audio"),
        Route(path="/v1/audio/translations", kind="audio"),
        Route(path="/v1/models", kind="models", methods=("GET", "HEAD")),
        Route(path="/health", kind="health", methods=("GET", "HEAD")),
        Route(path="/ping", kind="health", methods=("GET", "HEAD", "POST")),
    ]
    return {row.path.encode(): row for row in rows}


ROUTES = _routes()
MODEL_ROUTE = Route(path="/v1/models/{id}", kind="models", methods=("GET", "HEAD"))


def route_of(path: bytes) -> Route | None:
    """The route of a raw path (no query), or None: anything not in the table is 404 and never forwarded."""
    route = ROUTES.get(path)
    if route is None and path.startswith(b"/v1/models/") and len(path) > len(b"/v1/models/"):
        return MODEL_ROUTE
    return route


class Call(msgspec.Struct, kw_only=True, gc=False):
    """One client request, parsed. Times are monotonic seconds, sizes are tokens unless they say bytes.

    `max_tokens` is what the client asked for, None where it asked for nothing (then the engine uses the context left).
    `prefix` holds the chained hashes of the prompt's fixed-size blocks, model and tenant salt first. `ascii_bytes`,
    `cjk_bytes`, `other_bytes` are the prompt's UTF-8 bytes by script, `media` counts its images and audio parts.
    """

    request_id: str
    route: Route
    model: str
    tenant: str
    class_name: str
    arrived: float
    deadline: float
    stream: bool
    wants_usage: bool  # the client itself asked for stream_options.include_usage
    max_tokens: int | None
    n: int
    ascii_bytes: int
    cjk_bytes: int
    other_bytes: int
    media: int
    messages: int
    prefix: tuple[int, ...]
    session: int  # 0: none
    body: bytes  # as it is sent to the engine (usage injected where we need it)
    prompt_tokens: int = 0  # estimate, filled in by cost.py
    output_tokens: int = 0  # estimate, filled in by cost.py
