"""`/v1/chat/completions` and `/v1/completions`: from a body to a generation under way."""

from __future__ import annotations

from typing import Any

import msgspec

from loadtest.engine import tokens
from loadtest.engine.api import tools
from loadtest.engine.api.checks import ApiError, Limits, check_model, check_priority, decode, output_room
from loadtest.engine.api.generate import Generation, spawn
from loadtest.engine.api.http import Connection
from loadtest.engine.api.openai_form import OpenAIForm, StreamOptions

COMPLETION_DEFAULT = 16  # tokens, where max_tokens is absent
MAX_N = 128


class ChatBody(msgspec.Struct):
    """The fields that are read; others are ignored, as vLLM ignores them."""

    messages: list[dict[str, Any]]
    model: str | None = None
    stream: bool | None = False
    ignore_eos: bool = False
    min_tokens: int = 0
    priority: int = 0
    cache_salt: str | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None


class CompletionBody(msgspec.Struct):
    """Fields of `/v1/completions` that are read; several prompts are several choices."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    stream: bool | None = False
    ignore_eos: bool = False
    min_tokens: int = 0
    priority: int = 0
    cache_salt: str | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = COMPLETION_DEFAULT
    n: int | None = 1


CHAT = msgspec.json.Decoder(ChatBody)
COMPLETION = msgspec.json.Decoder(CompletionBody)


def chat(connection: Connection, body: bytes, request_id: str, limits: Limits) -> Generation:
    """A chat completion under way. Raises ApiError."""
    asked = decode(CHAT, body)
    model = check_model(limits, asked.model)
    if not asked.messages:
        raise ApiError(400, "messages must not be empty.", param="messages")
    _check(asked, limits)
    call, said = tools.called(asked.tools, asked.tool_choice, asked.response_format)
    data = tokens.chat(asked.messages, tools=asked.tools)
    prompt = tokens.count(data)
    own = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    param = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    most = output_room(limits, prompt, own, param)
    named = isinstance(asked.tool_choice, dict)
    form = OpenAIForm(f"chatcmpl-{request_id}", model, chat=True, options=asked.stream_options, call=call, named=named)
    generation = Generation(connection, form, stream=asked.stream is True, prompt=prompt, limits=limits)
    return spawn(generation, data, asked, most=most, copies=asked.n or 1, said=said)


def completion(connection: Connection, body: bytes, request_id: str, limits: Limits) -> Generation:
    """A text completion under way. Raises ApiError."""
    asked = decode(COMPLETION, body)
    model = check_model(limits, asked.model)
    _check(asked, limits)
    prompts = prompts_of(asked.prompt)
    if not prompts or not all(prompts):
        raise ApiError(400, "The decoder prompt cannot be empty.", param="prompt")
    form = OpenAIForm(f"cmpl-{request_id}", model, chat=False, options=asked.stream_options)
    prompt = sum(map(tokens.count, prompts))
    generation = Generation(connection, form, stream=asked.stream is True, prompt=prompt, limits=limits)
    wanted = COMPLETION_DEFAULT if asked.max_tokens is None else asked.max_tokens  # unlike chat's, null means 16 too
    for data in prompts:
        most = output_room(limits, tokens.count(data), wanted, "max_tokens")
        spawn(generation, data, asked, most=most, copies=asked.n or 1)
    return generation


def prompts_of(value: str | list[str | int | list[int]]) -> list[bytes]:
    """Prompts rendered from a text, several texts, or lists of token ids."""
    if isinstance(value, str):
        return [tokens.units(value)]
    if value and isinstance(value[0], int):
        return [tokens.ids([token for token in value if isinstance(token, int)])]
    return [tokens.units(one) if isinstance(one, str) else tokens.ids(one) for one in value if not isinstance(one, int)]


def _check(asked: ChatBody | CompletionBody, limits: Limits) -> None:
    if asked.n is not None and not 1 <= asked.n <= MAX_N:
        raise ApiError(400, f"n must be from 1 to {MAX_N}, got {asked.n}.", param="n")
    check_priority(limits, asked.priority)
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
