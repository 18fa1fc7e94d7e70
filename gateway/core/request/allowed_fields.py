"""Allowed prompt fields of each route, and JSON decoders that refuse all others.

vLLM picks one of several request classes by the fields that a body has. So a prompt under a name that the route does
not read would reach the engine unbounded and unchecked. `READS` names, for each kind of route, the prompt fields that
are read. All other prompt fields must be absent or null. The decoder of a kind checks that itself, at no cost to a
call. `tests/vllm/test_fields.py` compares the table with vLLM's own classes.

`check_unread` covers fields that no table knows: it refuses media in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from gateway.core.request.json_body import BY_GATEWAY, LONG, STORED, Body, bad_request

_CHAT = ("messages", "documents", "chat_template")
_POOLED = ("input", "messages", "chat_template")

READS: dict[str, tuple[str, ...]] = {
    "chat": _CHAT,
    "completion": ("prompt",),
    "response": ("input", "instructions", "previous_input_messages"),
    "message": ("messages", "system"),
    "embedding": _POOLED,
    "pooling": _POOLED,
    "classify": _POOLED,
    "rerank": ("query", "documents", "instruction"),
    "score": ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2", "instruction"),
    "tokenize": ("prompt", "messages", "tokens", "chat_template"),
}

# Prompts that a gateway cannot read: embeddings, an engine's memory of earlier answers, and plugins' data.
UNREADABLE = ("prompt_embeds", *STORED, "data")
PROMPTS = frozenset(name for names in READS.values() for name in names).union(UNREADABLE)


class ExtraArguments(msgspec.Struct, gc=False):
    """`vllm_xargs`. vLLM merges it with two fields that only the gateway may set, so it must not hold those names."""

    kv_transfer_params: None = None
    ec_transfer_params: None = None


def _decoder(kind: str) -> Callable[[bytes], Any]:
    closed = sorted(PROMPTS.union(BY_GATEWAY).difference(READS[kind]))
    fields = [*((name, None, None) for name in closed), ("vllm_xargs", ExtraArguments | None, None)]
    made = msgspec.defstruct(f"{kind.title()}Body", fields, bases=(Body,), gc=False)
    return msgspec.json.Decoder(made).decode


DECODERS: dict[str, Callable[[bytes], Body]] = {kind: _decoder(kind) for kind in READS}

# -- media in unread fields -------------------------------------------------------------------------------------------

_PARTS = frozenset(
    ("image_url", "video_url", "audio_url", "file_url", "input_audio", "image_embeds", "audio_embeds", "video_embeds")
)
# Parameters and texts, from which no version of vLLM fetches anything.
_KNOWN = frozenset(Body.__struct_fields__).union(
    ("stop", "stop_sequences", "response_format", "structured_outputs", "text", "tool_choice", "metadata"),
    ("functions", "function_call"),
    ("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs", "logit_bias", "guided_json"),
    ("reasoning", "thinking", "output_config", "include"),
)
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
# A letter or underscore of ASCII as an escape, which nobody needs: U+0040 to U+007F.
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]").search


def check_unread(data: bytes) -> None:
    """Refuse media in fields that no route reads, since a later vLLM may read them. `data` is a decoded body.

    Raises Refused (400), which names the field.
    """
    if len(data) <= LONG and not _may_hold_media(data):
        return  # no field does; the fields of a long body are found sooner than these names in all of it
    for name, raw in _fields(data).items():
        if name not in _KNOWN and name not in PROMPTS:
            value = bytes(raw)
            if value[0] in b"[{" and _may_hold_media(value):
                _walk(msgspec.json.decode(value), name)


_FEW = 8  # underscores, of which each is looked at
_ENDS = (b'url"', b'embeds"', b'audio"')  # what follows the underscore in a name of media


def _may_hold_media(data: bytes) -> bool:
    """Whether a name of media may be in it, in any spelling."""
    # An ordinary body has a few underscores, which memchr finds.
    at, left = data.find(b"_"), _FEW
    while at >= 0 and left and not data.startswith(_ENDS, at + 1):
        at, left = data.find(b"_", at + 1), left - 1
    if at >= 0 and (
        # With its closing quote a name is not found in texts, where a backslash is before it: prompts are full of
        # base_url. rfind: CPython searches from the end in a fifth of the time that it takes from the start.
        data.rfind(b'_url"') >= 0 or data.rfind(b'_embeds"') >= 0 or data.rfind(b'input_audio"') >= 0
    ):
        return True
    return 92 in data and data.rfind(b"\\u00") >= 0 and _ESCAPED_LETTER(data) is not None


def _walk(value: Any, name: str) -> None:
    if isinstance(value, list):
        for item in value:
            _walk(item, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in _PARTS and item is not None:
                raise bad_request(
                    f"{name} holds {key}, and this gateway does not read {name}: media belongs in the prompt", name
                )
            _walk(item, name)
