"""`/v1/chat/completions` and `/v1/completions`: bodies in, events and answers out, in vLLM's order and shape.

A chat stream: for each choice a chunk with the role at the first token, one chunk per token, the last of them with the
finish reason, a usage chunk with `choices: []` where it was asked for, `[DONE]`. Everything that does not change
between two tokens is encoded once per choice.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from loadtest.engine import tokens, tools
from loadtest.engine.faults import Plan
from loadtest.engine.generate import (
    ApiError,
    Choice,
    Generation,
    Limits,
    StreamOptions,
    check_model,
    decode,
    encode,
    output_room,
    spawn,
)
from loadtest.engine.http import Connection, chunk

DONE = chunk(b"data: [DONE]\n\n")
PLACE = b" @@@"  # where a word goes: as long as one
COMPLETION_DEFAULT = 16  # tokens, where max_tokens is absent
MAX_N = 128


class ChatBody(msgspec.Struct):
    """The fields that are read; others are ignored, as vLLM ignores them."""

    messages: list[dict[str, Any]]
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None


class CompletionBody(msgspec.Struct):
    """The same for `/v1/completions`; several prompts are several choices."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = COMPLETION_DEFAULT
    min_tokens: int = 0
    n: int | None = 1
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str | None = None


CHAT = msgspec.json.Decoder(ChatBody)
COMPLETION = msgspec.json.Decoder(CompletionBody)


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's usage object, in tokens."""
    prompt, completion, cached = generation.prompt, generation.completion, generation.cached
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


class OpenAIForm:
    """Chat and text completions: they differ in how a choice holds its text. `call` is the name of a tool called."""

    def __init__(
        self, request_id: str, model: str, *, chat: bool, options: StreamOptions | None, call: str | None, named: bool
    ) -> None:
        self.id = request_id
        self.model = model
        self.created = int(time.time())
        self.chat = chat
        self.usage = options is not None and options.include_usage is True
        self.continuous = self.usage and options is not None and options.continuous_usage_stats is True
        self.call = call
        self.named = named
        kind = "chat.completion.chunk" if chat else "text_completion"
        start = {"id": request_id, "object": kind, "created": self.created, "model": model}
        self._start = b"data: " + encode(start)[:-1]
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, generation: Generation) -> bytes:
        if not self.chat:
            return b""
        events = []
        for choice in generation.choices:
            delta: dict[str, Any] = {"role": "assistant", "content": ""}
            events.append(self._event(choice.index, encode(delta), b"null", generation if self.continuous else None))
            if self.call is not None:
                function = {"name": self.call, "arguments": ""}
                call = {"id": tools.call_id(self.id, choice.index), "type": "function", "index": 0}
                delta = {"tool_calls": [call | {"function": function}]}
                events.append(self._event(choice.index, encode(delta), b"null", None))
        return b"".join(events)

    def delta(self, choice: Choice, word: bytes) -> bytes:
        if self.call is None and len(word) == tokens.BYTES and not self.continuous:
            frame = self._frames.get(choice.index)
            if frame is None:
                before, _, after = self._event(choice.index, self._said(PLACE), b"null", None).rpartition(PLACE)
                frame = self._frames[choice.index] = (before, after)
            return frame[0] + word + frame[1]
        generation = choice.answer
        told = generation if self.continuous and isinstance(generation, Generation) else None
        return self._event(choice.index, self._said(word), b"null", told)

    def last(self, choice: Choice, word: bytes) -> bytes:
        return self._event(choice.index, self._said(word), encode(self.reason(choice)), None)

    def closing(self, generation: Generation) -> bytes:
        if not self.usage:
            return DONE
        return chunk(self._start + b',"choices":[],"usage":%b}\n\n' % encode(usage(generation))) + DONE

    def failure(self, error: ApiError) -> bytes:
        return chunk(b"data: %b\n\n" % error.body()) + DONE

    def whole(self, generation: Generation) -> bytes:
        choices = [self._choice(generation, choice) for choice in generation.choices]
        return encode(
            {
                "id": self.id,
                "object": "chat.completion" if self.chat else "text_completion",
                "created": self.created,
                "model": self.model,
                "choices": choices,
                "usage": usage(generation),
            }
        )

    def reason(self, choice: Choice) -> str:
        """`tool_calls` for a call the model chose by itself, `stop` for one that was named: vLLM's rule."""
        calls = self.call is not None and not self.named and choice.reason == "stop"
        return "tool_calls" if calls else choice.reason

    def _choice(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        text = generation.text(choice)
        end = {"logprobs": None, "finish_reason": self.reason(choice), "stop_reason": None}
        if not self.chat:
            return {"index": choice.index, "text": text, **end}
        message: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": []}
        if self.call is not None:
            function = {"name": self.call, "arguments": text}
            call = {"id": tools.call_id(self.id, choice.index), "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
        return {"index": choice.index, "message": message, **end}

    def _said(self, word: bytes) -> bytes:
        """The part of a chunk that holds new text."""
        text = word.decode()
        if not self.chat:
            return encode(text)
        if self.call is not None:
            return encode({"tool_calls": [{"index": 0, "function": {"arguments": text}}]})
        return encode({"content": text})

    def _event(self, index: int, said: bytes, reason: bytes, told: Generation | None) -> bytes:
        field = b"delta" if self.chat else b"text"
        data = b'%b,"choices":[{"index":%d,"%b":%b,"logprobs":null,"finish_reason":%b}]' % (
            *(self._start, index, field, said, reason),
        )
        if told is not None:
            data += b',"usage":' + encode(usage(told))
        return chunk(data + b"}\n\n")


def chat(connection: Connection, body: bytes, request_id: str, limits: Limits, plan: Plan | None) -> Generation:
    """A chat completion under way. Raises ApiError."""
    asked = decode(CHAT, body)
    model = check_model(limits, asked.model)
    if not asked.messages:
        raise ApiError(400, "messages must not be empty.", param="messages")
    _check(asked, limits)
    call, said = tools.called(asked.tools, asked.tool_choice)
    data = tokens.chat(asked.messages, tools=asked.tools)
    prompt = tokens.count(data)
    own = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    param = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    most = output_room(limits, prompt, own, param)
    named = isinstance(asked.tool_choice, dict)
    form = OpenAIForm(f"chatcmpl-{request_id}", model, chat=True, options=asked.stream_options, call=call, named=named)
    generation = Generation(connection, form, stream=asked.stream is True, prompt=prompt, limits=limits, plan=plan)
    spawn(
        generation,
        data,
        salt=(model, asked.cache_salt),
        most=most,
        copies=asked.n or 1,
        least=asked.min_tokens,
        ignore_end=asked.ignore_eos,
        priority=asked.priority,
        said=said,
    )
    return generation


def completion(connection: Connection, body: bytes, request_id: str, limits: Limits, plan: Plan | None) -> Generation:
    """A text completion under way. Raises ApiError."""
    asked = decode(COMPLETION, body)
    model = check_model(limits, asked.model)
    _check(asked, limits)
    prompts = prompts_of(asked.prompt)
    if not prompts or not all(prompts):
        raise ApiError(400, "The decoder prompt cannot be empty.", param="prompt")
    form = OpenAIForm(f"cmpl-{request_id}", model, chat=False, options=asked.stream_options, call=None, named=False)
    prompt = sum(map(tokens.count, prompts))
    generation = Generation(connection, form, stream=asked.stream is True, prompt=prompt, limits=limits, plan=plan)
    for data in prompts:
        # Null means 16 here too: vLLM's default for completions, unlike chat's.
        most = output_room(
            limits,
            tokens.count(data),
            COMPLETION_DEFAULT if asked.max_tokens is None else asked.max_tokens,
            "max_tokens",
        )
        spawn(
            generation,
            data,
            salt=(model, asked.cache_salt),
            most=most,
            copies=asked.n or 1,
            least=asked.min_tokens,
            ignore_end=asked.ignore_eos,
            priority=asked.priority,
        )
    return generation


def prompts_of(value: str | list[str | int | list[int]]) -> list[bytes]:
    """One or several texts, or lists of token ids, rendered."""
    if isinstance(value, str):
        return [tokens.units(value)]
    if value and isinstance(value[0], int):
        return [tokens.ids([token for token in value if isinstance(token, int)])]
    return [tokens.units(one) if isinstance(one, str) else tokens.ids(one) for one in value if not isinstance(one, int)]


def _check(asked: ChatBody | CompletionBody, limits: Limits) -> None:
    if asked.n is not None and not 1 <= asked.n <= MAX_N:
        raise ApiError(400, f"n must be from 1 to {MAX_N}, got {asked.n}.", param="n")
    if asked.priority and not limits.priorities:
        raise ApiError(400, f"Got priority {asked.priority} but Priority scheduling is not enabled.")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
