"""Model files that are wrong: each is one line, in bounded time and memory, and nothing is started with it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.shared.files.units import GIB
from sidecar.core.config import decode
from sidecar.core.engine_records import Unusable
from sidecar.core.profile import Profile
from sidecar.sizing.estimate import KnownModel, Sizing, estimate
from sidecar.sizing.model_config import shape_from
from sidecar.sizing.model_fields import ModelError
from sidecar.sizing.model_files import NotKnown
from sidecar.sizing.weights import StoredWeights, index_from, stored_from
from tests.examples import examples
from tests.sidecar.sizing.test_model_files import LLAMA, read, refused, sharded

PLAIN: dict[str, Any] = msgspec.json.decode(LLAMA)
Spoil = Callable[[Path], object]


def config(**changed: Any) -> Spoil:
    return lambda folder: (folder / "config.json").write_bytes(msgspec.json.encode(PLAIN | changed))


def text(data: bytes, name: str = "config.json") -> Spoil:
    return lambda folder: (folder / name).write_bytes(data)


def long(name: str, size: int, start: bytes = b"") -> Spoil:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(start)
        os.truncate(folder / name, size)

    return write


FIRST = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
NAMES = b'{"weight_map": {"a": %s}}'
BAD: list[tuple[Spoil, str]] = [
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (text(b""), "cannot be read as JSON"),
    (text(LLAMA[: len(LLAMA) // 2]), "cannot be read as JSON"),
    (text(b"[1, 2]"), "expected an object"),
    (text(b'{"a": ' * 100_000), "cannot be read as JSON"),
    (text(b'{"a": Infinity, "b": ' + b"[" * 100_000), "cannot be read as JSON"),
    (text(LLAMA.replace(b'"num_hidden_layers": 32', b'"num_hidden_layers": NaN')), "num_hidden_layers is nan"),
    (text(LLAMA.replace(b'"num_hidden_layers": 32', b'"num_hidden_layers": ' + b"9" * 5000)), "cannot be read as JSON"),
    (text(LLAMA.replace(b'"hidden_size": 4096', b'"x": NaN, "hidden_size": ' + b"9" * 5000)), "cannot be read as JSON"),
    (long("config.json", GIB, b"{"), "config.json has more than 4194304 bytes"),
    (config(num_hidden_layers=1_000_000), "num_hidden_layers is 1000000, expected a whole number from 1 to 4096"),
    (config(num_hidden_layers=-1), "num_hidden_layers is -1"),
    (config(num_hidden_layers="32"), "num_hidden_layers is '32'"),
    (config(num_hidden_layers=True), "num_hidden_layers is True"),
    (config(hidden_size=-4096), "hidden_size is -4096"),
    (config(num_attention_heads=1.5), "num_attention_heads is 1.5"),
    (config(num_key_value_heads="eight"), "num_key_value_heads is 'eight'"),
    (config(vocab_size=-7), "vocab_size is -7"),
    (config(max_position_embeddings=2**40), "max_position_embeddings is 1099511627776"),
    (config(layer_types=["full_attention"] * 3), "layer_types names 3 layers of 32"),
    (text(NAMES % b'"../other/model.safetensors"', INDEX), "expected a name beside it"),
    (text(NAMES % b'"/etc/passwd"', INDEX), "expected a name beside it"),
    (text(NAMES % b"7", INDEX), "expected a name beside it"),
    (text(b'{"weight_map": {"a": "b.safe', INDEX), "cannot be read as JSON"),
    (long(INDEX, GIB, b"{"), "has more than"),
    (text(struct.pack("<Q", 2**63), FIRST), "a safetensors header of 9223372036854775808 bytes"),
    (text(struct.pack("<Q", 30_000_000) + b"{}", FIRST), "bytes of a safetensors header of 30000008"),
    (long(FIRST, GIB, struct.pack("<Q", 2**24)), "cannot be read as JSON"),
    (long(FIRST, GIB, struct.pack("<Q", 2**26)), "a safetensors header of 67108864 bytes"),
    (text(b"\0" * 4, FIRST), "is the file complete?"),
    (text(struct.pack("<Q", 42) + b'{"a":{"dtype":"F16","data_offsets":[9,1]}}', FIRST), "data_offsets in order"),
]


@pytest.mark.parametrize(("spoil", "why"), BAD, ids=[why for _, why in BAD])
def test_a_bad_folder_is_one_clear_line_and_nothing_is_started_with_it(tmp_path: Path, spoil: Spoil, why: str) -> None:
    spoil(sharded(tmp_path / "m"))
    tracemalloc.start()
    try:
        said = refused(tmp_path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 300 * 1024**2
    assert why in said
    assert str(tmp_path / "m") in said
    assert len(said) < 600
    assert "\n" not in said


def test_others_are_sized_all_the_same(tmp_path: Path) -> None:
    config(hidden_size=-1)(sharded(tmp_path / "bad"))
    sharded(tmp_path / "good")
    made = Sizing(decode(b"models: {bad: {model_path: bad}, good: {model_path: good}}"), tmp_path, {})
    with pytest.raises(Unusable, match="hidden_size is -1"):
        asyncio.run(made.size("bad", 80 * GIB, 1, None, None, unified=False))
    assert asyncio.run(made.size("good", 80 * GIB, 1, None, None, unified=False)).claim > 16 * GIB


def test_numbers_that_are_no_json_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "config.json").write_bytes(LLAMA.replace(b"{", b'{"time_step_limit": [0.0, Infinity], "x": NaN,', 1))
    assert read(tmp_path).bytes > 0


@pytest.mark.parametrize("changed", [{"num_key_value_heads": -1}, {"intermediate_size": [8192] * 32}])
def test_what_may_mean_something_to_vllm_is_not_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    config(**changed)(sharded(tmp_path / "m"))
    with pytest.raises(NotKnown):
        read(tmp_path)


@pytest.mark.slow
def test_thousands_of_parts_are_counted_in_no_time(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / INDEX).unlink()
    for number in range(1, 3000):
        (folder / f"x-{number:05}-of-03000.bin").touch()
        (folder / f"y-{number:05}-of-03000.safetensors").touch()
    began = time.process_time()
    assert "03000-of-03000.safetensors is missing" in refused(tmp_path)
    assert time.process_time() - began < 10.0  # parts are counted once: were each compared with each, minutes


# -- whatever is written there ----------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.integers(), st.integers(-2, 9000), st.integers(2**20, 2**31), st.floats(), st.booleans())
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, st.text(max_size=20), st.sampled_from(["mamba", "linear_attention", "M-*", "yarn"])),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=10,
)
MORE = (
    "layer_types layers_block_type full_attention_interval attn_layer_period sliding_window_pattern kv_lora_rank "
    "qk_rope_head_dim num_kv_shared_layers head_dim v_head_dim num_experts_per_tok moe_intermediate_size rope_scaling "
    "quantization_config hybrid_override_pattern mamba_d_state ssm_state_size mamba_expand conv_kernel index_head_dim "
    "index_topk linear_num_value_heads linear_key_head_dim text_config model_type n_groups time_step_limit"
)
FIELDS = sorted({*PLAIN, *MORE.split()})
PROFILES = (
    Profile(model_path="m"),
    Profile(model_path="m", tensor_parallel=4),
    Profile(model_path="m", gpu_memory=0.5),
)


@settings(max_examples=examples(400))
@given(
    changed=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    stored=st.integers(0, 2**50),
    profile=st.sampled_from(PROFILES),
    total=st.integers(GIB, 2**40),
)
def test_any_config_is_estimated_or_refused(changed: dict[str, Any], stored: int, profile: Profile, total: int) -> None:
    data = json.dumps(PLAIN | changed).encode()  # as transformers writes it, with NaN and Infinity
    try:
        found = estimate(profile, KnownModel(shape_from(data), StoredWeights(stored)), total, 4)
    except ModelError:
        return
    assert 0 <= found.claim.bytes <= total
    assert found.least.total >= 0
    assert math.isfinite(found.claim.utilization)
    assert len(found.words) < 1000


@settings(max_examples=examples(300))
@given(st.binary(max_size=2000), st.sampled_from([b"", struct.pack("<Q", 64), b"{", LLAMA[:700]]))
def test_any_bytes_are_read_or_refused(data: bytes, start: bytes) -> None:
    for read_file in (shape_from, index_from, stored_from):
        try:
            read_file(start + data)
        except ModelError:
            continue
