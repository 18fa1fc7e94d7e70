"""GPU memory that an engine works in, beside weights and KV cache: activations, logits, CUDA graphs, CUDA itself.

vLLM measures it at its start, by a step of the largest size. The terms are the buffers of that step; a fit on published
starts of vLLM 0.9 to 0.33 gave their factors (`make corpus` prints it). Sizes are bytes on each GPU.
"""

from __future__ import annotations

import msgspec

from gateway.shared.files.units import GIB, MIB
from sidecar.sizing.model_config import ModelShape

CONTEXT = 614 * MIB  # 0.6 GiB: the CUDA context, libraries, and what NCCL and torch keep
DELTA_NET = GIB  # workspace of gated delta nets (Qwen3-Next and after)
LOGIT = 4  # bytes: the sampler works in 32 bits
GRAPH = 336 * 1024  # bytes that one captured batch size takes in each layer
EXPERTS = 2  # times as much in layers of experts
GRAPHS = 50 * MIB  # whatever is captured
LARGEST_GRAPH = 512  # sequences, vLLM's limit by itself
LARGE = 70 * GIB  # of such GPUs vLLM's server takes larger batches by itself
SMALL_BATCH, LARGE_BATCH = (2048, 256), (8192, 1024)  # tokens computed at once, and sequences


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
