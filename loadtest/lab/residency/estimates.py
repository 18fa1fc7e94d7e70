"""Estimate of a simulated model's memory, by the sidecar's own sums, with what failed starts have taught."""

from __future__ import annotations

from loadtest.engine.memory_stages import residue
from sidecar.core.engine_records import Unusable
from sidecar.core.inventory import Size
from sidecar.core.lesson import Lesson
from sidecar.sizing.claim import claim, refuse_reason
from sidecar.sizing.memory import Need
from sidecar.sizing.model_config import shape_from
from sidecar.sizing.taught import beside, cuda_of, largest_share, no_room_reason, taught

SHAPE = shape_from(b'{"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 8}')


def estimated(weights: int, taken: int, total: int, lesson: Lesson) -> Size:
    """The size of a model of which the estimate is `taken`, an eighth of it KV cache of a context. Raises Unusable."""
    kv = taken // 8
    alone = Need(weights=weights, kv=kv, activations=taken - kv - weights, overhead=0, tokens=8192, measured=True)
    least, cuda = taught(alone, lesson, kv), cuda_of(total, lesson)
    made = claim(least, cuda, most=largest_share(lesson, cuda, least.total))
    why = refuse_reason(SHAPE, least, made, 8) or no_room_reason(made, lesson, total)
    if why is not None:
        raise Unusable(why)
    beyond = beside(made.start_needs, lesson, cuda, total)
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
