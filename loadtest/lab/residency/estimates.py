"""Estimate of a simulated model's memory, by the sidecar's own sums, with what failed starts have taught."""

from __future__ import annotations

import msgspec

from loadtest.engine.memory_stages import residue
from sidecar.core.engine_records import Unusable
from sidecar.core.inventory import Size
from sidecar.core.lesson import Lesson
from sidecar.sizing import claim as claims
from sidecar.sizing.memory import Need
from sidecar.sizing.model_config import shape_from

SHAPE = shape_from(b'{"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 8}')


TOKENS = 8192  # of a context that is given


def estimated(weights: int, taken: int, total: int, lesson: Lesson, context: int = 0, own_context: int = 0) -> Size:
    """The size of a model of which the estimate is `taken`, `context` of it KV cache of a context, 0: an eighth; of
    `own_context` tokens, where fewer may be chosen, 0: they are given. Raises Unusable."""
    kv, cuda = context or taken // 8, claims.cuda_of(total, lesson)
    whole = own_context or TOKENS

    def alone(tokens: int) -> Need:
        rest = taken - kv - weights
        need = Need(
            weights=weights, kv=kv * tokens // whole, activations=rest, overhead=0, tokens=tokens, measured=True
        )
        return claims.taught(need, lesson, kv * (lesson.tokens or whole) // whole)

    own = min(whole, lesson.longest or whole)
    chosen, room = claims.choose_context(own, None if own_context else whole, "auto", cuda, lesson, alone)
    least = alone(chosen)
    wanted = least if chosen == own else msgspec.structs.replace(least, kv=room)
    made = claims.claim(wanted, cuda, most=claims.largest_share(lesson, cuda, least.total))
    why = claims.refuse_reason(SHAPE, least, made, 8) or claims.no_room_reason(made, lesson, total)
    if why is not None:
        raise Unusable(why)
    beyond = claims.beside(made.start_needs, lesson, cuda, total)
    return Size(
        claim=made.bytes + beyond,
        start_needs=made.start_needs + beyond,
        residue=residue(made.bytes),
        host=weights,
        share=made.utilization,
        sequences=lesson.sequences,
        context=least.kv,
        context_length=chosen if chosen < own else None,
        beyond=beyond,
        arithmetic="sim",
    )
