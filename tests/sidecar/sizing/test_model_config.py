"""Model configs: every way in which one describes its layers, and the messages for those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.sizing.memory import kv_bytes
from sidecar.sizing.model_config import MAX_BYTES, ModelShape, Quantization, element_bytes, shape_from
from sidecar.sizing.model_fields import ModelError
from sidecar.sizing.model_layers import Cache, LayerState
from sidecar.sizing.weights import (
    MAX_HEADER,
    Index,
    StoredWeights,
    header_length,
    index_from,
    on_each_gpu,
    stored_from,
)
from tests.sidecar.corpus_table import stored_of

CONFIGS = Path(__file__).parents[1] / "configs"
# Six layers, KV heads of 2 x 64 elements.
PLAIN = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def shape(**changes: Any) -> ModelShape:
    return shape_from(msgspec.json.encode(PLAIN | changes))


def full(layers: int, heads: int = 2, width: int = 128) -> Cache:
    return Cache(layers=layers, heads=heads, width=width)


def local(layers: int, window: int = 100, heads: int = 2, width: int = 128) -> Cache:
    return Cache(layers=layers, heads=heads, width=width, window=window)


def test_a_shape_says_what_of_a_model_costs_memory() -> None:
    assert shape_from((CONFIGS / "llama-3-8b-fp8.json").read_bytes()) == ModelShape(
        model_type="llama",
        layers=32,
        hidden=4096,
        heads=32,
        embedding=2 * 128_256 * 4096,
        caches=(full(32, 8, 256),),
        context=8192,
        dtype="bfloat16",
        quantization=Quantization("fp8", 8.0),
        vocabulary=128_256,
        intermediate=14_336,
    )
    assert shape().embedding == 0
    assert shape(vocab_size=1000, tie_word_embeddings=True).embedding == 512_000


CACHES: list[tuple[dict[str, Any], set[Cache]]] = [
    ({}, {full(6)}),
    ({"num_key_value_heads": None}, {full(6, 8)}),
    ({"num_key_value_heads": 1}, {full(6, 1)}),
    ({"head_dim": 32}, {full(6, 2, 64)}),
    ({"head_dim": 0}, {full(6)}),
    ({"multi_query": True, "num_key_value_heads": 8}, {full(6, 1)}),
    ({"multi_query": True, "new_decoder_architecture": True}, {full(6)}),
    # windows
    ({"sliding_window": 100}, {local(6)}),
    ({"sliding_window": 0}, {full(6)}),
    ({"sliding_window": 100, "use_sliding_window": False}, {full(6)}),
    ({"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 4}, {full(4), local(2)}),
    ({"sliding_window": 100, "use_sliding_window": True}, {local(6)}),
    ({"sliding_window": 100, "max_window_layers": 4}, {local(6)}),
    (
        {"model_type": "gemma3_text", "sliding_window": 100, "num_key_value_heads": 2, "head_dim": 64},
        {full(1), local(5)},
    ),
    ({"model_type": "gemma3_text", "num_key_value_heads": None}, {full(1, 4, 512), local(5, 4096, 4, 512)}),
    ({"sliding_window": 100, "sliding_window_pattern": 3}, {full(2), local(4)}),
    ({"sliding_window": 100, "model_type": "gemma2"}, {full(3), local(3)}),
    ({"sliding_window": 100, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}, {full(1), local(5)}),
    ({"layer_types": ["sliding_attention", "full_attention"] * 3}, {full(6)}),
    ({"attention_chunk_size": 70, "layer_types": ["chunked_attention"] * 4 + ["new", 7]}, {full(2), local(4, 70)}),
    (
        {
            "sliding_window": 100,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "global_head_dim": 128,
            "num_global_key_value_heads": 1,
        },
        {full(1, 1, 256), local(5)},
    ),
    ({"num_kv_shared_layers": 2}, {full(4)}),
    ({"num_kv_shared_layers": 9}, set()),
    # MLA
    ({"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64}, {full(6, 1, 288)}),
    ({"kv_lora_rank": 256}, {full(6, 1, 256)}),
    (
        {"model_type": "minicpm3", "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64},
        {full(6, 2, 192)},
    ),
    # with layers that are not attention
    ({"hybrid_override_pattern": "*-E*-E"}, {full(2)}),
    ({"layer_types": ["conv", "mlp", "moe", "attention", "attention", "full_attention", "beyond"]}, {full(3)}),
]


@pytest.mark.parametrize(("changes", "caches"), CACHES)
def test_what_attention_keeps(changes: dict[str, Any], caches: set[Cache]) -> None:
    found = shape(**changes)
    assert set(found.caches) == caches
    assert found.states == ()


MAMBA1 = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 3}
MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 64, "mamba_d_conv": 4}
DELTA = {
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}


def first(layers: int) -> LayerState:
    return LayerState(layers=layers, kept=3, channels=1536, recurrent=1536 * 16)


def second(layers: int, wide: int | None = None) -> LayerState:
    return LayerState(
        layers=layers,
        kept=3,
        channels=512,
        recurrent=512 * 64,
        groups=2,
        group_channels=128,
        recurrent_bytes=wide,
    )


STATES: list[tuple[dict[str, Any], set[Cache], LayerState]] = [
    ({**MAMBA1, "attn_layer_period": 3, "attn_layer_offset": 1}, {full(2)}, first(4)),
    ({**MAMBA1, "attn_layer_period": 3}, {full(2)}, first(4)),
    ({**MAMBA2, "attn_layer_indices": [2]}, {full(1)}, second(5)),
    ({**MAMBA2, "layers_block_type": ["mamba"] * 5 + ["attention"]}, {full(1)}, second(5)),
    ({**MAMBA2, "layers_block_type": ["mamba"] * 5 + ["hybrid"]}, {full(1)}, second(6)),
    ({**MAMBA2, "model_type": "falcon_h1"}, {full(6)}, second(6)),
    ({**MAMBA2, "model_type": "falcon_h1", "mamba_d_head": "auto", "mamba_d_ssm": 512}, {full(6)}, second(6)),
    ({**MAMBA2, "model_type": "falcon_h1", "mamba_d_head": "auto", "mamba_expand": 1}, {full(6)}, second(6)),
    (
        {
            "hybrid_override_pattern": "MM*-ME",
            "mamba_num_heads": 16,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 64,
            "conv_kernel": 4,
            "mamba_ssm_cache_dtype": "float32",
        },
        {full(1)},
        second(3, 4),
    ),
    (
        {"model_type": "mamba2", "num_heads": 16, "head_dim": 32, "n_groups": 2, "state_size": 64, "conv_kernel": 4},
        set(),
        second(6),
    ),
    ({"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 3}, set(), first(6)),
    (
        {**DELTA, "layer_types": ["linear_attention"] * 3 + ["full_attention"] * 3},
        {full(3)},
        LayerState(layers=3, kept=3, channels=2 * 32 * 4 + 64 * 8, recurrent=8 * 64 * 32),
    ),
]


@pytest.mark.parametrize(("changes", "caches", "state"), STATES)
def test_what_mamba_and_linear_attention_keep(changes: dict[str, Any], caches: set[Cache], state: LayerState) -> None:
    found = shape(**changes)
    assert (set(found.caches), found.states) == (caches, (state,))


def test_a_model_without_attention_needs_no_heads() -> None:
    mamba = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "state_size": 16, "conv_kernel": 4}
    found = shape_from(msgspec.json.encode(mamba))
    assert (found.heads, found.caches) == (0, ())
    # 2 layers x (3 x 128 + 128 x 16) x 2; float32 states take 4 bytes, inputs still 2
    assert kv_bytes(found, 10_000) == 9_728
    wide = shape_from(msgspec.json.encode(mamba | {"mamba_ssm_dtype": "float32"}))
    assert kv_bytes(wide, 10_000) == 2 * (3 * 128 * 2 + 128 * 16 * 4)


def test_the_language_model_may_be_nested() -> None:
    for outer in ({"text_config": PLAIN}, {"llm_config": PLAIN}, {"thinker_config": {"text_config": PLAIN}}):
        found = shape_from(msgspec.json.encode({"model_type": "seeing", "torch_dtype": "torch.float16", **outer}))
        assert (found.model_type, found.caches, found.dtype) == ("llama", (full(6),), "float16")
    beside = PLAIN | {"text_config": {"model_type": "other"}, "vision_config": {"num_hidden_layers": 50}}
    assert shape_from(msgspec.json.encode(beside)).layers == 6
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    for written in ({**fp8, "text_config": PLAIN}, {"text_config": PLAIN | fp8}):
        assert shape_from(msgspec.json.encode(written)).quantization == Quantization("fp8", 8.0)
    tied = {"tie_word_embeddings": True, "text_config": PLAIN | {"vocab_size": 10}}
    assert shape_from(msgspec.json.encode(tied)).embedding == 5120


QUANTISED: list[tuple[dict[str, Any], Quantization | None]] = [
    ({}, None),
    ({"quantization_config": {}}, None),
    ({"quantization_config": {"quant_method": "fp8"}}, Quantization("fp8", 8.0)),
    ({"quantization_config": {"quant_method": "mxfp4"}}, Quantization("mxfp4", 4.25)),
    ({"quantization_config": {"quant_method": "AWQ", "bits": 4, "group_size": 128}}, Quantization("awq", 4.15625)),
    ({"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}}, Quantization("awq", 4.3125)),
    ({"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": -1}}, Quantization("gptq", 8.0)),
    (
        {
            "compression_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}, "c": 1},
            }
        },
        Quantization("compressed-tensors", 8.0),
    ),
    (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        Quantization("bitsandbytes", 4.5),
    ),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, Quantization("bitsandbytes", 8)),
    ({"quantization_config": {"what": 1}}, Quantization("unknown", None)),
]


@pytest.mark.parametrize(("changes", "expected"), QUANTISED)
def test_how_the_weights_are_stored(changes: dict[str, Any], expected: Quantization | None) -> None:
    assert shape(**changes).quantization == expected


BAD: list[tuple[bytes, str]] = [
    (b"", "config.json cannot be read as JSON"),
    (b'{"a": "\xff"}', "cannot be read as JSON"),
    (b"[" * 100_000, "cannot be read as JSON"),
    (b"[1]", r"config.json holds \[1\], expected an object"),
    (b" " * (MAX_BYTES + 1), "has more than 4194304 bytes"),
    (b"{}", "num_hidden_layers is missing"),
    (b'{"num_hidden_layers": 2}', "hidden_size is missing"),
    (b'{"num_hidden_layers": 2, "hidden_size": 8}', "num_attention_heads is missing"),
]
ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1, expected a whole number from 1 to 4096"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"num_hidden_layers": False}, "num_hidden_layers is False"),
    ({"hidden_size": "x" * 100}, "hidden_size is 'x{59}[.]{3}, expected"),
    ({"num_key_value_heads": [1, 2]}, r"num_key_value_heads is \[1, 2\]"),
    ({"head_dim": 1.5}, "head_dim is 1.5"),
    ({"layer_types": ["full_attention"]}, "layer_types names 1 layers of 6"),
    ({"layer_types": ["mamba"] * 6}, "mamba_d_state is missing"),
    ({"layer_types": ["mamba"] * 6, "mamba_d_state": 16}, "mamba_d_conv is missing"),
    ({"layer_types": ["linear_attention"] * 6, "linear_num_value_heads": 4}, "linear_value_head_dim is missing"),
    ({"quantization_config": {"quant_method": "awq", "bits": 65}}, "bits is 65, expected a whole number from 1 to 64"),
]


@pytest.mark.parametrize(("data", "message"), BAD + [(msgspec.json.encode(PLAIN | x), y) for x, y in ABSURD])
def test_a_file_that_cannot_be_understood_says_which_field(data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shape_from(data)


@pytest.mark.parametrize("model_type", ["xlm-roberta", "modernbert"])
def test_an_encoder_keeps_no_cache(model_type: str) -> None:
    found = shape(model_type=model_type, layer_types=["full_attention", "sliding_attention"])
    assert (found.caches, kv_bytes(found, 8192)) == ((), 0)


def test_dtypes_are_those_of_vllm() -> None:
    assert [element_bytes(name) for name in ("auto", "half", "bfloat16", "float32", "float")] == [2, 2, 2, 4, 4]
    with pytest.raises(ModelError, match="dtype is 'int8', expected auto or one of float32"):
        element_bytes("int8")
    assert [shape(dtype="auto").dtype, shape(dtype=4).dtype, shape(torch_dtype="torch.half").dtype] == [
        None,
        None,
        "half",
    ]


# -- weights ----------------------------------------------------------------------------------------------------------


def header(tensors: dict[str, Any]) -> bytes:
    text = msgspec.json.encode(tensors)
    return len(text).to_bytes(8, "little") + text


def test_the_header_of_a_safetensors_file_tells_its_weights() -> None:
    data = header(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
            "empty": {"dtype": "BF16", "shape": [0], "data_offsets": [24, 24]},
        }
    )
    assert header_length(data[:8]) == len(data)
    assert stored_from(data) == stored_from(data + b"weights") == StoredWeights(24, wide=8)
    assert stored_from(header({})) == StoredWeights(0)


TENSOR = {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}
BAD_HEADERS = [
    (b"", "a safetensors header of 0 bytes"),
    (b"\x02\0\0\0\0\0\0", "a safetensors header of 2 bytes, expected .* is the file complete"),
    (b"\xff" * 8, "a safetensors header of 18446744073709551615 bytes"),
    ((MAX_HEADER + 1).to_bytes(8, "little"), f"of {MAX_HEADER + 1} bytes"),
    ((20).to_bytes(8, "little") + b"{}", "10 bytes of a safetensors header of 28"),
    (header({"a": TENSOR})[:-1] + b"]", "cannot be read as JSON"),
    (header({"a": []}), r"the tensor 'a' is \[\]"),
    (header({"a": TENSOR | {"dtype": 1}}), "the tensor 'a' is"),
    (header({"a": TENSOR | {"data_offsets": [2, 0]}}), "data_offsets in order"),
    (header({"a": TENSOR | {"data_offsets": [-2, 0]}}), "data_offsets in order"),
    (header({"a": TENSOR | {"data_offsets": [0, 2**60]}}), "data_offsets in order"),
    (header({"a": TENSOR | {"data_offsets": [0]}}), "data_offsets in order"),
]


@pytest.mark.parametrize(("data", "message"), BAD_HEADERS)
def test_a_header_that_cannot_be_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        stored_from(data)


def test_an_index_tells_the_sum_and_the_files() -> None:
    two = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    files = ("model-1.safetensors", "model-2.safetensors")
    told = msgspec.json.encode({"metadata": {"total_size": 16_000}, "weight_map": two})
    assert index_from(told) == Index(16_000, files)
    assert index_from(b'{"metadata": {"total_size": 2e9}}') == Index(2_000_000_000, ())
    assert index_from(msgspec.json.encode({"weight_map": two})) == Index(None, files)


BAD_INDICES = [
    (b"{}", "neither"),
    (b'{"metadata": {"total_size": 0}}', "total_size is 0, expected"),
    (b'{"metadata": {"total_size": true}}', "total_size is True"),
    (b'{"metadata": {"total_size": 1e300}}', r"total_size is 1e\+300"),
    (b'{"metadata": {"total_size": "9"}}', "total_size is '9'"),
    (b'{"weight_map": {"a": "../../etc/x.safetensors"}}', "names the file '../../etc/x.safetensors', expected a name"),
    (b'{"weight_map": {"a": "/x.safetensors"}}', "names the file"),
    (b'{"weight_map": {"a": 7}}', "names the file '7'"),
]


@pytest.mark.parametrize(("data", "message"), BAD_INDICES)
def test_an_index_that_cannot_be_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        index_from(data)


FP8 = {"quantization_config": {"quant_method": "fp8"}}
ON_GPUS: list[tuple[dict[str, Any], StoredWeights, int, str, int]] = [
    ({}, StoredWeights(1000), 1, "auto", 1000),
    ({}, StoredWeights(1000), 3, "auto", 334),
    ({}, StoredWeights(1000, wide=1000), 1, "auto", 500),  # float32 files are brought down to 16 bits
    ({}, StoredWeights(1000, wide=400), 1, "auto", 800),
    ({"dtype": "float32"}, StoredWeights(1000), 1, "auto", 500),
    ({"dtype": "float32"}, StoredWeights(1000), 1, "float32", 1000),
    ({"dtype": "bfloat16"}, StoredWeights(1000), 1, "float32", 2000),
    (FP8, StoredWeights(1000, wide=400), 1, "auto", 1000),  # scales stay as they are
    ({**FP8, "dtype": "float32"}, StoredWeights(1000), 2, "auto", 500),
]


@pytest.mark.parametrize(("changes", "stored", "gpus", "dtype", "expected"), ON_GPUS)
def test_weights_on_each_gpu(
    changes: dict[str, Any], stored: StoredWeights, gpus: int, dtype: str, expected: int
) -> None:
    assert on_each_gpu(stored, shape(**changes), gpus, dtype) == expected


def test_without_files_parameters_tell_the_weights() -> None:
    assert stored_of(8_030_261_248, shape()) == StoredWeights(16_060_522_496)
    # 7,615,616,512 parameters, 1,089,994,752 of them embeddings in 16 bits, the others in 4 with a scale for each 128.
    awq = shape_from((CONFIGS / "qwen2.5-7b-awq.json").read_bytes())
    assert stored_of(7_615_616_512, awq) == StoredWeights(2_179_989_504 + 3_390_264_430)
    assert stored_of(7, awq) == StoredWeights(14)
    assert stored_of(100, shape(quantization_config={"what": 1})) == StoredWeights(200)


# -- whatever is in a file --------------------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["mamba", "full_attention", "auto", "MM*-", "fp8", "mamba2", "falcon_h1", "gemma3_text"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted(
    {"layer_types", "hybrid_override_pattern", "sliding_window", "quantization_config", "text_config", "kv_lora_rank"}
    | {"qk_rope_head_dim", "head_dim", "model_type", "multi_query", "vocab_size", "dtype", "num_kv_shared_layers"}
    | {*PLAIN, *MAMBA1, *MAMBA2, *DELTA, "attn_layer_indices", "attn_layer_period", "attn_layer_offset"}
)
changed = st.dictionaries(st.sampled_from(NAMES), values | st.integers(-1, 9), max_size=5)
nested = st.builds(lambda inner, outer: outer | {"text_config": PLAIN | inner}, changed, changed)


@given(st.binary(max_size=64) | (values | nested | changed.map(lambda x: PLAIN | x)).map(msgspec.json.encode))
def test_whatever_a_config_holds_only_its_error_is_raised(data: bytes) -> None:
    try:
        found = shape_from(data)
    except ModelError:
        return
    assert kv_bytes(found, 10, gpus=3) >= 0


tensors = st.dictionaries(
    st.text(max_size=5), st.fixed_dictionaries({"dtype": values, "data_offsets": values}) | values, max_size=3
)


@given(st.binary(max_size=64) | values.map(msgspec.json.encode) | tensors.map(header))
def test_whatever_is_in_weight_files_only_its_error_is_raised(data: bytes) -> None:
    for read in (index_from, stored_from, header_length):
        try:
            read(data)
        except ModelError:
            continue


LONG = {"max_position_embeddings": 131_072}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 8192, "max_seq_len": 4096}, 4096),
        ({"max_position_embeddings": 8192, "model_max_length": 131_072}, 131_072),  # Command R
        ({"max_position_embeddings": 8192, "rope_scaling": LINEAR}, 65_536),
        ({"max_position_embeddings": 8192, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 16_384),
        (LONG | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131_072),
        ({"max_position_embeddings": 40_960, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 40_960),  # Qwen3
        (LONG | {"model_type": "gemma3_text", "rope_scaling": LINEAR}, 131_072),
        (LONG | {"model_type": "gemma3_text", "rope_parameters": {"full_attention": LINEAR}}, 131_072),
        (
            LONG | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}},
            1_048_576,
        ),
        (LONG | {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope"}}, 4096),  # Phi 3.5
        (LONG | {"rope_scaling": {"type": "longrope"}}, 131_072),
        ({"rope_scaling": LINEAR}, None),
        ({"max_position_embeddings": 8192, "rope_scaling": LINEAR | {"factor": True}}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": LINEAR | {"factor": 0.5}}, 8192),
    ],
)
def test_the_context_is_derived_as_vllm_derives_it(fields: dict[str, Any], context: int | None) -> None:
    """The values that vLLM 0.32's own ModelConfig gave for such files, where it takes them."""
    assert shape(**fields).context == context
