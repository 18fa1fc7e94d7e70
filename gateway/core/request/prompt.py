"""The JSON bodies of every route, and what in them is prompt.

`Body` types the fields we read or bound; everything else passes through unread. What the engine will render as prompt
is gathered as text (or as token ids) in a `Prompt`: it is counted by script and hashed, never changed or kept.
Media by reference is refused here, so that nobody makes an engine fetch an address of his choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.core.request.outcome import Outcome, Refused

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Message(msgspec.Struct, gc=False):
    role: str
    content: str | list[Any] | None = None
    tool_calls: Raw | UnsetType = UNSET
    reasoning: Any = None
    reasoning_content: Any = None
    tools: Raw | UnsetType = UNSET


class StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, gc=False):
    """The union of what the routes' bodies hold. Each route demands its own fields; `fields.py` closes the others."""

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
    # Sampling fields are here for their range alone: an infinity or a 400-digit seed is refused before any engine.
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
    # What templates print beside the messages, and what Responses puts before them.
    chat_template: str | None = None
    chat_template_kwargs: Raw | UnsetType = UNSET
    previous_input_messages: Any = None


# Whose calls go first, what a tenant shares of a cache, where KV and encoder caches are fetched from, and the name of a
# call inside an engine (clients send x-request-id).
BY_GATEWAY = ("priority", "cache_salt", "kv_transfer_params", "ec_transfer_params", "request_id")

_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def bad(message: str, param: str | None = None) -> Refused:
    return Refused(Outcome.BAD_REQUEST, message, param=param)


def reserved(name: str) -> Refused:
    return bad(f"{name} is set by the gateway only: leave it out of the request", name)


def body_of(decode: Callable[[bytes], Body], data: bytes, *, max_depth: int, max_values: int) -> Body:
    """`data` as `decode` makes a Body of it, or Refused naming the field: malformed, not UTF-8, too deep, too many
    values, a wrong type, out of range, not for this route."""
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise bad(f"the body is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None
    # An object opens for each level, so few brackets cannot nest deep; msgspec itself would recurse as far as they go.
    # A value or a name takes a byte, and another one before it.
    if len(data) > 2 * max_values or data.count(b"{") + data.count(b"[") > max_depth:
        _check_structure(data, max_depth, max_values)
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise _explained(str(error), data) from None
    except msgspec.DecodeError as error:
        raise bad(f"the body is not valid JSON: {error}") from None


_BRACES = bytes.maketrans(b"[]", b"{}")
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'"{}[],:')
_BLOCK = 64 * 1024  # bytes that are looked at before other threads have a turn


def _check_structure(data: bytes, max_depth: int, max_values: int) -> None:
    """Refuse what holds more than `max_values` values and names, as soon as that is seen, or nests deeper than
    `max_depth`, exactly. Every step is one of C over a block; for the depth every pass removes the innermost pairs."""
    outside: list[bytes] = []  # of strings: brackets alone
    values, quotes, start, size = 1, 0, 0, len(data)
    while start < size:
        block = data[start : start + _BLOCK]
        if (len(block) - len(block.rstrip(b"\\"))) & 1 and start + len(block) < size:
            block = block[:-1]  # it escapes what comes in the next
        start += len(block)
        if b"\\" in block:
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = block.translate(_BRACES, _NOT_STRUCTURE).split(b'"')
        structure = b"".join(parts[quotes & 1 :: 2])
        values += structure.count(b"{") + structure.count(b",") + structure.count(b":")
        quotes += len(parts) - 1
        if max(values, quotes // 2) > max_values:
            message = f"the body holds more than {max_values} JSON values and names of fields"
            raise bad(f"{message}: body.max_values of the policy")
        outside.append(structure.translate(None, b",:"))
    brackets = b"".join(outside)
    pairs = len(brackets) == 2 * brackets.count(b"{")
    if pairs and b"{" * (max_depth + 1) not in brackets:  # else every pass may remove little
        for _ in range(max_depth):
            brackets = brackets.replace(b"{}", b"")
    if brackets:
        raise bad(f"the body is nested deeper than {max_depth} JSON arrays and objects, or its brackets do not match")


def _explained(error: str, data: bytes) -> Refused:
    """msgspec says what it expected and where; the value that was found is taken from the body."""
    what, _, path = error.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    param = path or None
    if what.startswith("Object missing required field `"):
        field = what.split("`")[1]
        return bad(f"{path}.{field} is missing", f"{path}.{field}")
    if what.startswith("Expected `null`,"):
        name = path.rpartition(".")[2]
        if name in BY_GATEWAY:
            return reserved(name)
        return bad(f"{path} is not for this route: the engine might read it as a prompt, and nobody else would", path)
    found = ""
    if path and "." not in path and "[" not in path:
        try:
            raw = bytes(_fields(data)[path])
        except msgspec.DecodeError as malformed:  # past the field at fault
            return bad(f"the body is not valid JSON: {malformed}")
        found = f", found {raw[:40].decode(errors='replace')}{'...' if len(raw) > 40 else ''}"
    return bad(f"{path or 'the body'}: {what[:1].lower()}{what[1:]}{found}", param)


_URLS = frozenset(("image_url", "video_url", "audio_url", "file_url"))
_MEDIA_OBJECTS = frozenset(("input_audio", "source", "file"))
_MEDIA = _URLS | _MEDIA_OBJECTS | {"file_data", "image_embeds", "audio_embeds", "video_embeds"}
_NOT_TEXT = frozenset(("type", "id", "call_id", "tool_use_id", "cache_control", "detail", "status"))


SAMPLED = 4096  # bytes of a picture


class Prompt(msgspec.Struct, gc=False):
    """What a body asks the engine to read. `media_rule` is `data_urls_only`, `none` or `any`; from `media_hosts` an
    engine may fetch in either of the two that take media."""

    media_rule: str
    max_items: int
    parts: list[str]
    ids: list[Any]
    media: int = 0
    media_bytes: int = 0
    media_hosts: Container[str] = ()
    items: int = 0  # messages, prompts, inputs or documents

    def count(self, items: int, param: str) -> None:
        self.items += items
        if self.items > self.max_items:
            raise bad(f"{param} has {items} entries; this gateway takes at most {self.max_items}", param)

    def messages(self, messages: list[Message] | None) -> None:
        if not messages:
            raise bad("messages is required: a non-empty array", "messages")
        self.count(len(messages), "messages")
        parts = self.parts
        for index, message in enumerate(messages):
            parts.append(message.role)
            content = message.content
            if content.__class__ is str:
                parts.append(content)
            elif content is not None:
                self.gather(content, f"messages[{index}].content")
            if message.tool_calls is not UNSET:
                self.raw(message.tool_calls)
            if message.reasoning is not None or message.reasoning_content is not None or message.tools is not UNSET:
                self._beside(message, f"messages[{index}]")

    def _beside(self, message: Message, param: str) -> None:
        """What a template prints of a message beside its content; of the two names of reasoning vLLM reads one."""
        self.gather(message.reasoning or message.reasoning_content, f"{param}.reasoning")
        if message.tools is not UNSET:
            self.raw(message.tools)

    def raw(self, value: Raw) -> None:
        """JSON that chat templates print more or less as it stands: tools and their calls."""
        self.parts.append(bytes(value).decode())

    def texts(self, value: Any, param: str) -> None:
        """A string, a list of strings, token ids, or a list of lists of token ids."""
        many = value if isinstance(value, list) and value and not _is_id(value[0]) else [value]
        self.count(len(many), param)
        for index, one in enumerate(many):
            if isinstance(one, str):
                self.parts.append(one)
            elif isinstance(one, list) and _are_ids(one):
                self.ids.extend(one)
            else:
                where = param if many is not value else f"{param}[{index}]"
                raise bad(f"{where} must be a string, an array of strings or an array of token ids", param)

    def documents(self, value: Any, param: str) -> None:
        """What rerank and score compare: a string or an object, or a list of them."""
        if not isinstance(value, str | list | dict) or not value:
            raise bad(f"{param} is required: a string, an object, or a non-empty array of them", param)
        self.count(len(value) if isinstance(value, list) else 1, param)
        self.gather(value, param)

    def gather(self, value: Any, param: str) -> None:
        """All text in a tree of content parts, in order. Recursion is bounded: the body's depth was checked; and so is
        their number."""
        kind = value.__class__
        if kind is str:
            self.parts.append(value)
        elif kind is list:
            for item in value:
                if item.__class__ in _WALKED:
                    self.gather(item, param)
        elif kind is dict:
            kind = value.get("type")
            if kind == "prompt_embeds" or "prompt_embeds" in value or "uuid" in value:
                _check_opaque(value, param)
            tool_use = kind == "tool_use"  # its input is the model's own words, whatever its keys
            for key, item in value.items():
                if tool_use and key == "input":
                    self.parts.append(msgspec.json.encode(item).decode())
                elif key in _MEDIA and (key not in _MEDIA_OBJECTS or isinstance(item, dict)):
                    self._medium(key, item, param)
                elif item.__class__ in _WALKED and key not in _NOT_TEXT:
                    self.gather(item, param)

    def _medium(self, key: str, item: Any, param: str) -> None:
        if self.media_rule == "none":
            raise bad(f"{param} holds {key}; this gateway takes text only", param)
        url = item.get("url") if isinstance(item, dict) else item if key in _URLS else None
        if self.media_rule == "data_urls_only" and url is not None and str(url)[:5].lower() != "data:":
            host = _WEB_URL.match(str(url))
            if host is None or host[1].lower() not in self.media_hosts:
                message = f"{param}: {key} must be a data: URL; this gateway lets no engine fetch from that address"
                raise bad(message, param)
        self.media += 1
        data = url if isinstance(url, str) else msgspec.json.encode(item)  # megabytes: not for nothing
        self.media_bytes += len(data)
        # Equal media must give equal blocks, and count like any other placeholder. Megabytes are sampled: the beginning
        # and every so many bytes tell pictures apart, and a guess at what is cached is all that depends on it.
        drawn = hash((len(data), data[:SAMPLED], data[:: len(data) // SAMPLED + 1]))
        self.parts.append(f"{drawn & 0xFFFFFFFFFFFFFFFF:016x}")


def _check_opaque(part: dict[str, Any], param: str) -> None:
    """Refuse a part that is not itself in the body: embeddings, and a uuid for what any client may have sent before."""
    if "uuid" in part and part["uuid"] is not None and not _MEDIA.isdisjoint(part):
        raise bad(f"{param} holds media with a uuid, and engines would take what another client sent by it", param)
    if part.get("type") == "prompt_embeds" or "prompt_embeds" in part:
        raise bad(f"{param} holds prompt_embeds; this gateway takes prompts as text or token ids", param)


# http(s)://HOST[:PORT] and then the path: no user, no backslash, nothing two readers could take for different hosts.
_WEB_URL = re.compile(r"https?://([A-Za-z0-9.-]{1,253})(?::[0-9]{1,5})?(?:[/?#]|$)", re.ASCII)


_WALKED = frozenset((str, list, dict))


def _is_id(value: Any) -> bool:
    return value.__class__ is int and 0 <= value < 2**31


def _are_ids(values: list[Any]) -> bool:
    """Whether there are any, and all of them are token ids; without a step of Python for each."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 2**31


_ASCII = bytes(range(128))
# Lead bytes of U+3000-9FFF and U+A000-DFFF (kana, Han, Hangul), U+F000-FFFF (full-width forms): 3 bytes a character.
_NOT_CJK_LEAD = bytes(byte for byte in range(256) if byte not in b"\xe3\xe4\xe5\xe6\xe7\xe8\xe9\xea\xeb\xec\xed\xef")


def scripts(data: bytes) -> tuple[int, int, int]:
    """UTF-8 bytes that are ASCII, CJK, anything else."""
    total = len(data)
    if data.isascii():
        return total, 0, 0
    others = len(data.translate(None, _ASCII))
    cjk = 3 * len(data.translate(None, _NOT_CJK_LEAD))
    return total - others, cjk, others - cjk


def chain(data: bytes, seed: int, block: int, max_blocks: int) -> tuple[int, ...]:
    """Hash of each full block of `block` bytes and of all before it. Per process: str hashing is keyed (SipHash)."""
    hashes = []
    for start in range(0, min(len(data) // block, max_blocks) * block, block):
        seed = hash((seed, data[start : start + block]))
        hashes.append(seed)
    return tuple(hashes)
