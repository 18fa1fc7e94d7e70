"""The fields of a JSON body that are not for every route, and those that are for none.

A body may hold the prompt of its own route and no other: vLLM takes one of several request classes by the fields that
are there, so a prompt under a name that the route does not read is one that nobody has bounded or looked at. `READS`
names, for each kind of route, the prompt fields that are read; the rest must be absent or null. The decoder of a kind
checks that itself, at no cost to a call. `tests/vllm/test_fields.py` holds the table against vLLM's own classes.

`check_unread` is for what no table knows: a part of media in any other field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from gateway.core.request.json_body import BY_GATEWAY, Body, bad_request

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

# What engines keep of earlier answers and what plugins read is no prompt that a gateway could see.
UNREADABLE = ("prompt_embeds", "previous_response_id", "data")
PROMPTS = frozenset(name for names in READS.values() for name in names).union(UNREADABLE)


class ExtraArguments(msgspec.Struct, gc=False):
    """vLLM hands `vllm_xargs` on beside the two fields that only a gateway may set, under the same names."""

    kv_transfer_params: None = None
    ec_transfer_params: None = None


def _decoder(kind: str) -> Callable[[bytes], Any]:
    closed = sorted(PROMPTS.union(BY_GATEWAY).difference(READS[kind]))
    fields = [*((name, None, None) for name in closed), ("vllm_xargs", ExtraArguments | None, None)]
    made = msgspec.defstruct(f"{kind.title()}Body", fields, bases=(Body,), gc=False)
    return msgspec.json.Decoder(made).decode


DECODERS: dict[str, Callable[[bytes], Body]] = {kind: _decoder(kind) for kind in READS}

# -- media where nobody looks -----------------------------------------------------------------------------------------

_PARTS = frozenset(
    ("image_url", "video_url", "audio_url", "file_url", "input_audio", "image_embeds", "audio_embeds", "video_embeds")
)
# Parameters and texts: whatever is in them, no version of vLLM fetches it.
_KNOWN = frozenset(Body.__struct_fields__).union(
    ("response_format", "structured_outputs", "text", "tool_choice", "functions", "function_call", "metadata"),
    ("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs", "logit_bias", "guided_json"),
    ("reasoning", "thinking", "output_config", "include"),
)
_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def check_unread(data: bytes) -> None:
    """Refuse media in fields that no route reads: a later vLLM may. `data` is a body that was decoded before."""
    # rfind: CPython's search from the end takes a fifth of the time of the one from the start.
    if (
        data.rfind(b"_url") < 0
        and data.rfind(b"_embeds") < 0
        and data.rfind(b"input_audio") < 0
        and (92 not in data or data.rfind(b"\\u") < 0)
    ):
        return  # no key of these is in it, however it is spelt
    for name, raw in _fields(data).items():
        if name not in _KNOWN and name not in PROMPTS and memoryview(raw)[0] in b"[{":
            _walk(msgspec.json.decode(raw), name)


def _walk(value: Any, name: str) -> None:
    if isinstance(value, list):
        for item in value:
            _walk(item, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in _PARTS and item is not None:
                raise bad_request(
                    f"{name} holds {key}, and {name} is not read here: media belongs into the prompt", name
                )
            _walk(item, name)
