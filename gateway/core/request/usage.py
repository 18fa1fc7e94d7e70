"""A sans-IO reader of engines' streams: bytes in, bytes to relay out, and the real token usage on the side.

Only an event that holds `"usage"` or `"error"` is parsed: in JSON text a quote is escaped, so what a model writes can
never contain those bytes, only a key or a whole string value. Of a parsed event only the members of its outermost
objects count. Nothing of the content is kept but one incomplete event. Bytes are relayed as they came; the one thing
taken out is the usage event that we asked for and the client did not. Answers that are not streamed: `json_usage.py`.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Raw

MAX_EVENT = 1 << 20  # bytes

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class UsageError(ValueError):
    """The engine's stream cannot be read: no end of an event within MAX_EVENT bytes."""


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Tokens | None = None


class Usage(msgspec.Struct, gc=False):
    """A usage object under the names of chat and completions, of responses, or of messages."""

    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    total_tokens: _Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Tokens | None = None
    cache_creation_input_tokens: _Tokens | None = None

    def read(self) -> tuple[int | None, int | None, int | None]:
        """Prompt, completion and cached tokens; None: not said."""
        prompt = self.prompt_tokens if self.input_tokens is None else self.input_tokens
        completion = self.completion_tokens if self.output_tokens is None else self.output_tokens
        if prompt is None and self.total_tokens is not None:  # rerank: only a total
            prompt = max(0, self.total_tokens - (completion or 0))
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details is not None else None
        if self.cache_read_input_tokens is not None and prompt is not None:
            # Anthropic's input_tokens leave out what came from the cache or went into it.
            cached = self.cache_read_input_tokens
            prompt += cached + (self.cache_creation_input_tokens or 0)
        return prompt, completion, cached


class _Holder(msgspec.Struct, gc=False):
    usage: Usage | None = None


_NULL = Raw(b"null")


class _Choice(msgspec.Struct, gc=False):
    index: int = 0


class _Event(msgspec.Struct, gc=False):
    """An event's data. `message` is Anthropic's message, or the text of vLLM's older flat error object."""

    type: str | int | None = None
    object: str | None = None
    usage: Usage | None = None
    choices: list[_Choice] | None = None
    error: Raw = _NULL  # an object, or text
    message: _Holder | str | None = None
    response: _Holder | None = None


_decode_event = msgspec.json.Decoder(_Event).decode
_LAST = ("response.completed", "response.incomplete", "response.failed")
_BEGINS = ("message_start", "response.created", "response.in_progress")  # what these tell is of the prompt
MAX_CHOICES = 16384


class SSEUsage:
    """Reads one event stream. `hide`: take out the usage-only event (`choices: []` with usage). `cut`: take the usage
    out of every event that has choices, too.

    `prompt_tokens`, `completion_tokens`, `cached_tokens` are None until the engine has said them. `whole`: what it said
    is of the whole answer; until then it is of the events so far, the completion the sum of what each choice had.
    `done`: [DONE], or the last event of a response, was seen. `error`: an error event was seen.
    """

    __slots__ = (
        "_by_choice", "_held", "_last", "_latest", "cached_tokens", "completion_tokens", "cut", "done", "error", "hide",
        "prompt_tokens", "single", "whole",
    )  # fmt: skip

    def __init__(self, hide: bool, *, cut: bool = False, single: bool = False) -> None:
        self.hide = hide
        self.cut = cut
        self.single = single
        self.whole = False
        self._by_choice: dict[int, int] = {}  # what each choice has so far
        self._latest: re.Match[bytes] | None = None  # a usage that was cut out: read only if no later one comes
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.done = False
        self.error = False
        self._held = bytearray()
        self._last = b""  # what was relayed last

    def feed(self, data: bytes) -> bytes:
        """What to relay of `data` and of what was kept back before: whole events. Raises UsageError."""
        # The usual read, whole events of deltas, must cost next to nothing: rfind is the cheapest search of bytes, and
        # most reads have no D at all.
        if (
            not self._held
            and data.endswith((b"\n\n", b"\r\n\r\n"))
            and data.rfind(b'"usage"') < 0
            and data.rfind(b'"error"') < 0
            and (68 not in data or data.rfind(b"[DONE]") < 0)
        ):
            self._last = data
            return data
        held = self._held
        if self.cut and not held:
            at = data.find(b'"usage"') - 3
            tail = _TAIL.match(data, at) if at > 0 else None
            if tail is not None and data.find(b"\n") == len(data) - 2 and data.startswith(b"data: {"):
                if self.single:
                    self._latest = tail
                else:
                    self._several(data, tail)
                self._last = data
                return data[: at + 2] + b"}\n\n"
        searched = max(0, len(held) - 3)  # an event's end may have been cut in two
        held += data
        lf, crlf = held.rfind(b"\n\n", searched), held.rfind(b"\n\r\n", searched)
        end = max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)
        if len(held) - end > MAX_EVENT:
            raise UsageError(f"no end of an event in {len(held) - end} bytes of the engine's stream")
        if not end:
            return b""
        whole = bytes(memoryview(held)[:end])
        del held[:end]
        return self._relayed(whole)

    def passes(self, chunk: bytes) -> bool:
        """Whether a whole HTTP chunk, framing and all, is events of plain deltas that need no look of ours.

        The framing is a size line and CRLF around the data; it holds none of the bytes searched for.
        """
        return (
            chunk.endswith(b"\n\n\r\n")
            and not self._held
            and chunk.rfind(b'"usage"') < 0
            and chunk.rfind(b'"error"') < 0
            and (68 not in chunk or chunk.rfind(b"[DONE]") < 0)
        )

    def sum_up(self) -> None:
        """The answer is over, or is read no further: read what was put off."""
        latest, self._latest = self._latest, None
        if latest is not None and not self.whole:
            self._so_far(0, int(latest[1]), int(latest[2]))

    def _several(self, data: bytes, tail: re.Match[bytes]) -> None:
        index = _INDEX.search(data)
        self._so_far(0 if index is None else int(index[1]), int(tail[1]), int(tail[2]))

    def _so_far(self, choice: int, prompt: int | None, completion: int | None) -> None:
        """vLLM tells with each choice's event what that choice has; n of them are bounded by the policy's max_n and by
        the prompts of a body."""
        self.prompt_tokens = _larger(self.prompt_tokens, prompt)
        if completion is not None:
            known = self._by_choice
            if choice in known or len(known) < MAX_CHOICES:
                known[choice] = max(known.get(choice, 0), completion)
            self.completion_tokens = sum(known.values())

    def finish(self) -> bytes:
        """The body has ended: what was kept back. A last event whose blank line is missing counts like any other."""
        rest = bytes(self._held)
        self._held.clear()
        return self._relayed(rest)

    def ended(self, kind: str) -> bool:
        """Whether the stream has come to the last event that its route's `kind` promises; an error is one."""
        return self.done or self.error or (kind == "message" and b'"message_stop"' in self._last)

    def _relayed(self, whole: bytes) -> bytes:
        self._last = whole or self._last
        if whole.rfind(b'"usage"') < 0 and whole.rfind(b'"error"') < 0 and whole.rfind(b"[DONE]") < 0:
            return whole
        if b"\r" in whole:
            ends = [0, *(end.end() for end in _EVENT_END.finditer(whole)), len(whole)]
            events = [whole[start:end] for start, end in pairwise(ends)]
        else:  # as vLLM writes them
            *events, rest = whole.split(b"\n\n")
            events = [event + b"\n\n" for event in events]
            events.append(rest)
        # A blank line too many belongs to no event: it stays, as it would had it come in a read of its own.
        return b"".join([self._kept(event) for event in events])

    def _kept(self, event: bytes) -> bytes:
        """Learn from one event. What the client is to see of it, and the blank lines before it in any case."""
        end = len(event) - 2
        if event.startswith(b"data:") and event.find(b"\n") == end and event[-1] == 10 and b"\r" not in event:
            data = event[5:end].strip()  # one line, as vLLM writes them
        else:
            data = b"\n".join([line[5:] for line in event.splitlines() if line.startswith(b"data:")]).strip()
        if data == b"[DONE]":
            self.done = True
            return event
        if data.rfind(b'"usage"') < 0 and data.rfind(b'"error"') < 0:
            return event
        try:
            fields = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return event  # not ours to judge: the client gets what the engine said
        if bytes(fields.error) != b"null" or fields.object == "error" or fields.type in {"error", "response.failed"}:
            self.error = True
        usage = fields.usage
        for holder in (fields.message, fields.response):
            if isinstance(holder, _Holder) and holder.usage is not None:
                usage = holder.usage
        if fields.type in _LAST:
            self.done = True
        if usage is None:
            return event
        prompt, completion, cached = usage.read()
        if fields.choices:
            self._so_far(fields.choices[0].index, prompt, completion)
            return _without_usage(event, data) if self.cut else event
        self.whole = fields.type not in _BEGINS
        # Anthropic's last event may repeat the prompt as 0; numbers only grow within an answer.
        self.prompt_tokens = _larger(self.prompt_tokens, prompt)
        self.completion_tokens = _larger(self.completion_tokens, completion)
        self.cached_tokens = _larger(self.cached_tokens, cached)
        return event[: len(event) - len(event.lstrip(b"\r\n"))] if self.hide and fields.choices == [] else event


# The end of an event with a choice, as vLLM writes it; the whole of it is checked where this has matched.
_TAIL = re.compile(
    rb'\}\],"usage":\{"prompt_tokens":(\d{1,12}),"total_tokens":\d{1,12},"completion_tokens":(\d{1,12})'
    rb'(?:,"completion_tokens_details":null)?\}\}\n\n\Z'
)
_INDEX = re.compile(rb'"choices":\[\{"index":(\d{1,6}),')


def _without_usage(event: bytes, data: bytes) -> bytes:
    """An event that is not as vLLM writes it, or whose usage is not its last field."""
    fields = _decode_fields(data)
    fields.pop("usage", None)
    begins = event.find(b"data:")
    return b"%bdata: %b%b" % (event[:begins], msgspec.json.encode(fields), event[len(event.rstrip(b"\r\n")) :])


_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_EVENT_END = re.compile(rb"\n\r?\n")


def _larger(known: int | None, said: int | None) -> int | None:
    if known is None or said is None:
        return said if known is None else known
    return max(known, said)
