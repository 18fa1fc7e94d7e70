"""`/v1/messages`: Anthropic's shape over the same generation, as vLLM translates it.

A stream: message_start, content_block_start, one content_block_delta per token, content_block_stop, message_delta with
the stop reason and usage, message_stop. Errors are Anthropic's objects; there is no `[DONE]`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadtest.engine import tokens
from loadtest.engine.api import tools
from loadtest.engine.api.checks import ApiError, Limits, check_model, check_priority, decode, encode, output_room
from loadtest.engine.api.generate import Choice, Generation, spawn
from loadtest.engine.api.http import Connection, chunk

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}


class CountBody(msgspec.Struct):
    """Fields of `/v1/messages/count_tokens`."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: Any = None
    tools: list[dict[str, Any]] | None = None


class MessageBody(msgspec.Struct):
    """The fields that are read."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str | None = None
    stream: bool | None = False
    ignore_eos: bool = False
    min_tokens: int = 0
    priority: int = 0
    cache_salt: str | None = None
    system: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


DECODER = msgspec.json.Decoder(MessageBody)
COUNT = msgspec.json.Decoder(CountBody)


def error_body(error: ApiError) -> bytes:
    """Anthropic's error object."""
    return encode({"type": "error", "error": {"type": error.type, "message": error.message}})


def event(kind: str, data: bytes) -> bytes:
    """Named SSE event in a chunk of its own."""
    return chunk(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))


class MessageForm:
    """Form of one text block, or of one tool_use block where a tool is called."""

    def __init__(self, request_id: str, model: str, call: str | None) -> None:
        self.id = request_id
        self.model = model
        self.call = call

    def opening(self, generation: Generation) -> bytes:
        message = self._message(generation, [], None, 0)
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self.call is not None:
            block = {"type": "tool_use", "id": tools.call_id(self.id, 0), "name": self.call, "input": {}}
        begun = {"type": "content_block_start", "index": 0, "content_block": block}
        return event("message_start", encode({"type": "message_start", "message": message})) + event(
            "content_block_start", encode(begun)
        )

    def delta(self, choice: Choice, word: bytes) -> bytes:
        text = word.decode()
        delta = {"type": "text_delta", "text": text}
        if self.call is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return event("content_block_delta", encode({"type": "content_block_delta", "index": 0, "delta": delta}))

    def last(self, choice: Choice, word: bytes) -> bytes:
        return self.delta(choice, word) if word else b""

    def closing(self, generation: Generation) -> bytes:
        ended = {
            "type": "message_delta",
            "delta": {"stop_reason": self._reason(generation), "stop_sequence": None},
            "usage": self._usage(generation, generation.completion),
        }
        return (
            event("content_block_stop", encode({"type": "content_block_stop", "index": 0}))
            + event("message_delta", encode(ended))
            + event("message_stop", b'{"type":"message_stop"}')
        )

    def failure(self, error: ApiError) -> bytes:
        return event("error", error_body(error))

    def whole(self, generation: Generation) -> bytes:
        text = generation.text(generation.choices[0])
        block: dict[str, Any] = {"type": "text", "text": text}
        if self.call is not None:
            try:
                arguments = msgspec.json.decode(text)
            except msgspec.DecodeError:  # cut short by max_tokens
                arguments = {}
            block = {"type": "tool_use", "id": tools.call_id(self.id, 0), "name": self.call, "input": arguments}
        return encode(self._message(generation, [block], self._reason(generation), generation.completion))

    def _reason(self, generation: Generation) -> str:
        reason = generation.choices[0].reason
        return "tool_use" if self.call is not None and reason == "stop" else STOP_REASONS[reason]

    def _usage(self, generation: Generation, written: int) -> dict[str, int]:
        cached = generation.cached
        if cached is None:
            return {"input_tokens": generation.prompt, "output_tokens": written}
        read = generation.prompt - cached
        return {"input_tokens": read, "output_tokens": written, "cache_read_input_tokens": cached}

    def _message(
        self, generation: Generation, blocks: list[dict[str, Any]], reason: str | None, written: int
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self.model,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": self._usage(generation, written),
        }


def message(connection: Connection, body: bytes, request_id: str, limits: Limits) -> Generation:
    """A message under way. Raises ApiError."""
    asked = decode(DECODER, body)
    model = check_model(limits, asked.model)
    if not asked.messages:
        raise ApiError(400, "messages must not be empty.", param="messages")
    check_priority(limits, asked.priority)
    choice: Any = asked.tool_choice
    if choice is not None and choice.get("type") != "tool":
        choice = choice.get("type")
    call, said = tools.called(asked.tools, choice, (asked.output_config or {}).get("format"))
    data = tokens.chat(asked.messages, tools=asked.tools, system=asked.system)
    prompt = tokens.count(data)
    most = output_room(limits, prompt, asked.max_tokens, "max_tokens")
    form = MessageForm(f"chatcmpl-{request_id}", model, call)
    generation = Generation(connection, form, stream=asked.stream is True, prompt=prompt, limits=limits)
    return spawn(generation, data, asked, most=most, said=said)


def count_tokens(body: bytes, limits: Limits) -> bytes:
    """`/v1/messages/count_tokens`: the prompt's tokens, nothing of it read into the cache. Raises ApiError."""
    asked = decode(COUNT, body)
    check_model(limits, asked.model)
    count = tokens.count(tokens.chat(asked.messages, tools=asked.tools, system=asked.system))
    return encode({"input_tokens": count, "context_management": {"original_input_tokens": count}})
