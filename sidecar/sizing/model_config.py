"""Reader of a model's shape from its config.json: the fields that cost GPU memory, and no others.

The names are those of Hugging Face's configuration classes, older and newer. The memory of a layer is in model_layers.
"""

from __future__ import annotations

import msgspec

from sidecar.sizing.model_fields import (
    MAX_LAYERS,
    MAX_TOKENS,
    SHOWN,
    Fields,
    ModelError,
    json_object,
    needed,
    shown,
    whole,
    within,
    word,
)
from sidecar.sizing.model_layers import Cache, LayerState, attends, caches_of, kinds_of, states_of

MAX_BYTES = 4 * 1024**2  # some quantised models list their layers
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")  # where models that also see keep theirs
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DTYPES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}

# What files of these types leave out, because it is the class's default.
_LEFT_OUT: dict[str, Fields] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "gpt_oss": {"sliding_window_pattern": 2},
    "cohere2": {"sliding_window_pattern": 4},
}
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
# Kinds of rope whose file says a length that is scaled already.
_SCALED_ALREADY = frozenset(("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"))
# Bits per parameter where the file says no number of its own.
_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "modelopt": 8.0, "bitsandbytes": 8.0, "mxfp4": 4.25, "modelopt_fp4": 4.5}


class Quantization(msgspec.Struct, frozen=True):
    """Storage of the weights: `bits` per parameter, scales and zeros included; None: not told."""

    method: str
    bits: float | None


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a model: the parts of its architecture that cost memory. `heads`: query heads, 0 without attention.
    `context`: tokens it was made for. `dtype`: of the weights in the file; None: not told. `embedding`: parameters that
    are never quantised.

    `intermediate`: the width of a dense layer's MLP, `expert_intermediate` of one expert's, of which each token passes
    `experts_per_token`; `delta_net`: whether it has gated delta nets. 0: not told, or none."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    embedding: int
    caches: tuple[Cache, ...]
    states: tuple[LayerState, ...] = ()
    context: int | None = None
    dtype: str | None = None
    quantization: Quantization | None = None
    vocabulary: int = 0
    intermediate: int = 0
    expert_intermediate: int = 0
    experts_per_token: int = 0
    delta_net: bool = False


def shape_from(data: bytes) -> ModelShape:
    """The shape in the bytes of a config.json. Raises ModelError."""
    outer = json_object(data, "config.json", MAX_BYTES)
    inner = _text_model(outer)
    model_type = word(inner, "model_type") or "unknown"
    written = {name: value for name, value in inner.items() if value is not None}
    fields = {**_LEFT_OUT.get(model_type, {}), **written}
    layers, hidden = needed(fields, _LAYERS, MAX_LAYERS), needed(fields, ("hidden_size", "n_embd", "d_model"))
    kinds = kinds_of(fields, model_type, layers)
    heads = needed(fields, ("num_attention_heads", "n_head", "n_heads")) if attends(kinds) else 0
    tied = fields.get("tie_word_embeddings", outer.get("tie_word_embeddings"))
    words = whole(fields, ("vocab_size", "padded_vocab_size")) or 0
    dense = whole(fields, ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")) or 0
    per_token = whole(fields, ("num_experts_per_tok", "top_k_experts", "moe_top_k", "num_experts_per_token")) or 0
    # A table per layer beside the usual one: Gemma's E models.
    beside = (whole(fields, ("vocab_size_per_layer_input",)) or 0) * layers
    beside *= whole(fields, ("hidden_size_per_layer_input",)) or 0
    return ModelShape(
        model_type=model_type[:SHOWN],
        layers=layers,
        hidden=hidden,
        heads=heads,
        embedding=words * hidden * (1 if tied is True else 2) + beside,
        caches=tuple(caches_of(fields, model_type, kinds, heads, hidden)) if heads else (),
        states=tuple(states_of(fields, model_type, kinds, hidden)),
        context=_context(fields),
        dtype=_dtype(fields) or _dtype(outer),
        quantization=_quantization(outer) or _quantization(fields),
        vocabulary=words,
        intermediate=dense or whole(fields, ("shared_expert_intermediate_size",)) or 0,
        expert_intermediate=(whole(fields, ("moe_intermediate_size",)) or dense) if per_token else 0,
        experts_per_token=per_token,
        delta_net=bool(whole(fields, ("linear_num_value_heads",))),
    )


def element_bytes(dtype: str) -> int:
    """Bytes of one element under vLLM's `--dtype`. auto: 2, since it brings float32 models down to 16 bits too.
    Raises ModelError."""
    size = 2 if dtype == "auto" else _DTYPES.get(dtype)
    if size is None:
        raise ModelError(f"dtype is {shown(dtype)}, expected auto or one of {', '.join(_DTYPES)}")
    return size


def _text_model(outer: Fields) -> Fields:
    """The part that is the language model: nested once or twice where the model also sees or hears."""
    fields = outer
    for _ in range(2):
        nested = [within(fields, name) for name in _NESTED]
        fields = next((found for found in nested if any(name in found for name in (*_LAYERS, *_NESTED))), fields)
    return fields


def _context(fields: Fields) -> int | None:
    """Tokens that vLLM serves unless it is told otherwise: the least that the file names, times the factor of scalings
    that stretch it. A longrope's is the context before it, since one beyond that makes short prompts worse.

    Source: vLLM 0.32, `_get_and_verify_max_len` of vllm/config/model.py, `derive_max_model_len_and_key` of
    vllm/transformers_utils/model_arch_config_convertor.py."""
    told = whole(fields, ("model_max_length",), MAX_TOKENS)
    lengths = [whole(fields, (name,), MAX_TOKENS) for name in _LENGTHS] if told is None else [told]
    context = min([length for length in lengths if length is not None], default=None)
    scaling = within(fields, "rope_scaling") or within(fields, "rope_parameters")
    nested = [each for each in scaling.values() if isinstance(each, dict)]  # by kind of layer
    factor: object = 1
    for each in nested or [scaling]:
        kind = word(each, "rope_type", "type")
        if kind == "longrope":
            return whole(fields, ("original_max_position_embeddings",), MAX_TOKENS) or context
        if kind is not None and kind not in _SCALED_ALREADY:
            factor = each.get("factor", factor)
    if context is None or "gemma3" in (word(fields, "model_type") or ""):  # its context is scaled already
        return context
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 1e4:
        return context
    return min(MAX_TOKENS, int(context * factor))


def _dtype(fields: Fields) -> str | None:
    name = (word(fields, "dtype", "torch_dtype") or "auto").removeprefix("torch.")
    return None if name == "auto" else name[:SHOWN]


def _quantization(fields: Fields) -> Quantization | None:
    """FP8, AWQ, GPTQ, compressed-tensors, ModelOpt, bitsandbytes: what the file says of bits, else what is usual."""
    told = within(fields, "quantization_config") or within(fields, "compression_config")
    if not told:
        return None
    method = (word(told, "quant_method") or "unknown").lower()[:SHOWN]
    groups = [within(group, "weights") for group in within(told, "config_groups").values() if isinstance(group, dict)]
    per = [_bits(group, ("num_bits",), ("group_size",)) for group in groups]
    own = _bits(told, ("bits", "w_bit", "num_bits"), ("group_size", "q_group_size"))
    bits = own or max(filter(None, per), default=None)
    if bits is None and told.get("load_in_4bit") is True:
        bits = 4.5
    return Quantization(method, bits or _BITS.get(method))


def _bits(fields: Fields, names: tuple[str, ...], sizes: tuple[str, ...]) -> float | None:
    """Bits per weight, and of a 16-bit scale and a zero for each group of weights."""
    bits = whole(fields, names, 64)
    size = next((size for size in map(fields.get, sizes) if type(size) is int and size > 0), None)
    return bits if bits is None or size is None else bits + (16 + bits) / size
