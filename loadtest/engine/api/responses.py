"""`/v1/responses`: OpenAI's newer shape over the same generation, as vLLM writes it.

A stream: response.created and in_progress before the prompt is read; at the first token output_item.added and
content_part.added; one output_text.delta per token; then the `done` of each, and response.completed with the whole
response and its usage. Events are numbered; no `[DONE]`. A tool call is one function_call item.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from loadtest.engine import tokens
from loadtest.engine.api import tools
from loadtest.engine.api.anthropic import event
from loadtest.engine.api.checks import ApiError, Limits, check_model, check_priority, decode, encode, output_room
from loadtest.engine.api.generate import Choice, Generation, spawn
from loadtest.engine.api.http import Connection


class ResponseBody(msgspec.Struct):
    """The fields that are read."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    stream: bool | None = False
    ignore_eos: bool = False
    min_tokens: int = 0
    priority: int = 0
    cache_salt: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    background: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None


DECODER = msgspec.json.Decoder(ResponseBody)


class ResponseForm:
    """Form of a message item, or of a function_call item. `number` counts the events."""

    def __init__(self, request_id: str, model: str, asked: ResponseBody, most: int, call: str | None) -> None:
        self.id = f"resp_{request_id}"
        self.item = f"{'msg' if call is None else 'fc'}_{request_id}"
        self.model = model
        self.created = int(time.time())
        self.asked = asked
        self.most = most
        self.call = call
        self.number = 0

    def prelude(self, generation: Generation) -> bytes:
        """Events that vLLM sends before it reads the prompt."""
        response = {"response": self._response(generation, "in_progress", [])}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def opening(self, generation: Generation) -> bytes:
        item = {"output_index": 0, "item": self._item("", "in_progress")}
        added = self._event("response.output_item.added", item)
        if self.call is not None:
            return added
        return added + self._event("response.content_part.added", self._place() | {"part": self._part("")})

    def delta(self, choice: Choice, word: bytes) -> bytes:
        if self.call is not None:
            place = {"item_id": self.item, "output_index": 0}
            return self._event("response.function_call_arguments.delta", place | {"delta": word.decode()})
        return self._event("response.output_text.delta", self._place() | {"delta": word.decode(), "logprobs": []})

    def last(self, choice: Choice, word: bytes) -> bytes:
        return self.delta(choice, word) if word else b""

    def closing(self, generation: Generation) -> bytes:
        text = generation.text(generation.choices[0])
        item = self._item(text, "completed")
        if self.call is None:
            events = [
                self._event("response.output_text.done", self._place() | {"text": text, "logprobs": []}),
                self._event("response.content_part.done", self._place() | {"part": self._part(text)}),
            ]
        else:
            done = {"item_id": self.item, "output_index": 0, "name": self.call, "arguments": text}
            events = [self._event("response.function_call_arguments.done", done)]
        events.append(self._event("response.output_item.done", {"output_index": 0, "item": item}))
        status = self._status(generation)
        # Also where the length ended it: vLLM knows no response.incomplete.
        events.append(self._event("response.completed", {"response": self._response(generation, status, [item])}))
        return b"".join(events)

    def failure(self, error: ApiError) -> bytes:
        return event("error", encode({"type": "error", "message": error.message, "code": str(error.status)}))

    def whole(self, generation: Generation) -> bytes:
        item = self._item(generation.text(generation.choices[0]), "completed")
        return encode(self._response(generation, self._status(generation), [item]))

    def _status(self, generation: Generation) -> str:
        return "incomplete" if generation.choices[0].reason == "length" else "completed"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item, "output_index": 0, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        if self.call is not None:
            call = {"call_id": tools.call_id(self.id, 0), "name": self.call, "arguments": text}
            return {"id": self.item, "type": "function_call", "status": status} | call
        content = [] if status == "in_progress" else [self._part(text)]
        return {"id": self.item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = encode({"type": kind, "sequence_number": self.number} | fields)
        self.number += 1
        return event(kind, data)

    def _response(self, generation: Generation, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": output,
            "instructions": self.asked.instructions,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "max_output_tokens": self.most,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "tool_choice": self.asked.tool_choice or "auto",
            "tools": self.asked.tools or [],
            "background": False,
            "service_tier": "auto",
            "truncation": "disabled",
            "error": None,
            "metadata": None,
            "usage": None if status == "in_progress" else _usage(generation),
        }


def _usage(generation: Generation) -> dict[str, Any]:
    return {
        "input_tokens": generation.prompt,
        "input_tokens_details": {"cached_tokens": generation.cached or 0},
        "output_tokens": generation.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": generation.prompt + generation.completion,
    }


def response(connection: Connection, body: bytes, request_id: str, limits: Limits) -> Generation:
    """A response under way. Raises ApiError."""
    asked = decode(DECODER, body)
    model = check_model(limits, asked.model)
    if asked.background:
        raise ApiError(400, "background mode needs a store, which this engine has not.", param="background")
    check_priority(limits, asked.priority)
    call, said = tools.called(asked.tools, asked.tool_choice, (asked.text or {}).get("format"))
    messages = asked.input
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    data = tokens.chat(messages, tools=asked.tools, system=asked.instructions)
    prompt = tokens.count(data)
    most = output_room(limits, prompt, asked.max_output_tokens, "max_output_tokens")
    form = ResponseForm(request_id, model, asked, most, call)
    generation = Generation(connection, form, stream=asked.stream is True, prompt=prompt, limits=limits)
    generation.prelude = form.prelude(generation) if generation.stream else b""
    return spawn(generation, data, asked, most=most, said=said)
