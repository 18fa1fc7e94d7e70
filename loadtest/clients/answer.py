"""Answer to one request: its times, its outcome, its tokens.

The client does the framing. This module reads the body. It looks into an event only where it must: a read that carries
one token costs three searches of its bytes. Servers differ in their spaces in JSON and in their line ends; the patterns
allow for both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

END = b"\n\n"
ERROR = re.compile(rb'data: ?\{\s*"error"')
DONE = (b"data: [DONE]", b"data:[DONE]")
CHOICE = b'"choices":[{'
_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\{')
_CHOICES = b'"choices"'
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
USAGE = b'"usage"'
KEPT = 1000  # bytes of an error
SHOWN = 100  # characters of a reason: reports count by it

Expected = Literal["", "stream", "json"]


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Using(msgspec.Struct):
    usage: _Usage


class _Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    code: str | int | None = None


class _Refusal(msgspec.Struct):
    error: _Error


_USING = msgspec.json.Decoder(_Using)
_REFUSED = msgspec.json.Decoder(_Refusal)


class Answer(msgspec.Struct):
    """Answer to one request. Times are seconds of `time.monotonic`; 0.0 where the thing did not happen."""

    sent: float = 0.0  # when it was begun, which includes connecting; set by the client unless it is given
    first_byte: float = 0.0  # of the head, which vLLM sends before it has a token
    first_event: float = 0.0  # of a stream: its first event with a choice, which is its first token
    last_event: float = 0.0  # the last of these so far
    finished: float = 0.0
    status: int = 0
    reason: str = ""  # the gateway's x-weir-reason
    complete: bool = False
    streamed: bool = False
    done: bool = False  # the stream ended with [DONE]
    error: str = ""  # an error event, an error answer, or what the socket said
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timed_out: bool = False
    expected: Expected = ""  # what was asked for; "": whatever comes
    content_type: str = ""
    gaps: list[float] = msgspec.field(default_factory=list)  # between events with a choice
    fields: Mapping[bytes, bytes] = {}  # the head's, where the status is not 200

    @property
    def outcome(self) -> str:
        """Outcome in one word, the gateway's own for the same ending where it can be told from outside.

        `ok`; the gateway's reason; `engine_refused` or `upstream` (an error without a reason: the engine's own, passed
        on; in a stream it is followed by `[DONE]`); `truncated` (an error event, and no `[DONE]`); `timed_out` (we
        gave up); `cut` (neither finished nor explained); `garbled` (not what was asked for: no stream, no JSON);
        `empty` (a stream without a token); `unanswered` (not even a status).
        """
        if self.timed_out:
            return "timed_out"
        if not self.status:
            return "unanswered"
        if self.streamed and self.error.startswith("{"):
            return "upstream" if self.done else "truncated"
        if not self.complete:
            return "cut"
        if self.status != 200:
            return self.reason or ("engine_refused" if self.status < 500 else "upstream")
        if self.expected and (self.expected == "stream") is not self.streamed:
            return "garbled"
        if not self.streamed:
            return "garbled" if self.error else "ok"
        if not self.done:
            return "cut"
        return "empty" if self.expected and not self.first_event else "ok"

    @property
    def why(self) -> str:
        """Cause of an outcome that is not ok, in few words: reports count by it."""
        outcome = self.outcome
        if outcome == "ok":
            return ""
        if outcome == "timed_out":
            if not self.status:
                return "no answer"
            return "no token" if self.streamed and not self.first_event else "stalled within the answer"
        if outcome == "unanswered":
            return _short(self.error or "connection closed without an answer")
        if outcome == "cut":
            return _short(self.error or ("no [DONE]" if self.complete else "connection closed within the answer"))
        if outcome == "garbled":
            asked = "a stream" if self.expected == "stream" else "JSON"
            return _short(f"{self.content_type or 'an answer without a type'}, asked for {asked}")
        if outcome == "empty":
            return "a stream without a token"
        return _short(f"{self.status} {_told(self.error)}".rstrip() if not self.reason else str(self.status))

    def read_events(self, events: bytes, now: float) -> None:
        """Whole events of a stream, as they came in one read at `now`."""
        tokens = events.count(CHOICE)
        if not tokens and _CHOICES in events:
            tokens = len(_CHOICE.findall(events))
        if tokens:
            if not self.first_event:
                self.first_event = now
            else:
                self.gaps.append(now - self.last_event)
            if tokens > 1:
                self.gaps += [0.0] * (tokens - 1)
            self.last_event = now
        error = ERROR.search(events) if b'"error"' in events else None
        if error is not None:
            self.error = events[error.start() + 5 :].strip().decode(errors="replace")[:KEPT]
        if events.endswith(DONE):
            self.done = True
        if USAGE in events:
            for event in events.split(END):
                self.read_usage(event.removeprefix(b"data:"))

    def read_usage(self, text: bytes) -> None:
        """The usage in a JSON text, if there is one that can be read."""
        if not _USAGE.search(text):
            return
        try:
            usage = _USING.decode(text).usage
        except msgspec.DecodeError:
            return
        self.prompt_tokens = usage.prompt_tokens or 0
        self.completion_tokens = usage.completion_tokens or 0
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    def read_whole(self, body: bytes) -> None:
        """All of an answer that is not a stream, or as much of it as came."""
        if self.status != 200:
            self.error = body.decode(errors="replace")[:KEPT]
        elif self.expected == "json" and body.lstrip()[:1] not in (b"{", b"["):
            self.error = "no JSON"
        elif USAGE in body:
            self.read_usage(body)


def _told(error: str) -> str:
    """The code or type in an error of OpenAI's form: messages have numbers in them, and cannot be counted."""
    text = error.partition("\n")[0]
    try:
        told = _REFUSED.decode(text).error
    except msgspec.DecodeError:
        return ""
    return str(told.type or told.code or "")


def _short(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:SHOWN])
