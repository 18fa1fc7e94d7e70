"""Answers of `/v1/chat/completions` and `/v1/completions`, in vLLM's order and shape.

A chat stream: for each choice a chunk with the role at the first token, one chunk per token, the last of them with the
finish reason, a usage chunk with `choices: []` where it was asked for, `[DONE]`. Everything that does not change
between two tokens is encoded once per choice.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from loadtest.engine import tokens
from loadtest.engine.api import tools
from loadtest.engine.api.checks import ApiError, encode
from loadtest.engine.api.generate import Choice, Generation
from loadtest.engine.api.http import chunk

DONE = chunk(b"data: [DONE]\n\n")
PLACE = b" @@@"  # where a word goes: as long as one


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def so_far(choice: Choice, generation: Generation) -> dict[str, Any]:
    """Usage of the one choice, which vLLM tells in every event if asked to."""
    prompt, completion = generation.prompt, choice.sent
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


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
        self,
        request_id: str,
        model: str,
        *,
        chat: bool,
        options: StreamOptions | None,
        call: str | None = None,
        named: bool = False,
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
            events.append(self._event(choice, encode(delta), b"null"))
            if self.call is not None:
                function = {"name": self.call, "arguments": ""}
                call = {"id": tools.call_id(self.id, choice.index), "type": "function", "index": 0}
                delta = {"tool_calls": [call | {"function": function}]}
                events.append(self._event(choice, encode(delta), b"null"))
        return b"".join(events)

    def delta(self, choice: Choice, word: bytes) -> bytes:
        if self.call is None and word in tokens.PLAIN and not self.continuous:
            frame = self._frames.get(choice.index)
            if frame is None:
                before, _, after = self._event(choice, self._said(PLACE), b"null").rpartition(PLACE)
                frame = self._frames[choice.index] = (before, after)
            return frame[0] + word + frame[1]
        return self._event(choice, self._said(word), b"null")

    def last(self, choice: Choice, word: bytes) -> bytes:
        return self._event(choice, self._said(word), encode(self.reason(choice)))

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

    def _event(self, choice: Choice, said: bytes, reason: bytes) -> bytes:
        field = b"delta" if self.chat else b"text"
        data = b'%b,"choices":[{"index":%d,"%b":%b,"logprobs":null,"finish_reason":%b}]' % (
            *(self._start, choice.index, field, said, reason),
        )
        if self.continuous:
            data += b',"usage":' + encode(so_far(choice, choice.answer))
        return chunk(data + b"}\n\n")
