"""Sizes of engines whose model's files are not known, or that are simulated: shares of the GPU."""

from __future__ import annotations

from gateway.shared.files.units import GIB
from sidecar.core.engine_records import Unusable
from sidecar.core.inventory import Size
from sidecar.core.lesson import Lesson
from sidecar.core.profile import KvMemory, Profile
from sidecar.sizing import claim as claims
from sidecar.sizing.memory import LITTLE, PINNED, RESIDUE, gib

BY_ITSELF = 0.9  # of a GPU, where nothing is known; what vLLM takes by itself before 0.20
SIMULATED_RESIDUE = GIB  # what a simulated engine keeps asleep


def unknown(
    profile: Profile,
    total: int,
    why: str,
    lesson: Lesson = claims.NOTHING_LEARNT,
    *,
    comes: bool = False,
    stored: int | None = None,
) -> Size:
    """Return the size of a model whose files are missing or not understood: as much as vLLM takes by itself, or as
    `gpu_memory` says, corrected by what failed starts have taught. `comes`: the files come with the first start; that
    start is then ended and repeated with the real size, unless `gpu_memory` gives a share. `stored`: bytes of the
    weights, where they are known."""
    memory = profile.gpu_memory
    share = memory if isinstance(memory, float) else claims.taught_share(BY_ITSELF, total, lesson)
    taken = _share(total, share)
    beyond = claims.beside(taken, lesson, claims.cuda_of(total, lesson), total)
    sleeps = profile.sleeps is not None
    host = taken * profile.tensor_parallel  # its weights are less
    if stored is not None:
        host = min(host, int(stored * PINNED))
    guessed = comes and not isinstance(memory, float)
    said = "as gpu_memory says" if isinstance(memory, float) else "say gpu_memory: 45%, say, if it needs less"
    anew = "once its files are here it is started anew with what it needs; hf download fetches them first"
    said = anew if guessed else said
    context = None if profile.context_length else _context(int(share * claims.cuda_of(total, lesson)), lesson)
    fits = "" if context is None else f"; {claims.context_words(context, lesson.tokens)}"
    return Size(
        claim=taken + beyond,
        start_needs=taken + beyond,
        residue=min(RESIDUE, taken) if sleeps else 0,
        host=host if sleeps else 0,
        share=share,
        sequences=lesson.sequences,
        context=claims.UNKNOWN_CONTEXT,
        context_length=context,
        beyond=beyond,
        guessed=guessed,
        arithmetic=f"{share:.0%} of each GPU, {gib(taken)} GiB: no estimate, since {why}; {said}{fits}",
    )


def _context(room: int, lesson: Lesson) -> int | None:
    """Tokens for which a share of so many bytes has room, as far as a failed start has told; None: the model's own."""
    if not lesson.exact or not lesson.tokens:
        return None

    def fits(tokens: int) -> bool:
        return lesson.rest + lesson.context * tokens // lesson.tokens + LITTLE <= room

    context = claims.longest_context(lesson.tokens, fits)
    return context if context < lesson.tokens else None


def simulated(profile: Profile, total: int, lesson: Lesson = claims.NOTHING_LEARNT) -> Size:
    """Return the size of a simulated engine, which has no files: half of its memory counts as weights. A failed start
    may have taught a larger size, unless the operator gave a share. Raises Unusable if no GPU is large enough."""
    memory = profile.gpu_memory
    share = BY_ITSELF if isinstance(memory, KvMemory) or memory == "auto" else memory
    taken = memory.kv if isinstance(memory, KvMemory) else _share(total, share)
    if lesson.rest and not isinstance(memory, float):
        taken = max(taken, min(total, lesson.rest + (lesson.context or claims.UNKNOWN_CONTEXT) + LITTLE))
    if taken > total:
        raise Unusable(f"gpu_memory is {gib(taken)} GiB, and a GPU has {gib(total)}: give it less")
    sleeps = profile.sleeps is not None
    return Size(
        claim=taken,
        start_needs=taken,
        residue=min(SIMULATED_RESIDUE, taken) if sleeps else 0,
        host=taken // 2 * profile.tensor_parallel if sleeps else 0,
        share=taken / total,
        arithmetic=f"simulated: {gib(taken)} GiB of {gib(total)} GiB on each GPU",
    )


def _share(total: int, share: float) -> int:
    return min(total, -(-total * round(share * 1000) // 1000))
