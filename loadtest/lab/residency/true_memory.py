"""Memory that an engine really takes where the estimate is wrong, with vLLM's complaints.

Sizes are by the sidecar's own sums and the lines are vLLM's, so diagnosis and lessons are tried too. Bytes are on
each GPU.
"""

from __future__ import annotations

import msgspec

from loadtest.engine.memory_stages import GIB, residue
from sidecar.core.engine_records import Unusable
from sidecar.core.inventory import Size
from sidecar.core.lesson import Lesson
from sidecar.sizing.claim import claim, refuse_reason
from sidecar.sizing.memory import Need
from sidecar.sizing.model_config import shape_from
from sidecar.sizing.taught import cuda_of, largest_share, taught

CONTEXT = GIB // 2  # what CUDA's context takes before vLLM looks at what is free
SHAPE = shape_from(b'{"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 8}')


class TrueMemory(msgspec.Struct, frozen=True, kw_only=True):
    """`rest`: what its share has to hold beside the KV cache; `context`: KV cache of one whole context; `beyond`: taken
    beside its share; `blocks`: sequences for which a hybrid model's states have room, None: it is none. `hidden`: of a
    GPU's bytes those that CUDA does not report."""

    rest: int
    context: int
    beyond: int = 0
    blocks: int | None = None
    hidden: int = 0

    def complaint(self, size: Size, free: int, total: int) -> str:
        """Why vLLM does not start on GPUs of `total` bytes by NVML with `free` of them, in its words; empty: it
        does."""
        cuda = total - self.hidden
        share = int((size.share or 0.0) * cuda)
        left = share - self.rest
        told = min(free, cuda) - CONTEXT
        if told < share:
            return (
                f"ValueError: Free memory on device cuda:0 ({told / GIB:.2f}/{cuda / GIB:.2f} GiB) on "
                f"startup is less than desired GPU memory utilization ({size.share}, {share / GIB:.2f} GiB). Decrease "
                "GPU memory utilization or reduce GPU memory used by other processes."
            )
        if left <= 0:
            return "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
        if left < self.context:
            return (
                "ValueError: To serve at least one request with the models's max seq len (8192), "
                f"({self.context / GIB:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
                f"({left / GIB:.2f} GiB). Based on the available memory, the estimated maximum model length is 100."
            )
        if self.blocks is not None and (size.sequences or 1024) > self.blocks:
            return f"ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks ({self.blocks})."
        return ""

    def takes(self, size: Size) -> int:
        """What it holds once it runs."""
        return size.start_needs - size.beyond + self.beyond


def estimated(weights: int, taken: int, total: int, lesson: Lesson) -> Size:
    """The size of a model of which the estimate is `taken`, an eighth of it KV cache of a context. Raises Unusable."""
    kv = taken // 8
    alone = Need(weights=weights, kv=kv, activations=taken - kv - weights, overhead=0, tokens=8192, measured=True)
    least, cuda = taught(alone, lesson, kv), cuda_of(total, lesson)
    made = claim(least, cuda, most=largest_share(lesson, cuda, least.total))
    why = refuse_reason(SHAPE, least, made, 8)
    if why is not None:
        raise Unusable(why)
    beyond = min(lesson.beyond, total - made.start_needs)
    return Size(
        claim=made.bytes + beyond,
        start_needs=made.start_needs + beyond,
        residue=residue(made.bytes),
        host=weights,
        share=made.utilization,
        sequences=lesson.sequences,
        context=least.kv,
        beyond=beyond,
        arithmetic="sim",
    )
