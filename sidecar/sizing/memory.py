"""GPU memory that a model needs: weights + KV cache + activations + overhead, in bytes on each GPU.

The bytes that vLLM takes of the GPU are another figure, the one for a ledger: claim.py. A measurement of a profile
replaces its estimate: `Measured`.

Working memory is activations, logits, CUDA graphs and CUDA itself. vLLM measures it at its start, by a step of the
largest size. The terms are the buffers of that step; a fit on published starts of vLLM 0.9 to 0.33 gave their factors
(`make corpus` prints it).
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
CONTEXT = 614 * MIB  # 0.6 GiB: the CUDA context, libraries, and what NCCL and torch keep
DELTA_NET = GIB  # workspace of gated delta nets (Qwen3-Next and after)
LOGIT = 4  # bytes: the sampler works in 32 bits
GRAPH = 336 * 1024  # bytes that one captured batch size takes in each layer
EXPERTS = 2  # times as much in layers of experts
GRAPHS = 50 * MIB  # whatever is captured
LARGEST_GRAPH = 512  # sequences, vLLM's limit by itself
LARGE = 70 * GIB  # of such GPUs vLLM's server takes larger batches by itself
SMALL_BATCH, LARGE_BATCH = (2048, 256), (8192, 1024)  # tokens computed at once, and sequences


# -- working memory ---------------------------------------------------------------------------------------------------


class Batch(msgspec.Struct, frozen=True):
    """The largest batch that an engine runs: `tokens` computed at once (`--max-num-batched-tokens`) of `sequences`
    (`--max-num-seqs`). `eager`: without CUDA graphs (`--enforce-eager`)."""

    tokens: int = SMALL_BATCH[0]
    sequences: int = SMALL_BATCH[1]
    eager: bool = False


def batch(total: int, tokens: int | None = None, sequences: int | None = None, *, eager: bool = False) -> Batch:
    """The batch of an engine on GPUs of `total` bytes, where the operator does not say.

    vLLM's server takes the larger one from 70 GiB up, except on an A100; the sidecar does not know a GPU's name, so an
    A100 is taken to need more than it does.
    """
    usual = LARGE_BATCH if total >= LARGE else SMALL_BATCH
    return Batch(tokens or usual[0], sequences or usual[1], eager)


def activations(shape: ModelShape, most: Batch, gpus: int = 1, element: int = 2) -> int:
    """Bytes of the step's buffers.

    logits: sequences x vocabulary x 4; a dense layer: tokens x (3 x intermediate / GPUs + 4 x hidden); experts: tokens
    x experts per token x 2 x (expert intermediate / GPUs + hidden); gated delta nets: 1 GiB.
    """
    dense = 3 * split_among(shape.intermediate, gpus) + 4 * shape.hidden
    experts = shape.experts_per_token * 2 * (split_among(shape.expert_intermediate, gpus) + shape.hidden)
    logits = most.sequences * shape.vocabulary * LOGIT
    return logits + most.tokens * (dense + experts) * element + (DELTA_NET if shape.delta_net else 0)


def overhead(shape: ModelShape, most: Batch) -> int:
    """Bytes of CUDA itself and of its graphs, which vLLM 0.21 to 0.25 count as part of their share."""
    return CONTEXT + (0 if most.eager else graphs(shape, most.sequences))


def graphs(shape: ModelShape, sequences: int) -> int:
    """Bytes of CUDA graphs: one for each batch size up to twice the `sequences`, in each layer."""
    each = GRAPH * (EXPERTS if shape.experts_per_token else 1)
    return GRAPHS + captured(sequences) * shape.layers * each


def captured(sequences: int) -> int:
    """The number of batch sizes that vLLM captures: 1, 2, 4, each eighth to 256, each sixteenth to 512."""
    largest = min(LARGEST_GRAPH, 2 * sequences)
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, LARGEST_GRAPH + 1, 16))
    return sum(size <= largest for size in sizes)


def split_among(parts: int, gpus: int) -> int:
    """The share of one of `gpus` in `parts` that are divided among them; where they do not go round, one each."""
    return -(-parts // gpus)


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
