"""GPU memory that a model needs: weights + KV cache + activations + overhead, in bytes on each GPU.

The bytes that vLLM takes of the GPU are another figure, the one for a ledger: claim.py. A measurement of a profile
replaces its estimate: `Measured`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.shared.files.units import GIB, MIB
from sidecar.core.lesson import Measured
from sidecar.sizing.model_config import ModelShape, element_bytes
from sidecar.sizing.model_fields import ModelError, shown
from sidecar.sizing.model_layers import Cache, LayerState
from sidecar.sizing.weights import StoredWeights, on_each_gpu
from sidecar.sizing.working_memory import CONTEXT, SMALL_BATCH, Batch, activations, overhead, split_among

BLOCK = 16  # tokens: the least that KV cache is given out in
MARGIN, MARGIN_SHARE = GIB, 0.05  # claimed beyond a need that was never measured: the larger of the two
LITTLE = 256 * MIB  # claimed beyond a need that a failed start told: the next one differs a little
STEP_SHARE = 8  # of a need that a failed start only exceeded its eighth is claimed beyond it
RESIDUE = 2 * GIB  # 1.9 was measured of a sleeping engine of one GPU: 0.9 of CUDA and 1.0 of graphs
PINNED = 1.5  # times the weights: PyTorch rounds pinned memory up to powers of two (15 GiB became 22)
PROCESSES = 3 * GIB  # of an engine's host memory beside weights, where that is the GPU's too (no published source)
NCCL = GIB  # what one of several GPUs keeps besides, and its CUDA graphs
FLOOR = 0.5  # of the weights: quantising 16 bits while loading halves them; a measurement below it is of something else

_KV_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2}


USUAL = Batch()


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Need of one engine on each of its `gpus`, in bytes, to hold `tokens` of `sequences` in its KV cache. `learnt`: by
    a start that failed, which told the whole of it, or only that it is `more`."""

    weights: int
    kv: int
    activations: int
    overhead: int
    tokens: int
    sequences: int = 1
    gpus: int = 1
    measured: bool = False
    learnt: Literal["told", "more"] | None = None

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The parts and their names, in the order they are told."""
        return (
            ("weights", self.weights),
            ("KV", self.kv),
            ("activations", self.activations),
            ("overhead", self.overhead),
        )

    @property
    def total(self) -> int:
        """Bytes on each GPU, all parts together."""
        return sum(size for _, size in self.parts)

    @property
    def without_kv(self) -> int:
        """Bytes on each GPU beside the KV cache."""
        return self.total - self.kv

    @property
    def margin(self) -> int:
        """Bytes to claim beyond the need while it is an estimate: engines that take more fail their start."""
        if self.learnt is not None:
            return LITTLE if self.learnt == "told" else max(MARGIN, self.without_kv // STEP_SHARE)
        return 0 if self.measured else max(MARGIN, int(self.without_kv * MARGIN_SHARE))


class Residue(msgspec.Struct, frozen=True):
    """Residue of a sleeping engine: `device` bytes on each GPU, `host` bytes of the machine's memory in all."""

    device: int
    host: int


# -- need -------------------------------------------------------------------------------------------------------------


def kv_element_bytes(dtype: str = "auto", kv_dtype: str = "auto") -> int:
    """Bytes of one element of KV cache under vLLM's `--dtype` and `--kv-cache-dtype`. Raises ModelError.

    auto: as the model computes. Newer vLLM takes fp8 by itself where a checkpoint brings scales for it; the larger is
    reckoned with.
    """
    if kv_dtype == "auto":
        return element_bytes(dtype)
    size = _KV_BYTES.get(kv_dtype)
    if size is None:
        raise ModelError(f"kv_cache_dtype is {shown(kv_dtype)}, expected auto or one of {', '.join(_KV_BYTES)}")
    return size


def kv_per_token(shape: ModelShape, *, gpus: int = 1, element: int = 2) -> int:
    """Bytes of KV cache for one more token of a short sequence, on each GPU; `element` bytes each.

    layers x KV heads / GPUs (one at least) x 2 x head_dim x bytes. MLA: layers x (kv_lora_rank + qk_rope_head_dim) x
    bytes, on every GPU.
    """
    return sum(_layer_bytes(cache, gpus, element) * cache.layers for cache in shape.caches)


def kv_per_sequence(shape: ModelShape, *, gpus: int = 1, dtype: str = "auto") -> int:
    """Bytes that each sequence keeps on each GPU, however short: the states of Mamba and linear attention."""
    return sum(_state_bytes(state, gpus, element_bytes(dtype)) for state in shape.states)


def kv_bytes(
    shape: ModelShape,
    tokens: int,
    *,
    sequences: int = 1,
    gpus: int = 1,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    step: int = SMALL_BATCH[0],
) -> int:
    """Bytes of KV cache on each GPU for `tokens` in all of `sequences`. Raises ModelError.

    Layers with a window keep of each sequence the window and a block, since it may begin within one; and the `step`
    tokens that are being computed, whosever they are.
    """
    element = kv_element_bytes(dtype, kv_dtype)
    attention = sum(
        _held(cache, tokens, sequences, step) * cache.layers * _layer_bytes(cache, gpus, element)
        for cache in shape.caches
    )
    return attention + sequences * kv_per_sequence(shape, gpus=gpus, dtype=dtype)


def need(
    shape: ModelShape,
    stored: StoredWeights,
    *,
    tokens: int,
    sequences: int = 1,
    gpus: int = 1,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    most: Batch = USUAL,
    drafted: float = 0.0,
    quantized: str | None = None,
    beside: int = 0,
    measured: Measured | None = None,
) -> Need:
    """Need of an engine on each of `gpus` to hold `tokens` (vLLM will not start with less than one whole context).

    `most`: the largest batch. `drafted`: KV cache of a drafter, as a share of the model's. `quantized`: what vLLM
    quantises to while it loads (`--quantization`). `beside`: bytes of slots for LoRA adapters, and of a draft model.
    `measured`: of this profile with these settings.
    Raises ModelError.
    """
    kv = kv_bytes(shape, tokens, sequences=sequences, gpus=gpus, dtype=dtype, kv_dtype=kv_dtype, step=most.tokens)
    estimate = Need(
        weights=on_each_gpu(stored, shape, gpus, dtype, quantized) + beside,
        kv=int(kv * (1 + drafted)),
        activations=activations(shape, most, gpus, element_bytes(dtype)),
        overhead=overhead(shape, most),
        tokens=tokens,
        sequences=sequences,
        gpus=gpus,
    )
    return estimate if measured is None else corrected(estimate, measured)


def corrected(estimate: Need, measured: Measured) -> Need:
    """The estimate with what was measured in place of all but the KV cache, whose size is wanted, not measured.

    At least FLOOR of the weights. What is less than estimated is taken from the overhead, then the activations.
    """
    return msgspec.structs.replace(with_rest(estimate, measured.without_kv), measured=True)


def with_rest(estimate: Need, told: int) -> Need:
    """The estimate with so many bytes beside the KV cache, but at least FLOOR of the weights."""
    rest = max(told, int(estimate.weights * FLOOR))
    weights = min(estimate.weights, rest)
    activations = min(estimate.activations, rest - weights)
    overhead = rest - weights - activations
    return msgspec.structs.replace(estimate, weights=weights, activations=activations, overhead=overhead)


def asleep(need: Need, level: Literal[1, 2], *, unified: bool = False) -> Residue:
    """Residue of the engine while it sleeps. Level 1 holds the weights in host memory, level 2 drops them. `unified`:
    GPU and host share one memory, in which its processes count too; it sleeps at level 2 there.

    The residue on the GPU is the same at both levels, and not above what the engine needs awake. A measurement replaces
    both: `Size.with_sleep`.
    """
    if unified:
        return Residue(min(RESIDUE + PROCESSES, need.total), 0)
    several = NCCL + max(0, need.overhead - CONTEXT) if need.gpus > 1 else 0
    return Residue(min(RESIDUE + several, need.total), int(need.weights * need.gpus * PINNED) if level == 1 else 0)


def arithmetic(need: Need) -> str:
    """The parts of a need in GiB, for people: `weights 131.4, KV 8.0 for 8,192 tokens, ...`."""
    held = f" for {need.tokens:,} tokens"
    return ", ".join(f"{name} {gib(size)}{held if name == 'KV' else ''}" for name, size in need.parts)


def gib(size: int) -> str:
    """Bytes in GiB to one decimal, without the unit."""
    return f"{size / GIB:.1f}"


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _held(cache: Cache, tokens: int, sequences: int, step: int) -> int:
    """Tokens of which a cache holds something at once."""
    return tokens if cache.window is None else min(tokens, sequences * (cache.window - 1 + BLOCK) + step)


def _layer_bytes(cache: Cache, gpus: int, element: int) -> int:
    """Bytes of one token in one layer."""
    return split_among(cache.heads, gpus) * cache.width * element + cache.fixed


def _state_bytes(state: LayerState, gpus: int, element: int) -> int:
    channels = split_among(state.channels, gpus) + split_among(state.groups, gpus) * state.group_channels
    recurrent = split_among(state.recurrent, gpus) * (state.recurrent_bytes or element)
    return state.layers * (channels * state.kept * element + recurrent)
