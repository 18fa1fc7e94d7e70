"""Estimates of GPU memory with what starts that failed have taught. Sizes are bytes on each GPU."""

from __future__ import annotations

import math

import msgspec

from gateway.shared.files.units import GIB, MIB
from sidecar.core.lesson import Lesson
from sidecar.sizing.claim import MOST, Claim, cuda_total
from sidecar.sizing.memory import LITTLE, MARGIN, STEP_SHARE, Need, gib, with_rest

NOTHING_LEARNT = Lesson(settings="-")
OWN_CONTEXT = 544 * MIB  # 0.53 GiB: an H100's CUDA context, taken before vLLM looks at what is free
UNKNOWN_CONTEXT = GIB  # of KV cache: what is claimed more for a model of which nothing else is known


def taught(need: Need, lesson: Lesson, context: int) -> Need:
    """The need with what a start told of the rest, and of the KV cache of its context, which is estimated at `context`
    bytes. What is more than estimated counts as overhead."""
    if lesson.context:
        kv = max(need.kv, need.kv * lesson.context // context if context else lesson.context)
        need = msgspec.structs.replace(need, kv=kv)
    if not lesson.rest:
        return need
    rest = with_rest(need, lesson.rest if lesson.exact else max(lesson.rest, need.without_kv))
    return msgspec.structs.replace(rest, learnt="told" if lesson.exact else "more")


def cuda_of(total: int, lesson: Lesson) -> int:
    """CUDA's bytes of a GPU of `total` by NVML: as a start told, else as is known of such GPUs."""
    return min(lesson.cuda, total) if lesson.cuda and lesson.total == total else cuda_total(total)


def largest_share(lesson: Lesson, cuda: int, least: int, most: int = MOST) -> int:
    """The largest share to be asked for, of at most `most` thousandths: with room beside it for what the engine takes
    there, and not more than was free. But for what it needs at `least` in whole thousandths, which is tried again once
    there is more room."""
    least = -(-cuda * -(-least * 1000 // cuda) // 1000)
    limit = max(least, -(-cuda * most // 1000) - max(lesson.beyond, lesson.over))
    return limit if lesson.most is None or lesson.most < least else min(limit, lesson.most)


def beside(share: int, lesson: Lesson, cuda: int, total: int, graphs: int = 0) -> int:
    """Return the bytes that an engine takes beside a share of `share` bytes: its CUDA context and `graphs`, its CUDA
    graphs, which vLLM 0.26 and later do not count as part of the share; or more if a start said so.

    Above MOST thousandths of the GPU the room for the context is unknown, so such shares are tried. Share and context
    together never count as the whole GPU, because no GPU has all its memory free.
    """
    own = max(0, min(OWN_CONTEXT + graphs, cuda * MOST // 1000 - share))
    return max(0, min(max(lesson.beyond, own), total * MOST // 1000 - share))


def no_room_reason(claim: Claim, lesson: Lesson, total: int) -> str | None:
    """The reason why a GPU of `total` bytes has no room beside the least share that a model can have, for its operator;
    None: it may have. An operator's own share is tried: a lower one is advised where it has failed."""
    if claim.said == "utilization" or not lesson.over or math.ceil(claim.utilization * total) + lesson.over < total:
        return None
    return (
        f"needs {gib(claim.start_needs)} GiB of a GPU and more than {gib(lesson.over)} GiB beside them, by what failed "
        f"starts told, and it has {gib(total)}: use more GPUs (tensor_parallel), a lower context_length, smaller flags "
        "max-num-seqs and max-num-batched-tokens, or a quantised model"
    )


def taught_share(share: float, total: int, lesson: Lesson) -> float:
    """The share (0..1) of a model that nothing else is known of."""
    cuda = cuda_of(total, lesson)
    margin = LITTLE if lesson.exact else max(MARGIN, lesson.rest // STEP_SHARE)
    needs = lesson.rest + (lesson.context or UNKNOWN_CONTEXT) + margin if lesson.rest else 0
    most = min(MOST, largest_share(lesson, cuda, 0) * 1000 // cuda)
    return max(1, min(most, max(round(share * 1000), -(-needs * 1000 // cuda)))) / 1000
