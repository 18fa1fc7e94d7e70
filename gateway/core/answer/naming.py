"""Names of models in answers: an answer to a call for a model route names the route, not the member that answered.

Only `model` of an answer's outermost object counts, and of Anthropic's `message` and a response's `response` in events.
All other values keep their bytes. Of an answer longer than HELD the model is replaced where it stands among the first
members, as vLLM writes it.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_KEY = b'"model"'
_HOLDERS = ("message", "response")
HELD = 1 << 20  # bytes of an answer that are kept until it is whole
_FIRST = re.compile(
    rb'\A(?:\xef\xbb\xbf)?\s*\{(?:\s*"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[-+.\w]+)\s*,)*?\s*"model"\s*:\s*("[^"\\]*")'
)
_DATA = re.compile(rb"^(?:\xef\xbb\xbf)?data: ?(\{.*(?:\ndata:.*)*)", re.MULTILINE)
_BARE = re.compile(rb"\r(?!\n)")  # ends a line as well
_BREAK = re.compile(rb"\r?\ndata: ?")
_FINISH = re.compile(rb'"(?:finish|stop)_reason"\s*:\s*"(\w{1,32})"')
FINISHES = frozenset((
    "stop", "length", "tool_calls", "content_filter", "end_turn", "max_tokens", "tool_use", "stop_sequence",
))  # fmt: skip


def finish_reason(data: bytes) -> str:
    """Return the last finish reason in a part of an answer, `other` for one that is not of FINISHES; empty: none."""
    if b'_reason"' not in data:
        return ""
    found = _FINISH.findall(data)
    reason = found[-1].decode() if found else ""
    return reason if not reason or reason in FINISHES else "other"


def named(body: bytes, name: str) -> bytes:
    """Return a JSON answer with `name` as its model. In bytes that are no JSON object, such as one with NaN or a byte
    order mark, the model is replaced where it stands among the first members."""
    if _KEY not in body:
        return body
    try:
        fields = _decode(body)
        _rename(fields, name)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _renamed_early(body, name)
    return msgspec.json.encode(fields)


def _renamed_early(body: bytes, name: str) -> bytes:
    first = _FIRST.match(body)
    return body if first is None else body[: first.start(1)] + msgspec.json.encode(name) + body[first.end(1) :]


class AnswerNaming:
    """Naming of one answer that comes in pieces: `feed` them and `finish`. `stream`: they are whole events.

    `reason`: the answer's finish reason; empty: none so far.
    """

    __slots__ = ("_held", "_name", "_stream", "reason")

    def __init__(self, name: str, *, stream: bool) -> None:
        self._name = name
        self._stream = stream
        self.reason = ""
        self._held: bytearray | None = bytearray()  # None: the answer is longer than what is kept

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to relay now."""
        if self._stream:
            self.reason = finish_reason(data) or self.reason
            return named_events(data, self._name)
        if self._held is None:
            return data
        self._held += data
        if len(self._held) <= HELD:
            return b""
        held, self._held = bytes(self._held), None
        return _renamed_early(held, self._name)

    def finish(self, rest: bytes) -> bytes:
        """Return the rest of the bytes to relay, `rest` included."""
        if self._stream or self._held is None:
            return self.feed(rest)
        whole = bytes(self._held) + rest
        self.reason = finish_reason(whole)
        return named(whole, self._name)


def named_events(events: bytes, name: str) -> bytes:
    """Return whole events of a stream with `name` as their model. An event on several lines becomes one line,
    and a bare CR the LF that it stands for."""

    def renamed(found: re.Match[bytes]) -> bytes:
        data = found[1]
        if _KEY not in data:
            return found[0]
        body = data.rstrip()
        if b"\n" in body:
            body = _BREAK.sub(b" ", body)
        return found[0][: -len(data)] + named(body, name) + data[len(data.rstrip()) :]

    if _KEY not in events:
        return events
    if b"\r" in events:
        events = _BARE.sub(b"\n", events)
    return _DATA.sub(renamed, events)


def _rename(fields: dict[str, Raw], name: str) -> None:
    if "model" in fields:
        fields["model"] = Raw(msgspec.json.encode(name))
    for key in _HOLDERS:
        holder = fields.get(key)
        if holder is not None and bytes(memoryview(holder)[:1]) == b"{" and _KEY in bytes(holder):
            inner = _decode(holder)
            if "model" in inner:
                inner["model"] = Raw(msgspec.json.encode(name))
                fields[key] = Raw(msgspec.json.encode(inner))
