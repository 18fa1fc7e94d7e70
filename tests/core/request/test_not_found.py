"""Answers 404 and 405, and the hint that each caller gets."""

from __future__ import annotations

import json

import pytest

from gateway.core.request.not_found import SHOWN, canonical, no_method, no_route
from gateway.core.request.routes import MODEL_ROUTE, ROUTES


@pytest.mark.parametrize("path", ROUTES)
def test_a_slash_at_the_end_of_a_route_is_forgiven_once(path: bytes) -> None:
    assert canonical(path) == canonical(path + b"/") == path
    assert canonical(path + b"//") == path + b"//"


@pytest.mark.parametrize("path", [b"/", b"", b"/v1/models/a", b"/v1/models/a/", b"/v1/batches/", b"/v1/"])
def test_any_other_path_is_as_it_is(path: bytes) -> None:
    assert canonical(path) == path


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        (b"POST", b"/v1/batches", "POST /v1/batches is not offered here. Batches are offered where the policy"),
        (b"GET", b"/v1/files/file-1", "Files are kept for batches, which the policy of this gateway has to offer"),
        (b"POST", b"/v1/fine_tuning", "is not offered here. This gateway answers /v1/chat/completions, "),
        (b"GET", b"/bogus/", "GET /bogus/ is not offered here. This gateway answers "),
        (b"POST", b"/api/chat", "not Ollama's: use /v1/chat/completions, with"),
        (b"GET", b"/api/tags", "not Ollama's: use /v1/models, with"),
        (b"POST", b"/chat/completions", "Did you mean /v1/chat/completions? The client's base URL has to end in /v1."),
        (b"GET", b"/models/org/name", "Did you mean /v1/models/org/name? The client's base URL has to end"),
        (b"POST", b"/v1/v1/messages", "Did you mean /v1/messages? The client's base URL has /v1 twice."),
        (b"GET", b"/v1/v1/models/m", "Did you mean /v1/models/m? The client's base URL has /v1 twice."),
        (b"GET", b"/metrics", "It is a path of the control port, whose address"),
        (b"GET", b"/", "It is a path of the control port, whose address"),
        (b"GET", b"/v1/responses/resp_1", "is not offered here. No response is stored here, so none can be fetched,"),
        (b"POST", b"/v1/responses/resp_1/cancel", "closing its connection cancels it."),
        (b"POST", b"/v1/responses/input_tokens", "POST /tokenize and POST /v1/messages/count_tokens count a prompt's"),
        (b"POST", b"/v1/responses/compact", "Nothing here makes a conversation shorter"),
        (b"POST", b"/v1/messages/batches", "Batches are OpenAI's, /v1/batches, where"),
        (b"POST", b"/v1/chat/completions/batch", "A call here is one request: POST /v1/chat/completions, or its"),
        (b"POST", b"/v1/completions/derender", "A call here is one request: POST /v1/completions, or its /render;"),
        (b"POST", b"/v1/load_lora_adapter", "Adapters are loaded and unloaded at the engine's own port"),
        (b"POST", b"/v1/unload_lora_adapter", "Adapters are loaded and unloaded at the engine's own port"),
        (b"POST", b"/inference/v1/generate", "Prompts of token ids go to POST /v1/completions, as `prompt`."),
        (b"POST", b"/cohere/v2/chat", "Cohere's chat is not offered"),
        (b"POST", b"/v2/embed", "Of Cohere's API there is /v2/rerank"),
        (b"GET", b"/server_info", "An engine tells its settings on its own port"),
        (b"GET", b"/tokenizer_info", "POST /tokenize counts a prompt's tokens"),
        (b"POST", b"/v1beta/models/m:generateContent", "Gemini's API is not offered"),
        (b"POST", b"/openai/deployments/m/chat/completions", "Azure's paths are not offered: choose OpenAI"),
        (b"GET", b"/version", "An engine tells its version on its own port"),
        (b"GET", b"/load", "GET /fleet of the control port has the load of each engine."),
        (b"POST", b"/v1/audio/speech", "Of audio there are /v1/audio/transcriptions and /v1/audio/translations: "),
        (b"POST", b"/v1/images/generations", "Nothing here makes images; /v1/chat/completions, /v1/responses and"),
        (b"POST", b"/v1/threads/t/runs", "No conversation is stored here: /v1/chat/completions,"),
        (b"GET", b"/v1", "This gateway answers "),
        (b"GET", b"/v1/", "This gateway answers "),
        (b"GET", b"/v1/rerank/x", "This gateway answers "),
    ],
)
def test_what_is_not_there_is_named_with_what_was_probably_meant(method: bytes, path: bytes, says: str) -> None:
    refused = no_route(method, path)
    assert says in refused.message
    error = json.loads(refused.body())["error"]
    assert (refused.status, error["code"], error["message"]) == (404, "route_not_found", refused.message)


def test_every_route_is_named() -> None:
    message = no_route(b"GET", b"/nothing").message
    assert all(f"{path.decode()}," in message or message.endswith(f"{path.decode()}.") for path in ROUTES)


@pytest.mark.parametrize("path", [b"/" + b"x" * 5000, b"/models/" + b"x" * 5000, b"/v1/v1/models/" + b"x" * 5000])
def test_a_long_path_is_cut(path: bytes) -> None:
    assert len(no_route(b"GET", path).message) < 3 * SHOWN + 700


def test_bytes_that_are_no_text_are_answered_as_text() -> None:
    assert json.loads(no_route(b"GET", b"/\xff\x80").body())["error"]["code"] == "route_not_found"


def test_a_method_that_a_route_does_not_take_is_named_with_those_it_does() -> None:
    refused = no_method(b"GET", ROUTES[b"/v1/messages"])
    assert refused.message == "GET /v1/messages is not offered here: it takes POST."
    assert (refused.status, refused.headers) == (405, b"allow: POST\r\n")
    assert no_method(b"PUT", MODEL_ROUTE).headers == b"allow: GET, HEAD\r\n"
