"""Allowed fields of each route: others are refused where an engine could read them as a prompt, or fetch from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.request import allowed_fields
from gateway.core.request.allowed_fields import PROMPTS, READS, check_unread
from gateway.core.request.call import Call, CallSettings
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.parser import parse
from gateway.core.request.prompt import READERS
from gateway.core.request.routes import ROUTES

FETCHED = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "completion": ("/v1/completions", {"prompt": "x"}),
    "response": ("/v1/responses", {"input": "x"}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    "embedding": ("/v1/embeddings", {"input": "x"}),
    "pooling": ("/pooling", {"input": "x"}),
    "classify": ("/classify", {"input": "x"}),
    "rerank": ("/rerank", {"query": "x", "documents": ["y"]}),
    "score": ("/score", {"text_1": "x", "text_2": "y"}),
    "tokenize": ("/tokenize", {"prompt": "x"}),
}


def test_texts_that_speak_of_media_or_are_not_ascii_cost_no_second_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded_again(_: bytes) -> None:
        raise AssertionError("the whole body is decoded once more")

    monkeypatch.setattr(allowed_fields, "_fields", decoded_again)
    text = 'base_url = "image_url"; input_audio(x) \x1b[0m naïve 你好'
    check_unread(json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode())
    check_unread(json.dumps({"model": "m", "prompt": text}, ensure_ascii=False).encode())
    with pytest.raises(AssertionError):
        check_unread(b'{"x": {"image_url": 1}}')


def test_of_a_long_body_only_fields_that_name_media_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = []
    monkeypatch.setattr(allowed_fields, "_walk", lambda value, name: walked.append(name))
    body = {"messages": ["x" * 70_000, {"image_url": 1}], "numbers": [1, 2], "text_of": "x", "other": [{"file_url": 1}]}
    check_unread(json.dumps(body).encode())
    assert walked == ["other"]


def parsed(kind: str, more: dict[str, Any], media: Any = "data_urls_only", text: str | None = None) -> Call:
    path, body = BODIES[kind]
    data = (text or json.dumps({"model": "m"} | body | more)).encode()
    headers = {b"content-type": b"application/json"}
    settings = CallSettings(media=media)
    return parse(ROUTES[path.encode()], headers, data, settings=settings, request_id="r", tenant="t", now=0.0)


def refused(kind: str, more: dict[str, Any], media: Any = "data_urls_only") -> Refused:
    with pytest.raises(Refused) as caught:
        parsed(kind, more, media)
    assert caught.value.outcome is Outcome.BAD_REQUEST
    return caught.value


@pytest.mark.parametrize("media", ["data_urls_only", "none"])
@pytest.mark.parametrize("kind", READS)
def test_media_under_any_name_of_a_prompt_is_refused(kind: str, media: str) -> None:
    for name in sorted(PROMPTS):
        assert refused(kind, {name: FETCHED}, media).param is not None, name


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("name", ["messages", "inputs", "of_a_later_version"])
@pytest.mark.parametrize(
    "key", ["image_url", "input_audio", "video_embeds", "image\\u005furl", "input_audi\\u006F", "\\u0066ile_url"]
)
def test_media_in_fields_that_nobody_reads_are_refused(kind: str, name: str, key: str) -> None:
    _, body = BODIES[kind]
    if name in READS[kind] and name in body:
        name = "other"
    text = json.dumps({"model": "m"} | body)[:-1] + f', "{name}": [{{"role": "user", "content": [{{"{key}": "x"}}]}}]}}'
    with pytest.raises(Refused):
        parsed(kind, {}, text=text)
    with pytest.raises(Refused):
        parsed(kind, {}, text=text[:-1] + f', "metadata": {{"x": "{"x" * 70_000}"}}}}')
    if name not in PROMPTS:
        assert parsed(kind, {}, "any", text).body == text.encode()


def test_words_of_media_are_no_media() -> None:
    tool = {"type": "function", "function": {"name": "see", "parameters": {"properties": {"image_url": {}}}}}
    more = {"tools": [tool], "metadata": {"image_url": "x"}, "plain": "image_url", "empty": [{"image_url": None}, 5]}
    assert parsed("chat", more, "none").media == 0


@pytest.mark.parametrize("kind", ["embedding", "pooling", "classify", "tokenize"])
def test_two_prompts_are_one_too_many(kind: str) -> None:
    message = refused(kind, {"messages": [{"role": "user", "content": "x"}]}).message
    assert message.startswith("exactly one of ")
    assert parsed(kind, {"messages": None}).messages == 1


@pytest.mark.parametrize("kind", READS)
def test_a_prompt_of_another_route_is_refused_unless_null(kind: str) -> None:
    for name in sorted(PROMPTS.difference(READS[kind])):
        assert refused(kind, {name: "x"}).param == name
        parsed(kind, {name: None})


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("chat", {"documents": [{"text": "0123456789"}]}),
        ("chat", {"chat_template": "0123456789"}),
        ("chat", {"chat_template_kwargs": {"x": "0123456789"}}),
        ("chat", {"messages": [{"role": "user", "content": "x", "reasoning": "0123456789"}]}),
        ("chat", {"messages": [{"role": "user", "content": "x", "reasoning_content": "0123456789"}]}),
        ("chat", {"messages": [{"role": "user", "content": "x", "tools": [{"x": "0123456789"}]}]}),
        ("tokenize", {"prompt": None, "messages": [{"role": "u", "content": "x"}], "tools": ["01234567"]}),
        ("response", {"previous_input_messages": [{"role": "user", "content": "0123456789"}]}),
        ("rerank", {"instruction": "0123456789"}),
        ("score", {"instruction": "0123456789"}),
    ],
)
def test_what_a_template_prints_is_counted(kind: str, more: dict[str, Any]) -> None:
    assert parsed(kind, more).ascii_bytes >= parsed(kind, {}).ascii_bytes + 8


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url", "image_url": None, "uuid": "logo"}, "uuid"),
        ({"uuid": "logo", "input_audio": None}, "uuid"),
        ({"type": "prompt_embeds", "data": "AAAA"}, "prompt_embeds"),
        ({"prompt_embeds": "", "data": "AAAA"}, "prompt_embeds"),
    ],
)
def test_what_is_not_in_the_body_cannot_be_asked_for(part: dict[str, Any], says: str) -> None:
    for media in ("data_urls_only", "any"):
        assert says in refused("chat", {"messages": [{"role": "user", "content": [part]}]}, media).message


def test_a_uuid_beside_text_is_text() -> None:
    documents = [{"uuid": "7", "text": "y"}, {"uuid": None, "image_url": "data:,"}]
    assert parsed("rerank", {"documents": documents}).media == 1


def test_bodies_of_each_kind_of_route_are_read() -> None:
    kinds = {route.kind for route in ROUTES.values() if not (route.form or route.here)}
    assert kinds == READS.keys() == READERS.keys()
