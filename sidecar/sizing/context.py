"""Context of a model whose profile gives no `context_length`: its own, or the longest that fits."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Literal

from sidecar.core.lesson import Lesson
from sidecar.core.profile import KvMemory
from sidecar.sizing.claim import MOST, largest_claim
from sidecar.sizing.memory import LITTLE, Need
from sidecar.sizing.taught import largest_share

STEP = 1024  # tokens: a context that is not the model's own is a multiple of it
LEAST = 4 * STEP  # a GPU that has no room for that is too small


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
