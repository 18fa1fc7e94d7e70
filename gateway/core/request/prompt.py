"""Prompt of a call: its text and token ids, counted by script and hashed by block for prefix-cache affinity.

A `Prompt` gathers everything in a body that the engine will render as prompt. It never changes the body, and its text
is dropped after parsing. Media by reference is refused here, so that no client makes an engine fetch an address of its
choice (server-side request forgery).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from gateway.core.billing_header import billing_line
from gateway.core.request.json_body import Body, Message, bad_request

_URLS = frozenset(("image_url", "video_url", "audio_url", "file_url"))
_MEDIA_OBJECTS = frozenset(("input_audio", "source", "file"))
_MEDIA = _URLS | _MEDIA_OBJECTS | {"file_data", "image_embeds", "audio_embeds", "video_embeds"}
_NOT_TEXT = frozenset(("type", "id", "call_id", "tool_use_id", "cache_control", "detail", "status"))


BEGINNING = 64  # token ids
SAMPLED = 4096  # bytes of a medium hashed at its start, and at most so many more at even steps


class Prompt(msgspec.Struct, gc=False):
    """The prompt of one body, gathered field by field. Methods raise Refused (400), with `param` as the field at fault.

    `media_rule`: `data_urls_only`, `none` or `any`. Unless it is `none`, engines may fetch from `media_hosts`.
    `billing`: the line of Claude Code's that changes with every call (`billing_header.py`), empty: it has none.
    `parts`: texts. `ids`: token ids. `media`, `media_bytes`: number and bytes of images, audio and files.
    """

    media_rule: str
    max_items: int
    parts: list[str]
    ids: list[Any]
    media: int = 0
    media_bytes: int = 0
    media_hosts: Container[str] = ()
    billing: str = ""
    items: int = 0  # messages, prompts, inputs or documents

    def count(self, items: int, param: str) -> None:
        """Count items against `max_items`."""
        self.items += items
        if self.items > self.max_items:
            raise bad_request(f"{param} has {items} entries; this gateway takes at most {self.max_items}", param)

    def messages(self, messages: list[Message] | None) -> None:
        """Gather chat messages: roles, contents, tool calls, and fields that templates render beside them."""
        if not messages:
            raise bad_request("messages is required: a non-empty array", "messages")
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
        """Fields that a template renders beside a message's content. Reasoning has two names, and vLLM reads one."""
        self.gather(message.reasoning or message.reasoning_content, f"{param}.reasoning")
        if message.tools is not UNSET:
            self.raw(message.tools)

    def raw(self, value: Raw) -> None:
        """Gather JSON that chat templates render more or less as it stands: tools and their calls."""
        self.parts.append(bytes(value).decode())

    def texts(self, value: Any, param: str) -> None:
        """Gather a string, a list of strings, token ids, or a list of lists of token ids."""
        many = value if isinstance(value, list) and value and not _is_id(value[0]) else [value]
        self.count(len(many), param)
        for index, one in enumerate(many):
            if isinstance(one, str):
                self.parts.append(one)
            elif isinstance(one, list) and _are_ids(one):
                self.ids.extend(one)
            else:
                where = param if many is not value else f"{param}[{index}]"
                raise bad_request(f"{where} must be a string, an array of strings or an array of token ids", param)

    def documents(self, value: Any, param: str) -> None:
        """Gather what rerank and score compare: a string or an object, or a list of them."""
        if not isinstance(value, str | list | dict) or not value:
            raise bad_request(f"{param} is required: a string, an object, or a non-empty array of them", param)
        self.count(len(value) if isinstance(value, list) else 1, param)
        self.gather(value, param)

    def gather(self, value: Any, param: str) -> None:
        """Gather all text in a tree of content parts, in order. Depth and number of parts were bounded with the body's
        (`json_body.py`), so the recursion is bounded."""
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
            raise bad_request(f"{param} holds {key}; this gateway takes text only", param)
        url = item.get("url") if isinstance(item, dict) else item if key in _URLS else None
        if self.media_rule == "data_urls_only" and url is not None and str(url)[:5].lower() != "data:":
            host = _WEB_URL.match(str(url))
            if host is None or host[1].lower() not in self.media_hosts:
                message = f"{param}: {key} must be a data: URL; this gateway lets no engine fetch from that address"
                raise bad_request(message, param)
        self.media += 1
        if self.media > self.max_items:
            most = f"{self.max_items} images, recordings and files (one for each KiB of body.max)"
            message = f"{param} holds more than {most}"
            raise bad_request(f"{message}: send fewer in one call", param)
        data = url if isinstance(url, str) else msgspec.json.encode(item)  # a URL of megabytes is not encoded again
        self.media_bytes += len(data)
        # Equal media must give equal blocks, and count like any other placeholder. Megabytes are sampled, from the
        # start and at even steps. Only the guess at what an engine has cached depends on it.
        sample = hash((len(data), data[:SAMPLED], data[:: len(data) // SAMPLED + 1]))
        self.parts.append(f"{sample & 0xFFFFFFFFFFFFFFFF:016x}")


def beginning(prompt: Prompt) -> list[Any]:
    """The part of a prompt that all calls of a conversation share: everything up to the first user's message; of a
    prompt without messages all of it, of token ids the first BEGINNING."""
    parts = prompt.parts
    end = parts.index("user") + 2 if "user" in parts else len(parts)
    return [*parts[:end], *prompt.ids[:BEGINNING]]


def _check_opaque(part: dict[str, Any], param: str) -> None:
    """Refuse content that the body does not hold: embeddings, and a uuid of media that another client may have sent."""
    if "uuid" in part and part["uuid"] is not None and not _MEDIA.isdisjoint(part):
        raise bad_request(
            f"{param} holds media with a uuid: engines could use media that another client sent. Leave the uuid out",
            param,
        )
    if part.get("type") == "prompt_embeds" or "prompt_embeds" in part:
        raise bad_request(f"{param} holds prompt_embeds; this gateway takes prompts as text or token ids", param)


# http(s)://HOST[:PORT] and then the path: no user, no backslash, nothing that two parsers could read as two hosts.
_WEB_URL = re.compile(r"https?://([A-Za-z0-9.-]{1,253})(?::[0-9]{1,5})?(?:[/?#]|$)", re.ASCII)


_WALKED = frozenset((str, list, dict))


def _is_id(value: Any) -> bool:
    return value.__class__ is int and 0 <= value < 2**31


def _are_ids(values: list[Any]) -> bool:
    """Whether the list has items, all of them token ids. Runs in C, without a Python step for each."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 2**31


_ASCII = bytes(range(128))
# Lead bytes of U+3000-9FFF and U+A000-DFFF (kana, Han, Hangul), U+F000-FFFF (full-width forms): 3 bytes a character.
_NOT_CJK_LEAD = bytes(byte for byte in range(256) if byte not in b"\xe3\xe4\xe5\xe6\xe7\xe8\xe9\xea\xeb\xec\xed\xef")


def scripts(data: bytes) -> tuple[int, int, int]:
    """Number of UTF-8 bytes that are ASCII, CJK, and anything else."""
    total = len(data)
    if data.isascii():
        return total, 0, 0
    others = data.translate(None, _ASCII)
    cjk = 3 * len(others.translate(None, _NOT_CJK_LEAD))
    return total - len(others), cjk, len(others) - cjk


def chain(data: bytes, seed: int, block: int, max_blocks: int) -> tuple[int, ...]:
    """Chained hashes of the full blocks of `block` bytes: each covers its block and all before it.

    Hashes differ between processes, since Python keys its hash of strings (SipHash).
    """
    hashes = []
    blocks = len(data) // block
    for start in range(0, (blocks if blocks < max_blocks else max_blocks) * block, block):
        seed = hash((seed, data[start : start + block]))
        hashes.append(seed)
    return tuple(hashes)


# A reader fills a `Prompt` from a decoded `Body`. It raises `Refused` (400) where a required field is missing. The
# fields are those that vLLM renders as prompt; `allowed_fields.py` refuses every other field that could hold one.
def _conversation(fields: Body, prompt: Prompt) -> None:
    """The messages, and the other fields that a chat template renders."""
    if fields.tools is not UNSET:
        prompt.raw(fields.tools)
    if fields.chat_template is not None:
        prompt.parts.append(fields.chat_template)
    parts = prompt.parts
    first = len(parts)  # the first message's role; its text comes next
    prompt.messages(fields.messages)
    if parts[first] == "system" and len(parts) > first + 1:
        prompt.billing = billing_line(parts[first + 1])
    if fields.chat_template_kwargs is not UNSET:
        prompt.raw(fields.chat_template_kwargs)


def _chat(fields: Body, prompt: Prompt) -> None:
    if fields.documents is not None:
        prompt.documents(fields.documents, "documents")
    _conversation(fields, prompt)


def _completion(fields: Body, prompt: Prompt) -> None:
    prompt.texts(fields.prompt, "prompt")


def _response(fields: Body, prompt: Prompt) -> None:
    if fields.background:
        raise bad_request(
            "background responses are not supported: this gateway keeps no answers to be fetched", "background"
        )
    if fields.tools is not UNSET:
        prompt.raw(fields.tools)
    prompt.gather(fields.instructions, "instructions")
    if fields.previous_input_messages is not None:
        prompt.documents(fields.previous_input_messages, "previous_input_messages")
    prompt.documents(fields.input, "input")


def _message(fields: Body, prompt: Prompt) -> None:
    prompt.gather(fields.system, "system")
    line = billing_line(prompt.parts[0]) if prompt.parts else ""
    _conversation(fields, prompt)
    prompt.billing = line


def _embedding(fields: Body, prompt: Prompt) -> None:
    if _one_of(fields, ("input", "messages")) == "messages":
        _conversation(fields, prompt)
    else:
        prompt.texts(fields.input, "input")


def _rerank(fields: Body, prompt: Prompt) -> None:
    prompt.gather(fields.instruction, "instruction")
    prompt.documents(fields.query, "query")
    prompt.documents(fields.documents, "documents")


def _score(fields: Body, prompt: Prompt) -> None:
    """vLLM has renamed the two sides of a pair more than once: each side is read under any of its names."""
    prompt.gather(fields.instruction, "instruction")
    for names in (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")):
        name = _one_of(fields, names)
        prompt.documents(getattr(fields, name), name)


def _tokenize(fields: Body, prompt: Prompt) -> None:
    name = _one_of(fields, ("prompt", "messages", "tokens"))
    if name == "messages":
        _conversation(fields, prompt)
    else:
        prompt.texts(getattr(fields, name), name)


def _one_of(fields: Body, names: tuple[str, ...]) -> str:
    """Name of the only field present. Raises Refused for none or several: the engine would choose which to read."""
    given = [name for name in names if getattr(fields, name) is not None]
    if len(given) != 1:
        raise bad_request(f"exactly one of {', '.join(names)} is required", names[0])
    return given[0]


READERS: dict[str, Callable[[Body, Prompt], None]] = {
    "chat": _chat,
    "completion": _completion,
    "response": _response,
    "message": _message,
    "embedding": _embedding,
    "pooling": _embedding,
    "classify": _embedding,
    "rerank": _rerank,
    "score": _score,
    "tokenize": _tokenize,
}
