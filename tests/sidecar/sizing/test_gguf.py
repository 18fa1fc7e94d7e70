"""GGUF metadata: the values read, and every malformed file."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.sizing.gguf import gguf_shape
from sidecar.sizing.memory import kv_per_token
from sidecar.sizing.model_config import Quantization
from sidecar.sizing.model_fields import ModelError


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def value(given: Any) -> bytes:
    if isinstance(given, str):
        return struct.pack("<I", 8) + text(given)
    if isinstance(given, list):
        inner = [value(each) for each in given]
        kind = inner[0][:4] if inner else struct.pack("<I", 4)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(inner)) + b"".join(each[4:] for each in inner)
    return struct.pack("<If", 6, given) if isinstance(given, float) else struct.pack("<II", 4, given)


def file(pairs: dict[str, Any], version: int = 3) -> bytes:
    said = b"".join(text(key) + value(given) for key, given in pairs.items())
    return b"GGUF" + struct.pack("<IQQ", version, 291, len(pairs)) + said


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Llama",
    "llama.block_count": 32,
    "llama.context_length": 8192,
    "llama.embedding_length": 4096,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 128,
    "llama.vocab_size": 128_256,
}


def test_a_shape_is_that_of_the_model_it_was_made_of() -> None:
    shape = gguf_shape(file(LLAMA))
    assert (shape.model_type, shape.layers, shape.heads, shape.context) == ("llama", 32, 32, 8192)
    assert shape.quantization == Quantization("gguf", None)
    assert kv_per_token(shape) == 131_072  # 32 x 8 x 2 x 128 x 2
    assert gguf_shape(file(LLAMA, version=2)) == shape


def test_a_number_for_each_layer_is_its_largest() -> None:
    heads = LLAMA | {"llama.attention.head_count_kv": [0, 8, 4], "llama.attention.key_length": 64}
    assert kv_per_token(gguf_shape(file(heads))) == 65_536
    none = LLAMA | {"llama.attention.head_count_kv": []}
    assert kv_per_token(gguf_shape(file(none))) == 4 * 131_072


def test_a_compressed_cache() -> None:
    deepseek = {key.replace("llama", "deepseek2"): each for key, each in LLAMA.items()} | {
        "general.architecture": "deepseek2",
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.rope.dimension_count": 64,
    }
    assert kv_per_token(gguf_shape(file(deepseek))) == 32 * (512 + 64) * 2


def test_the_tokenizer_s_lists_need_not_be_whole() -> None:
    whole = file(LLAMA | {"tokenizer.ggml.tokens": ["a", "b", "c"] * 100})
    assert gguf_shape(whole) == gguf_shape(whole[:-50]) == gguf_shape(whole[:-700]) == gguf_shape(file(LLAMA))


NESTED = struct.pack("<IIQ", 9, 9, 1)
BAD = [
    (b"", "not a GGUF file"),
    (b"GGUF", "is missing"),
    (file(LLAMA, version=9), "of version 9, expected 2 or 3"),
    (file({"general.architecture": "llama"}), "num_hidden_layers is missing"),
    (file(LLAMA | {"llama.block_count": "many"}), "num_hidden_layers is 'many'"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("x") + struct.pack("<I", 77), "the unknown type 77"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("x") + NESTED, "lists within lists"),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_what_is_wrong_is_said(data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gguf_shape(data)


@given(st.integers(0, 600), st.binary(max_size=20))
def test_whatever_a_file_holds_only_a_model_error_is_raised(at: int, change: bytes) -> None:
    data = bytearray(file(LLAMA))
    data[at : at + len(change)] = change
    try:
        gguf_shape(bytes(data))
    except ModelError:
        return
