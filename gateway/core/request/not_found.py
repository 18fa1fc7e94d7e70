"""Answers 404 and 405 of the data port, with a hint at the route that the caller probably meant."""

from __future__ import annotations

from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.routes import ROUTES, Route, route_of

SHOWN = 100  # characters of a path
CONTROL = frozenset({b"/", b"/livez", b"/readyz", b"/metrics", b"/fleet", b"/calls", b"/status", b"/policy"})
OLLAMA = {
    b"/api/chat": "/v1/chat/completions",
    b"/api/generate": "/v1/completions",
    b"/api/embed": "/v1/embeddings",
    b"/api/embeddings": "/v1/embeddings",
    b"/api/tags": "/v1/models",
    b"/api/ps": "/v1/models",
    b"/api/show": "/v1/models",
}
_WHOLE = "/v1/chat/completions, /v1/responses and /v1/messages take it whole"
_ADAPTERS = (
    "Adapters are loaded and unloaded at the engine's own port; the gateway lists what the engine lists, within seconds"
)
INSTEAD = {  # the beginning of a path of OpenAI's, Anthropic's or vLLM's that is not offered, and what there is
    b"/v1/responses/input_tokens": "POST /tokenize and POST /v1/messages/count_tokens count a prompt's tokens",
    b"/v1/responses/compact": "Nothing here makes a conversation shorter: leave out its oldest turns",
    b"/v1/messages/batches": "Batches are OpenAI's, /v1/batches, where this gateway's policy offers them (`batches`)",
    b"/v1/chat/completions/": (
        "A call here is one request: POST /v1/chat/completions, or its /render; many are a batch, /v1/batches"
    ),
    b"/v1/completions/": "A call here is one request: POST /v1/completions, or its /render; many are /v1/batches",
    b"/version": "An engine tells its version on its own port, and the gateway its own by `gateway --version`",
    b"/server_info": "An engine tells its settings on its own port; GET /fleet of the control port has what is known",
    b"/load": "GET /fleet of the control port has the load of each engine",
    b"/tokenizer_info": "POST /tokenize counts a prompt's tokens; the tokenizer itself is with the model's files",
    b"/v1/load_lora_adapter": _ADAPTERS,
    b"/v1/unload_lora_adapter": _ADAPTERS,
    b"/inference/v1/generate": "Prompts of token ids go to POST /v1/completions, as `prompt`",
    b"/invocations": f"SageMaker's path is not offered: {_WHOLE}",
    b"/cohere/": "Cohere's chat is not offered; /v1/chat/completions, /v1/embeddings and /v2/rerank are",
    b"/v2/": "Of Cohere's API there is /v2/rerank; the others are /v1/chat/completions and /v1/embeddings",
    b"/generative_scoring": "POST /v1/score and POST /v1/rerank score texts",
    b"/v1beta/": "Gemini's API is not offered; most programs that speak it also speak OpenAI's: /v1/chat/completions",
    b"/openai/deployments/": "Azure's paths are not offered: choose OpenAI, with a base URL that ends in /v1",
    b"/v1/responses/": (
        "No response is stored here, so none can be fetched, continued, cancelled or deleted: POST /v1/responses "
        "answers in the call itself, whole or as a stream, and closing its connection cancels it"
    ),
    b"/v1/audio/speech": "Of audio there are /v1/audio/transcriptions and /v1/audio/translations: nothing here speaks",
    b"/v1/images": "Nothing here makes images; /v1/chat/completions, /v1/responses and /v1/messages read them",
    b"/v1/videos": "Nothing here makes videos; /v1/chat/completions reads them where the model does",
    b"/v1/realtime": "There are no sessions of speech; /v1/audio/transcriptions takes a recording, and streams",
    b"/v1/moderations": "/classify asks a classifier, where an engine serves one",
    b"/v1/assistants": f"No conversation is stored here: {_WHOLE}",
    b"/v1/threads": f"No conversation is stored here: {_WHOLE}",
    b"/v1/files": "Files are kept for batches, which the policy of this gateway has to offer (`batches`)",
    b"/v1/batches": "Batches are offered where the policy of this gateway says so (`batches`)",
    b"/v1/conversations": f"No conversation is stored here: {_WHOLE}",
}
ALL_PATHS = ", ".join(row.path for row in ROUTES.values())


def canonical(path: bytes) -> bytes:
    """The path of a route without one slash at its end; any other path unchanged."""
    return path[:-1] if path[-1:] == b"/" and path[:-1] in ROUTES else path


def no_route(method: bytes, path: bytes) -> Refused:
    """A refusal (404) of a path that is in no row of the route table."""
    shown = path.decode("latin-1")
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    message = f"{method.decode('latin-1')} {shown} is not offered here"
    return Refused(Outcome.NOT_FOUND, f"{message}. {_hint(canonical(path))}.", code="route_not_found")


def _hint(path: bytes) -> str:
    if path in OLLAMA:
        return f"This gateway speaks OpenAI's API, not Ollama's: use {OLLAMA[path]}, with a base URL that ends in /v1"
    within = path.removeprefix(b"/v1")
    if within != path and route_of(within) is not None and within.startswith(b"/v1/"):
        return f"Did you mean {within.decode('latin-1')[:SHOWN]}? The client's base URL has /v1 twice"
    if route_of(b"/v1" + path) is not None:
        return f"Did you mean /v1{path.decode('latin-1')[:SHOWN]}? The client's base URL has to end in /v1"
    for beginning, instead in INSTEAD.items():
        if path.startswith(beginning):
            return instead
    if path in CONTROL:
        return "It is a path of the control port, whose address the gateway prints when it starts"
    return f"This gateway answers {ALL_PATHS}"


def no_method(method: bytes, route: Route) -> Refused:
    """A refusal (405) of a method that the route does not take, with the `allow` header."""
    methods = ", ".join(route.methods)
    message = f"{method.decode('latin-1')} {route.path} is not offered here: it takes {methods}."
    return Refused(Outcome.METHOD_NOT_ALLOWED, message, headers=b"allow: %b\r\n" % methods.encode())
