"""Cache of each layer of a model per token and per sequence, from the fields of its config.json.

As vLLM 0.32 allocates it (`v1/kv_cache_interface.py`, `layers/mamba/mamba_utils.py`): bytes per token in attention
layers, bytes per sequence in Mamba and linear attention. An unknown kind of layer counts as full attention, which keeps
most. A measurement corrects an estimate that is too high; one that is too low fails an engine's start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from sidecar.sizing.model_fields import MAX_LAYERS, MAX_TOKENS, Fields, Malformed, needed, whole, word

_FULL, _WINDOW, _CHUNK, _STATE, _BOTH, _NOTHING = range(6)
_KINDS = {
    "sliding_attention": _WINDOW,
    "chunked_attention": _CHUNK,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "hybrid": _BOTH,
    "conv": _NOTHING,  # a few KiB
    "mlp": _NOTHING,
    "moe": _NOTHING,
}
_LETTERS = {"M": _STATE, "-": _NOTHING, "E": _NOTHING}  # Nemotron-H's hybrid_override_pattern; * is attention
_STATE_ONLY = frozenset(("mamba", "mamba2", "falcon_mamba"))
# Encoders: every token sees the whole prompt at once, so vLLM keeps no cache for them.
_ENCODERS = frozenset(("bert", "roberta", "xlm-roberta", "camembert", "nomic_bert", "modernbert", "new"))
_UNCOMPRESSED = frozenset(("minicpm3",))  # has MLA's fields; vLLM keeps its heads in full


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """Attention layers that keep the same of each token: `width` elements for each of `heads` (K and V together;
    MLA: one head that holds the compressed vector). `window`: the last tokens that count; None: all of them. `fixed`:
    bytes beside them, whatever the size of an element, on every GPU: those of a sparse attention's indexer."""

    layers: int
    heads: int
    width: int
    window: int | None = None
    fixed: int = 0


class LayerState(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep the same of each sequence, however long: the last `kept` inputs of a convolution over
    `channels` and, per group, `group_channels`; and `recurrent` elements of `recurrent_bytes` (None: the model's)."""

    layers: int
    kept: int
    channels: int
    recurrent: int
    groups: int = 0
    group_channels: int = 0
    recurrent_bytes: int | None = None


def kinds_of(fields: Fields, model_type: str, layers: int) -> list[int]:
    """The kind of each layer, however the file tells it. Raises ModelError."""
    if model_type in _ENCODERS:
        return [_NOTHING] * layers
    for name in ("layer_types", "layers_block_type"):
        types = fields.get(name)
        if isinstance(types, list):
            if len(types) < layers:
                raise Malformed(f"{name} names {len(types)} layers of {layers}")
            return [_KINDS.get(str(kind), _FULL) for kind in types[:layers]]
    every = range(layers)
    letters = word(fields, "hybrid_override_pattern")
    if letters is not None:
        return [_LETTERS.get(letter, _FULL) for letter in letters[:layers]]
    if model_type in _STATE_ONLY:
        return [_STATE] * layers
    if model_type == "falcon_h1":
        return [_BOTH] * layers
    interval = whole(fields, ("full_attention_interval",), MAX_LAYERS)
    if interval is not None:  # Qwen3-Next: every fourth
        return [_STATE if (layer + 1) % interval else _FULL for layer in every]
    indices = fields.get("attn_layer_indices")
    if isinstance(indices, list):
        attention = indices[:layers]
        return [_FULL if layer in attention else _STATE for layer in every]
    period = whole(fields, ("attn_layer_period",), MAX_LAYERS)
    if period is not None:
        offset = whole(fields, ("attn_layer_offset",), MAX_LAYERS) or 0
        return [_FULL if layer % period == offset else _STATE for layer in every]
    pattern = whole(fields, ("sliding_window_pattern", "_sliding_window_pattern"), MAX_LAYERS)
    if pattern is not None:
        return [_WINDOW if (layer + 1) % pattern else _FULL for layer in every]
    qwen2 = fields.get("use_sliding_window") is True
    first = (whole(fields, ("max_window_layers",), MAX_LAYERS) if qwen2 else None) or 0
    return [_WINDOW if layer >= first else _FULL for layer in every]


def attends(kinds: list[int]) -> bool:
    """Whether any layer is attention."""
    return any(kind not in {_STATE, _NOTHING} for kind in kinds)


def caches_of(fields: Fields, model_type: str, kinds: list[int], heads: int, hidden: int) -> Iterator[Cache]:
    """The attention layers, one Cache for those that keep the same. Raises ModelError."""
    shared = whole(fields, ("num_kv_shared_layers",), MAX_LAYERS) or 0  # the last ones read what others keep
    window = None if fields.get("use_sliding_window") is False else whole(fields, ("sliding_window",), MAX_TOKENS)
    windows = {_WINDOW: window, _CHUNK: whole(fields, ("attention_chunk_size",), MAX_TOKENS)}
    kept, whole_kept = _kept(fields, model_type, heads, hidden)
    # DeepSeek's sparse attention finds tokens by a vector in 8 bits, with a scale of four bytes.
    indexer = whole(fields, ("index_head_dim",))
    counts = Counter(
        (windows.get(kind), *(whole_kept if kind == _FULL else kept))
        for kind in kinds[: max(0, len(kinds) - shared)]
        if kind not in {_STATE, _NOTHING}
    )
    for (limit, kv_heads, width), layers in counts.items():
        yield Cache(layers=layers, heads=kv_heads, width=width, window=limit, fixed=indexer + 4 if indexer else 0)


def _kept(fields: Fields, model_type: str, heads: int, hidden: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """KV heads and what each keeps of a token: in any attention layer, and in one without a window."""
    rope, plain = whole(fields, ("qk_rope_head_dim",)), whole(fields, ("qk_nope_head_dim",))
    rank = whole(fields, ("kv_lora_rank",))
    if rank is not None and model_type not in _UNCOMPRESSED:
        return (1, rank + (rope or 0)), (1, rank + (rope or 0))
    dim = whole(fields, ("head_dim", "attention_head_dim", "kv_channels"))
    if dim is None:
        dim = plain + rope if plain and rope else max(1, hidden // heads)
    if fields.get("multi_query") is True and fields.get("new_decoder_architecture") is not True:
        kv_heads = 1  # Falcon and GPT-BigCode, whatever else they write
    else:
        names = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num")
        kv_heads = whole(fields, names) or heads
    # Gemma 4: the layers without a window have fewer and larger heads.
    wide = whole(fields, ("global_head_dim",)) or dim
    few = whole(fields, ("num_global_key_value_heads",)) or kv_heads
    return (kv_heads, 2 * dim), (few, 2 * wide)


def states_of(fields: Fields, model_type: str, kinds: list[int], hidden: int) -> Iterator[LayerState]:
    """The Mamba or linear attention layers: one State, or none. Raises ModelError."""
    layers = sum(kind in {_STATE, _BOTH} for kind in kinds)
    if not layers:
        return
    wide = 4 if word(fields, "mamba_ssm_cache_dtype", "mamba_ssm_dtype") == "float32" else None
    values = whole(fields, ("linear_num_value_heads",))
    if values is not None:  # gated delta net: Qwen3-Next and after
        value_dim, key_dim = needed(fields, ("linear_value_head_dim",)), needed(fields, ("linear_key_head_dim",))
        yield LayerState(
            layers=layers,
            kept=needed(fields, ("linear_conv_kernel_dim",)) - 1,
            channels=2 * key_dim * needed(fields, ("linear_num_key_heads",)) + value_dim * values,
            recurrent=values * value_dim * key_dim,
            recurrent_bytes=wide,
        )
        return
    depth = needed(fields, ("mamba_d_state", "ssm_state_size", "state_size"))
    own = model_type == "mamba2"  # where num_heads and head_dim are not attention's
    heads = whole(fields, ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", *(("num_heads",) if own else ())))
    auto = fields.get("mamba_d_head") == "auto"
    names = ("mamba_headdim", "mamba_head_dim", *(("head_dim",) if own else ()), *(() if auto else ("mamba_d_head",)))
    dim = whole(fields, names)
    inner = heads * dim if heads and dim else whole(fields, ("mamba_d_ssm",))
    inner = inner or (whole(fields, ("mamba_expand", "expand")) or 2) * hidden
    # Mamba 2 has heads, and keeps two inputs per group besides; Mamba 1 has neither.
    groups = (whole(fields, ("mamba_n_groups", "mamba_ngroups", "n_groups")) or 1) if heads else 0
    yield LayerState(
        layers=layers,
        kept=needed(fields, ("mamba_d_conv", "conv_kernel")) - 1,
        channels=inner,
        recurrent=inner * depth,
        groups=groups,
        group_channels=2 * depth if groups else 0,
        recurrent_bytes=wide,
    )
