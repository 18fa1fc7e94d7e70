"""Token usage of SSE streams (server-sent events), read sans-IO: bytes in, bytes to relay out.

Only events that hold `"usage"` or `"error"` are parsed. JSON escapes quotes, so text that a model writes never contains
those bytes: they are always a key or a whole string value. In a parsed event only members of its outermost objects
count. No content is kept but one incomplete event.

Bytes are relayed as they came, with one exception: usage that the gateway asked for and the client did not is removed.
Answers that are not streamed: `json_usage.py`.
"""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
from msgspec import Raw

from gateway.core.answer.engine_error import is_refusal
from gateway.core.answer.usage import Usage
from gateway.shared.vllm.answers import error_of

MAX_EVENT = 1 << 20  # bytes, beside what the client has sent: events of a response repeat its fields
REPEATED = 4  # times as long as they were, since each tool gets the fields that it left out


class UsageError(ValueError):
    """The engine's stream cannot be read: no end of an event where the longest would have ended."""


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
_BEGINS = ("message_start", "response.created", "response.in_progress")  # their usage is of the prompt alone
MAX_CHOICES = 16384


class SSEUsage:
    """Reads one event stream. `hide`: remove the usage-only event (`choices: []` with usage). `cut`: remove the usage
    of every event that has choices, too. `single`: the stream has one choice. `sent`: bytes of the request.

    `prompt_tokens`, `completion_tokens`, `cached_tokens`: None until the engine reports them. `whole`: they are of the
    whole answer; until then they are of the events so far, and the completion is the sum over the choices. `done`: the
    stream had [DONE], or a response's last event. `error`: it had an error event; `refused`: one about the request.
    """

    __slots__ = (
        "_by_choice", "_held", "_last", "_latest", "cached_tokens", "completion_tokens", "cut", "done", "error", "hide",
        "longest", "prompt_tokens", "refused", "single", "whole",
    )  # fmt: skip

    def __init__(self, hide: bool, *, cut: bool = False, single: bool = False, sent: int = 0) -> None:
        self.hide = hide
        self.longest = MAX_EVENT + REPEATED * sent  # bytes of an event
        self.cut = cut
        self.single = single
        self.whole = False
        # Few streams ever need this table or that buffer, and an open one is to take little memory.
        self._by_choice: dict[int, int] | None = None  # completion tokens of each choice so far
        self._latest: re.Match[bytes] | None = None  # a usage that was cut out, read only if no later one comes
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.done = False
        self.error = self.refused = False
        self._held: bytearray | None = None  # an incomplete event
        self._last = b""  # the bytes relayed last

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the stream. Returns the bytes to relay: the events that are complete now. Raises UsageError."""
        # The usual read, whole events of deltas, must cost next to nothing. rfind is the cheapest search of bytes, and
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
        held = self._held = held or bytearray()
        searched = max(0, len(held) - 3)  # the end of an event may be cut in two
        held += data
        lf, crlf = held.rfind(b"\n\n", searched), held.rfind(b"\n\r\n", searched)
        end = max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)
        if not end:
            cr = held.rfind(b"\r\r", searched)  # of a stream that has no line feeds: others do not pay for the search
            end = cr + 2 if cr >= 0 else 0
        if len(held) - end > self.longest:
            raise UsageError(f"no end of an event in {len(held) - end} bytes of the engine's stream")
        if not end:
            return b""
        whole = bytes(memoryview(held)[:end])
        del held[:end]
        return self._relayed(whole)

    def passes(self, chunk: bytes) -> bool:
        """Whether a whole HTTP chunk, with its framing, holds only complete events of deltas, and needs no `feed`.

        The framing is a size line and CRLF around the data. It has none of the bytes searched for.
        """
        return (
            chunk.endswith(b"\n\n\r\n")
            and not self._held
            and chunk.rfind(b'"usage"') < 0
            and chunk.rfind(b'"error"') < 0
            and (68 not in chunk or chunk.rfind(b"[DONE]") < 0)
        )

    def sum_up(self) -> None:
        """Read the usage that was put off. Call it when the answer is over, or is read no further."""
        latest, self._latest = self._latest, None
        if latest is not None and not self.whole:
            self._so_far(0, int(latest[1]), int(latest[2]))

    def _several(self, data: bytes, tail: re.Match[bytes]) -> None:
        index = _INDEX.search(data)
        self._so_far(0 if index is None else int(index[1]), int(tail[1]), int(tail[2]))

    def _so_far(self, choice: int, prompt: int | None, completion: int | None) -> None:
        """Take usage so far: vLLM reports with each choice's event the tokens of that choice. The number of choices is
        bounded by the policy's `max_n` and by the prompts of a body."""
        self.prompt_tokens = _larger(self.prompt_tokens, prompt)
        if completion is not None:
            known = self._by_choice = self._by_choice or {}
            if choice in known or len(known) < MAX_CHOICES:
                known[choice] = max(known.get(choice, 0), completion)
            self.completion_tokens = sum(known.values())

    def finish(self) -> bytes:
        """End the stream. Returns the bytes that were held back. A last event without its blank line counts too."""
        rest, self._held = bytes(self._held or b""), None
        return self._relayed(rest)

    def ended(self, last_event: bytes) -> bool:
        """Whether the stream has had its last event (see Route), or an error event."""
        return self.done or self.error or (last_event != b"" and last_event in self._last)

    def delivered(self, last_event: bytes) -> bool:
        """Whether the client has the whole answer, though its body has not ended: OpenAI's client closes at `[DONE]`,
        before the chunk that ends the body."""
        return self.ended(last_event) and not self.error

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
        # A surplus blank line belongs to no event. It stays, as it would in a read of its own.
        return b"".join([self._kept(event) for event in events])

    def _kept(self, event: bytes) -> bytes:
        """Read one event. Returns the bytes of it to relay, with the blank lines before it in any case."""
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
            return event  # not for the gateway to judge: the client gets what the engine sent
        if bytes(fields.error) != b"null" or fields.object == "error" or fields.type in {"error", "response.failed"}:
            self.error = True
            code = error_of(data).code  # vLLM looks at some fields of a request only once its answer has begun
            self.refused = isinstance(code, int) and code >= 400 and is_refusal(code)
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


# The end of an event with a choice, as vLLM writes it. Where it matches, the rest of the event is checked.
_TAIL = re.compile(
    rb'\}\],"usage":\{"prompt_tokens":(\d{1,12}),"total_tokens":\d{1,12},"completion_tokens":(\d{1,12})'
    rb'(?:,"completion_tokens_details":null)?\}\}\n\n\Z'
)
_INDEX = re.compile(rb'"choices":\[\{"index":(\d{1,6}),')


def _without_usage(event: bytes, data: bytes) -> bytes:
    """The event without its usage, where it is not as vLLM writes it, or where the usage is not its last field."""
    fields = _decode_fields(data)
    fields.pop("usage", None)
    begins = event.find(b"data:")
    return b"%bdata: %b%b" % (event[:begins], msgspec.json.encode(fields), event[len(event.rstrip(b"\r\n")) :])


_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_EVENT_END = re.compile(rb"\n\r?\n|\r\r")


def _larger(known: int | None, reported: int | None) -> int | None:
    if known is None or reported is None:
        return reported if known is None else known
    return max(known, reported)
