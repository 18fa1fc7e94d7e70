"""Route table: the paths that the gateway forwards to engines or answers itself. No other path is ever forwarded."""

from __future__ import annotations

import msgspec


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the fixed route table.

    `kind` is `chat`, `completion`, `response`, `message` (these generate tokens), `embedding`, `rerank`, `score`,
    `pooling`, `classify`, `tokenize`, `audio` (these do not), or `models`, `health`, `help` (answered here).
    """

    path: str
    kind: str
    methods: tuple[str, ...] = ("POST",)
    generates: bool = False
    media: bool = True  # its body may hold images, audio or files


def _routes() -> dict[bytes, Route]:
    rows = [
        Route(path="/v1/chat/completions", kind="chat", generates=True),
        Route(path="/v1/completions", kind="completion", generates=True, media=False),
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
        Route(path="/v1/models", kind="models", methods=("GET", "HEAD"), media=False),
        Route(path="/health", kind="health", methods=("GET", "HEAD"), media=False),
        Route(path="/ping", kind="health", methods=("GET", "HEAD", "POST"), media=False),
        Route(path="/outcomes", kind="help", methods=("GET", "HEAD"), media=False),
    ]
    return {row.path.encode(): row for row in rows}


ROUTES = _routes()
MODEL_ROUTE = Route(path="/v1/models/{id}", kind="models", methods=("GET", "HEAD"), media=False)
HELP_ROUTE = Route(path="/outcomes/{reason}", kind="help", methods=("GET", "HEAD"), media=False)


def route_of(path: bytes) -> Route | None:
    """The route of a raw path without its query; None: it is not in the table, so the answer is 404."""
    route = ROUTES.get(path)
    if route is None and path.startswith(b"/v1/models/") and len(path) > len(b"/v1/models/"):
        return MODEL_ROUTE
    if route is None and path.startswith(b"/outcomes/"):
        return HELP_ROUTE
    return route
