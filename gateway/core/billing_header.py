"""Claude Code's billing header: the first line of its system prompt, which is another one in each call.

    x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch=a1b2c;

It stands before the whole history. Hashed with it, no call has anything in common with the one before it; and an
engine that renders it reads the whole history again. So it is never hashed, and engines do not get it. vLLM 0.32 leaves
it out by itself.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

NAME = "x-anthropic-billing-header"
LONGEST = 512  # characters; a longer line is a prompt like any other

NULL = Raw(b"null")
_QUOTE, _BRACE, _BRACKET = b'"{['

_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_items = msgspec.json.Decoder(list[Raw]).decode
_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


def billing_line(text: str) -> str:
    """The line at the beginning of a system prompt, with its line break; empty: there is none."""
    if not text.startswith(NAME):
        return ""
    end = text.find("\n", 0, LONGEST) + 1 or len(text)
    return text[:end] if end <= LONGEST else ""


def without_billing_line(body: bytes, kind: str) -> bytes:
    """`body`, which was parsed for a route of `kind`, without such a line at the beginning of its system prompt. A part
    or a message that has nothing else goes with it. All other values keep their bytes."""
    fields = _fields(body)
    if kind == "message":
        return _encode(fields | {"system": _less(fields["system"]) or Raw(b"[]")})
    first, *others = _items(fields["messages"])
    message = _fields(first)
    if "content" not in message:
        return body
    content = _less(message["content"])
    if content is not None:
        others = [Raw(_encode(message | {"content": content})), *others]
    return _encode(fields | {"messages": others})


def _less(content: Raw) -> Raw | None:
    """A text, a part of text or a list of parts, without the line at its beginning; None: it has nothing else."""
    kind = memoryview(content)[0]
    if kind == _QUOTE:
        text = _text(content)
        line = billing_line(text)
        return content if not line else Raw(_encode(text[len(line) :])) if line != text else None
    if kind == _BRACE:
        part = _fields(content)
        said = _less(part.get("text", NULL))
        return content if said is NULL else None if said is None else Raw(_encode(part | {"text": said}))
    if kind != _BRACKET or not (parts := _items(content)):
        return content
    first = _less(parts[0])
    rest = parts[1:] if first is None else [first, *parts[1:]]
    return Raw(_encode(rest)) if rest else None
