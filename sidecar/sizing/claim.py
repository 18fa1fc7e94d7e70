"""Claim: the bytes of each GPU that vLLM takes for a model, which is a share of the GPU and not the model's need.

Starts that failed have taught some of it. A model whose profile gives no `context_length` gets its own context, or the
longest that fits.

`--gpu-memory-utilization` is that share. The part that the model leaves becomes KV cache, unless
`--kv-cache-memory-bytes` (vLLM 0.10.2) caps that. A ledger of the GPU must hold the claim, and vLLM does not start
unless the whole share is free, capped or not.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Literal

import msgspec

from gateway.shared.files.units import GIB, MIB
from sidecar.core.lesson import Lesson
from sidecar.core.profile import KvMemory
from sidecar.sizing.memory import FLOOR, LITTLE, MARGIN, STEP_SHARE, Need, arithmetic, gib, with_rest
from sidecar.sizing.model_config import ModelShape

MOST = 970  # thousandths of a GPU that are claimed unless the operator says more: the driver keeps some
UNIFIED_MOST = 900  # the same where the memory is the host's, whose system and programs need the rest
NOTHING_LEARNT = Lesson(settings="-")
OWN_CONTEXT = 544 * MIB  # 0.53 GiB: an H100's CUDA context, taken before vLLM looks at what is free
UNKNOWN_CONTEXT = GIB  # of KV cache: what is claimed more for a model of which nothing else is known
STEP = 1024  # tokens: a context that is not the model's own is a multiple of it
LEAST = 4 * STEP  # a GPU that has no room for that is too small


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Claim on each GPU of `total`: `bytes`, `kv` of them KV cache. `utilization` is the flag to start it
    with. `said`: by whom the amount was chosen."""

    bytes: int
    kv: int
    total: int
    thousandths: int
    said: Literal["auto", "utilization", "kv"]

    @property
    def utilization(self) -> float:
        """For `--gpu-memory-utilization`."""
        return self.thousandths / 1000

    @property
    def start_needs(self) -> int:
        """Free bytes that vLLM asks for before it loads anything, even where its KV cache is capped."""
        return _share(self.total, self.thousandths)


def claim(
    need: Need, total: int, *, utilization: float | None = None, kv: int | None = None, most: int | None = None
) -> Claim:
    """Claim on a GPU of `total` bytes; never more than it has.

    `total` is CUDA's, of which vLLM takes shares; NVML's is larger (`cuda_total`). `utilization` (0..1): that share of
    it. `kv` bytes: the KV cache is capped at them. Neither: the least share in which the need and its margin fit, up to
    MOST, or up to `most` bytes, where the sidecar chooses. `refuse_reason` says whether it fits.
    """
    limit = _limit(total, utilization, most)
    said: Literal["auto", "utilization", "kv"]
    if utilization is not None:
        said, thousandths, taken = "utilization", limit, _share(total, limit)
    else:
        wanted = need.margin + (need.total if kv is None else need.without_kv + kv)
        thousandths = min(limit, _thousandths(wanted, total))
        share = _share(total, thousandths)
        said, taken = ("auto", share) if kv is None else ("kv", min(wanted, share))
    free = max(0, taken - need.without_kv)
    return Claim(bytes=taken, kv=free, total=total, thousandths=thousandths, said=said)


def largest_claim(total: int, memory: Literal["auto"] | float | KvMemory, most: int) -> int:
    """Bytes of the largest claim for a profile's `gpu_memory`, where the sidecar claims `most` bytes at most."""
    return _share(total, _limit(total, memory if isinstance(memory, float) else None, most))


def cuda_total(total: int) -> int:
    """Bytes of a GPU as CUDA reports them, from NVML's, where they are not known: rather too few.

    Published pairs in GiB: A100 80.0 and 79.25, H100 79.65 and 79.19, L40S 44.99 and 44.39, 4090 23.99 and 23.52, T4
    15.0 and 14.56.
    """
    return total - min(768 * MIB, total // 32)


def refuse_reason(shape: ModelShape, need: Need, claim: Claim, present: int) -> str | None:
    """The reason why the model can never run so on a machine of `present` GPUs, for its operator; None: it can."""
    gpus = need.gpus
    if gpus > present:
        return f"needs {gpus} GPUs (tensor_parallel), the sidecar has {present}"
    if shape.heads % gpus:
        fit = ", ".join(str(count) for count in range(1, present + 1) if shape.heads % count == 0)
        return f"tensor_parallel {gpus} does not divide the model's {shape.heads} attention heads: use one of {fit}"
    # An operator's own share is tried: what an estimate finds too small may be measured otherwise. But not where the
    # weights cannot fit, however they are quantised, and not again where a start told what it needs.
    tried = claim.said == "utilization" and not need.learnt
    if need.total <= claim.bytes or (tried and int(need.weights * FLOOR) < claim.bytes):
        return None
    least = _thousandths(need.total, claim.total)
    if claim.said == "kv" and least <= MOST:
        return (
            f"needs a KV cache of {gib(need.kv)} GiB for {need.tokens:,} tokens, and gpu_memory caps it at "
            f"{gib(claim.kv)}: raise the cap or lower context_length"
        )
    where, has = ("its GPU", "which has") if gpus == 1 else (f"each of {gpus} GPUs", "each has")
    told = f"needs {gib(need.total)} GiB on {where} ({arithmetic(need)}), {has} {gib(claim.total)}"
    if least <= MOST:
        return f"{told} and gpu_memory gives {gib(claim.bytes)} of them: give it {least / 1000:g} or more"
    return (
        f"{told}, of which an engine can have {gib(_share(claim.total, MOST))}: use more GPUs (tensor_parallel), "
        "a lower context_length, an fp8 KV cache or a quantised model"
    )


def _limit(total: int, utilization: float | None, most: int | None) -> int:
    """The largest share, in thousandths."""
    if utilization is not None:
        return min(1000, max(1, round(utilization * 1000)))
    return MOST if most is None else max(1, min(MOST, most * 1000 // total))


def _share(total: int, thousandths: int) -> int:
    return -(-total * thousandths // 1000)


def _thousandths(wanted: int, total: int) -> int:
    """The least share of `total` that holds `wanted`."""
    return max(1, -(-wanted * 1000 // total))


# -- lessons of failed starts -----------------------------------------------------------------------------------------


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


# -- context ----------------------------------------------------------------------------------------------------------


def choose_context(
    own: int,
    given: int | None,
    memory: Literal["auto"] | float | KvMemory,
    cuda: int,
    lesson: Lesson,
    alone: Callable[[int], Need],
    most: int = MOST,
) -> tuple[int, int]:
    """The context of a model whose own is `own`, as `given` or else the longest that fits; and the bytes of the largest
    claim on a GPU of which CUDA reports `cuda`, in which `most` thousandths may be claimed. `alone`: what one sequence
    of so many tokens needs."""
    room = largest_claim(cuda, memory, largest_share(lesson, cuda, alone(min(own, LEAST)).total, most))
    return given or longest_context(own, lambda tokens: _has_room(alone(tokens), memory, room)), room


def longest_context(own: int, fits: Callable[[int], bool]) -> int:
    """The longest context of at most `own` tokens, which is the model's, that `fits`; LEAST where none does.

    What does not fit must not fit when it is longer. A shorter one than `own` is a multiple of STEP.
    """
    if own <= LEAST or fits(own):
        return own
    shorter = range(LEAST // STEP + 1, -(-own // STEP))
    fitting = bisect.bisect_left(shorter, True, key=lambda steps: not fits(steps * STEP))
    return LEAST + fitting * STEP


def _has_room(need: Need, memory: Literal["auto"] | float | KvMemory, room: int) -> bool:
    """Whether a claim of at most `room` bytes holds the need, with a margin: a context that just fits by estimate
    would make the first start fail. The margin is at most as large as the KV cache: where weights leave little, half
    of it is the context's. Some margin is kept even after a measurement, as the next start differs a little.
    """
    capped = isinstance(memory, KvMemory) and need.kv > memory.kv
    return not capped and need.total + max(min(need.margin, need.kv), LITTLE) <= room


def context_words(context: int, own: int) -> str:
    """A chosen context, for people."""
    return f"context {context:,} of {own:,}: what fits"
