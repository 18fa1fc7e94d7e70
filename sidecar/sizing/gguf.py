"""Reader of a model's shape from a GGUF file's metadata, with which the file begins.

Format: github.com/ggml-org/ggml, docs/gguf.md: magic, version, counts, then keys with typed values, little-endian. The
keys of an architecture are config.json's fields under other names, and are read as those.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from sidecar.sizing.model_config import ModelShape, shape_from
from sidecar.sizing.model_fields import ModelError

MAX_METADATA = 1024**2  # bytes that are looked at; what is wanted stands before the tokenizer's lists, which are longer
MOST_KEYS = 4096

_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",  # which counts beside kv_lora_rank alone
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
}
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class _End(Exception):
    """The bytes at hand end here."""


def gguf_shape(start: bytes) -> ModelShape:
    """From the first MAX_METADATA bytes of a file. Windows of attention are not looked for, so such models seem to need
    more than they do. Raises ModelError."""
    found: dict[str, object] = {}
    try:
        for key, value in _metadata(start):
            found[key] = value
    except _End:
        pass  # the tokenizer's lists
    architecture = found.get("general.architecture")
    fields: dict[str, object] = {"model_type": architecture, "quantization_config": {"quant_method": "gguf"}}
    for name, field in _FIELDS.items():
        value = found.get(f"{architecture}.{name}")
        if isinstance(value, list):  # one for each layer
            value = max(value, default=None)
        if value is not None:
            fields[field] = value
    if "kv_lora_rank" not in fields:
        fields.pop("qk_rope_head_dim", None)
    return shape_from(msgspec.json.encode(fields))


def _metadata(data: bytes) -> Iterator[tuple[str, object]]:
    if data[:4] != b"GGUF":
        raise ModelError("not a GGUF file")
    version, at = _number(data, 4, "<I")
    if version not in {2, 3}:
        raise ModelError(f"a GGUF file of version {version}, expected 2 or 3")
    _, at = _number(data, at, "<Q")
    count, at = _number(data, at, "<Q")
    for _ in range(min(int(count), MOST_KEYS)):
        key, at = _string(data, at)
        kind, at = _number(data, at, "<I")
        value, at = _value(data, at, int(kind))
        yield key, value


def _value(data: bytes, at: int, kind: int) -> tuple[object, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind != _ARRAY:
        return _number(data, at, _form(kind))
    inner, at = _number(data, at, "<I")
    length, at = _number(data, at, "<Q")
    values: list[object] = []
    for _ in range(int(length)):
        if inner == _ARRAY:
            raise ModelError("lists within lists in a GGUF file")
        value, at = _value(data, at, int(inner))
        values.append(value)
    return values, at


def _form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ModelError(f"a GGUF value of the unknown type {kind}")
    return _NUMBERS[kind]


def _number(data: bytes, at: int, form: str) -> tuple[int | float, int]:
    end = at + struct.calcsize(form)
    if end > len(data):
        raise _End
    return struct.unpack_from(form, data, at)[0], end


def _string(data: bytes, at: int) -> tuple[str, int]:
    length, at = _number(data, at, "<Q")
    end = at + int(length)
    if end > len(data):
        raise _End
    return data[at:end].decode(errors="replace"), end
