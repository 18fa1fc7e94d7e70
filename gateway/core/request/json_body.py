"""JSON bodies of all routes: the types of their fields, and the limits on their depth and number of values.

`Body` types the fields that the gateway reads or bounds. Every other field passes through unread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.core.request.outcome import Outcome, Refused

LONG = 64 * 1024  # bytes of a body that is worth a step more, to read its text once less
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Message(msgspec.Struct, gc=False):
    """Chat message. Templates may render every field here."""

    role: str
    content: str | list[Any] | None = None
    tool_calls: Raw | UnsetType = UNSET
    reasoning: Any = None
    reasoning_content: Any = None
    tools: Raw | UnsetType = UNSET


class StreamOptions(msgspec.Struct, gc=False):
    """The fields of `stream_options` that the gateway reads."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, gc=False):
    """The fields of every route's body in one struct.

    `prompt.py` requires the fields of a route, `allowed_fields.py` refuses those of other routes.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    messages: list[Message] | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | UnsetType | None = UNSET
    tools: Raw | UnsetType = UNSET
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # Sampling fields are here for their range alone: an infinity or a 400-digit seed never reaches an engine.
    top_p: float | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: _Int64 | None = None
    seed: _Int64 | None = None
    min_tokens: _Int64 | None = None
    # completion; embedding, pooling and classify; tokenize
    prompt: Any = None
    echo: Any = None
    input: Any = None
    tokens: Any = None
    # message, response
    system: Any = None
    metadata: Any = None
    instructions: Any = None
    max_output_tokens: int | None = None
    background: bool | None = None
    # rerank, score
    query: Any = None
    documents: Any = None
    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    instruction: Any = None
    # Rendered by chat templates beside the messages, and by Responses before them.
    chat_template: str | None = None
    chat_template_kwargs: Raw | UnsetType = UNSET
    previous_input_messages: Any = None


# Fields that only the gateway sets: priority between calls, isolation of tenants in the prefix cache, the source of KV
# and encoder caches, and the name of a call inside an engine (clients send x-request-id).
BY_GATEWAY = ("priority", "cache_salt", "kv_transfer_params", "ec_transfer_params", "request_id")
STORED = ("previous_response_id", "conversation")  # names of what some other API keeps

_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def bad_request(message: str, param: str | None = None) -> Refused:
    """A refusal with status 400. `param`: the field or header at fault."""
    return Refused(Outcome.BAD_REQUEST, message, param=param)


def reserved(name: str) -> Refused:
    """A refusal of a field that only the gateway may set."""
    return bad_request(f"{name} is set by the gateway only: leave it out of the request", name)


def body_of(decode: Callable[[bytes], Body], data: bytes, *, max_depth: int, max_values: int) -> Body:
    """Decode a body. Raises Refused (400), which names the field at fault.

    Refused are: malformed JSON, text that is not UTF-8, nesting deeper than `max_depth`, more than `max_values` values
    and names; and fields of a wrong type, out of range, or of another route.
    """
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise bad_request(f"the body is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None
    # Each level opens a bracket, so few brackets cannot nest deep. msgspec itself would recurse to any depth.
    # Each value or name takes at least a byte and a separator, so a short body cannot hold many.
    if len(data) > 2 * max_values or _brackets(data, max_depth + 1) > max_depth:
        _check_structure(data, max_depth, max_values)
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise explained(str(error), data) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def _brackets(data: bytes, most: int) -> int:
    """Number of opening brackets, those in strings among them; of each kind `most` are counted."""
    # replace finds a byte by the C library's memchr. count looks at each byte, and takes ten times as long.
    return 2 * len(data) - len(data.replace(b"{", b"", most)) - len(data.replace(b"[", b"", most))


_BRACES = bytes.maketrans(b"[]", b"{}")
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'"{}[],:')
_BLOCK = 64 * 1024  # bytes of one C call, which lets no other thread run


def _check_structure(data: bytes, max_depth: int, max_values: int) -> None:
    """Refuse a body of more than `max_values` values and names, or nested deeper than `max_depth`. Bounds are exact.

    The count stops at the first block above its bound. Each step runs in C over a block. For the depth, each pass
    removes the innermost pairs of brackets.
    """
    outside: list[bytes] = []  # brackets outside of strings
    values, quotes, start, size = 1, 0, 0, len(data)
    while start < size:
        block = data[start : start + _BLOCK]
        if (len(block) - len(block.rstrip(b"\\"))) & 1 and start + len(block) < size:
            block = block[:-1]  # its last backslash escapes the next block's first byte
        start += len(block)
        if b"\\" in block:
            # As many bytes as before: CPython counts matches first where a replacement is of another length.
            if block.rfind(b'\\\\"') >= 0:  # else at most one backslash is before each quote, and it escapes the quote
                block = block.replace(b"\\\\", b"  ")
            block = block.replace(b'\\"', b"  ")
        parts = block.translate(_BRACES, _NOT_STRUCTURE).split(b'"')
        structure = b"".join(parts[quotes & 1 :: 2])
        values += structure.count(b"{") + structure.count(b",") + structure.count(b":")
        quotes += len(parts) - 1
        if max(values, quotes // 2) > max_values:
            message = f"the body holds more than {max_values} JSON values and names of fields"
            raise bad_request(f"{message}: one for each 20 bytes of body.max")
        outside.append(structure.translate(None, b",:"))
    brackets = b"".join(outside)
    pairs = len(brackets) == 2 * brackets.count(b"{")
    if pairs and b"{" * (max_depth + 1) not in brackets:  # else each pass might remove little
        for _ in range(max_depth):
            brackets = brackets.replace(b"{}", b"")
    if brackets:
        raise bad_request(
            f"the body is nested deeper than {max_depth} JSON arrays and objects, or its brackets do not match"
        )


def explained(error: str, data: bytes) -> Refused:
    """msgspec's error as a refusal. It names what was expected and where; the value found is read from the body."""
    what, _, path = error.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    param = path or None
    if what.startswith("Object missing required field `"):
        field = what.split("`")[1]
        return bad_request(f"{path}.{field} is missing", f"{path}.{field}")
    if what.startswith("Expected `null`,"):
        name = path.rpartition(".")[2]
        if name in BY_GATEWAY:
            return reserved(name)
        if name in STORED:
            return bad_request(f"{path} names what nobody stores here: send the whole conversation in the call", path)
        return bad_request(
            f"{path} is not a field of this route, and the engine might read it as a prompt: leave it out", path
        )
    found = ""
    if path and "." not in path and "[" not in path:
        try:
            raw = bytes(_fields(data)[path])
        except msgspec.DecodeError as malformed:  # past the field at fault
            return bad_request(f"the body is not valid JSON: {malformed}")
        found = f", found {raw[:40].decode(errors='replace')}{'...' if len(raw) > 40 else ''}"
    return bad_request(f"{path or 'the body'}: {what[:1].lower()}{what[1:]}{found}", param)
