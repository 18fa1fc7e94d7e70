"""Answers of `/v1/chat/completions` and `/v1/completions`, in vLLM's order and shape.

A chat stream: for each choice a chunk with the role at the first token, one chunk per token, the last of them with the
finish reason, a usage chunk with `choices: []` where it was asked for, `[DONE]`. Everything that does not change
between two tokens is encoded once per choice.
"""

from __future__ import annotations

import math
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
    """Chat and text completions: they differ in how a choice holds its text. `call` is the name of a tool called.

    `logprobs`: how many likely tokens are told beside each one, None: nothing is told of any.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        chat: bool,
        options: StreamOptions | None,
        call: str | None,
        named: bool,
        logprobs: int | None,
    ) -> None:
        self.id = request_id
        self.model = model
        self.created = int(time.time())
        self.chat = chat
        self.usage = options is not None and options.include_usage is True
        self.continuous = self.usage and options is not None and options.continuous_usage_stats is True
        self.call = call
        self.named = named
        self.logprobs = logprobs
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
        if self.call is None and word in tokens.PLAIN and not self.continuous and self.logprobs is None:
            frame = self._frames.get(choice.index)
            if frame is None:
                before, _, after = self._event(choice, self._said(PLACE), b"null").rpartition(PLACE)
                frame = self._frames[choice.index] = (before, after)
            return frame[0] + word + frame[1]
        return self._event(choice, self._said(word), b"null", [word])

    def last(self, choice: Choice, word: bytes) -> bytes:
        return self._event(choice, self._said(word), encode(self.reason(choice)), [word])

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
        words = [text[at : at + tokens.BYTES].encode() for at in range(0, len(text), tokens.BYTES)]
        end = {"logprobs": self._told(words), "finish_reason": self.reason(choice), "stop_reason": None}
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

    def _told(self, words: list[bytes]) -> dict[str, Any] | None:
        """The log probabilities of words, None: not asked for. Made up: each is as likely as any other word."""
        most = self.logprobs
        if most is None:
            return None
        even = -math.log(len(tokens.WORDS))
        texts = [word.decode() for word in words if word]
        if self.chat:
            others = [_token(word.decode(), even) for word in tokens.WORDS[:most]]
            return {"content": [_token(text, even) | {"top_logprobs": others} for text in texts]}
        return {
            "text_offset": [tokens.BYTES * place for place in range(len(texts))],
            "token_logprobs": [even] * len(texts),
            "tokens": texts,
            "top_logprobs": [{word.decode(): even for word in tokens.WORDS[:most]} for _ in texts],
        }

    def _event(self, choice: Choice, said: bytes, reason: bytes, words: list[bytes] | None = None) -> bytes:
        field = b"delta" if self.chat else b"text"
        probable = b"null" if words is None or self.logprobs is None else encode(self._told(words))
        data = b'%b,"choices":[{"index":%d,"%b":%b,"logprobs":%b,"finish_reason":%b}]' % (
            *(self._start, choice.index, field, said, probable, reason),
        )
        if self.continuous and isinstance(choice.answer, Generation):
            data += b',"usage":' + encode(so_far(choice, choice.answer))
        return chunk(data + b"}\n\n")


def _token(text: str, probability: float) -> dict[str, Any]:
    return {"token": text, "logprob": probability, "bytes": list(text.encode())}
