"""Route table: the paths that the gateway forwards to engines or answers itself. No other path is ever forwarded."""

from __future__ import annotations

import msgspec


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the fixed route table. Routes differ in these columns only.

    `kind` names the routes whose bodies are read alike, in the policy too: `chat`, `completion`, `response`, `message`,
    `embedding`, `rerank`, `score`, `pooling`, `classify`, `tokenize`, `audio`; `models`, `health`, `help`, `stored`.
    """

    path: str
    kind: str
    methods: tuple[str, ...] = ("POST",)
    here: bool = False  # the gateway answers it by itself
    keyless: bool = False  # it needs no API key
    stored: bool = False  # it is of files and batches, which the policy may not offer
    generates: bool = False  # it generates tokens
    media: bool = True  # its body may hold images, audio or files
    form: bool = False  # its body is a multipart form with a recording, else JSON
    cached: bool = True  # engines keep its prompt in their prefix caches, and take a cache salt
    merges: bool = False  # several calls may share one request to an engine
    pairs: bool = False  # the engine reads its query once for each document
    counts: bool = False  # the engine only counts tokens: it reads none into its KV cache, and none are used up
    continues: bool = False  # it may continue an earlier answer that is not in its body
    usage_option: bool = False  # its streams report usage only where `stream_options` asks for that
    last_event: bytes = b""  # in the last event of its streams; empty: they end with [DONE]
    default_output: int = 0  # vLLM's `max_tokens` where a call gives none; 0: the rest of the context


READ_ONLY = ("GET", "HEAD")


def _routes() -> dict[bytes, Route]:
    rows = [
        Route(path="/v1/chat/completions", kind="chat", generates=True, usage_option=True),
        Route(
            path="/v1/completions",
            kind="completion",
            generates=True,
            usage_option=True,
            media=False,
            default_output=16,
        ),
        Route(path="/v1/responses", kind="response", generates=True, continues=True),
        Route(path="/v1/messages", kind="message", generates=True, last_event=b'"message_stop"'),
        Route(path="/v1/messages/count_tokens", kind="message", counts=True, cached=False),
        Route(path="/v1/embeddings", kind="embedding", merges=True),
        Route(path="/v1/rerank", kind="rerank", merges=True, pairs=True),
        Route(path="/rerank", kind="rerank", merges=True, pairs=True),
        Route(path="/v2/rerank", kind="rerank", merges=True, pairs=True),
        Route(path="/v1/score", kind="score", merges=True, pairs=True),
        Route(path="/score", kind="score", merges=True, pairs=True),
        Route(path="/pooling", kind="pooling"),
        Route(path="/classify", kind="classify"),
        # vLLM's renderers: the token ids that a body would become, by its chat template.
        Route(path="/v1/chat/completions/render", kind="chat", cached=False),
        Route(path="/v1/completions/render", kind="completion", media=False, cached=False),
        Route(path="/tokenize", kind="tokenize", cached=False),
        Route(path="/detokenize", kind="tokenize", cached=False),
        Route(path="/v1/audio/transcriptions", kind="audio", form=True, cached=False),
        Route(path="/v1/audio/translations", kind="audio", form=True, cached=False),
        Route(path="/v1/models", kind="models", methods=READ_ONLY, here=True, media=False),
        Route(path="/health", kind="health", methods=READ_ONLY, here=True, keyless=True, media=False),
        Route(path="/ping", kind="health", methods=(*READ_ONLY, "POST"), here=True, keyless=True, media=False),
        Route(path="/outcomes", kind="help", methods=READ_ONLY, here=True, keyless=True, media=False),
    ]
    return {row.path.encode(): row for row in rows}


ROUTES = _routes()
MODEL_ROUTE = Route(path="/v1/models/{id}", kind="models", methods=READ_ONLY, here=True, media=False)
HELP_ROUTE = Route(path="/outcomes/{reason}", kind="help", methods=READ_ONLY, here=True, keyless=True, media=False)


def route_of(path: bytes) -> Route | None:
    """The route of a raw path without its query; None: it is not in the table, so the answer is 404."""
    route = ROUTES.get(path)
    if route is None and path.startswith(b"/v1/models/") and len(path) > len(b"/v1/models/"):
        return MODEL_ROUTE
    if route is None and path.startswith(b"/outcomes/"):
        return HELP_ROUTE
    return route
