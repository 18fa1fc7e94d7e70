"""Tokens that a call is charged in the end: what its engine was made to do.

The engine's own numbers, as far as they can be true, where it told them of the whole answer. Where an answer was left
before that, whoever left it: the prompt, what the engine is known to have written, and what it can have written since
it was last heard, at the fastest pace it was lately seen to keep. So an estimate is high rather than low, and never
more than was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gateway.core.request.call import Call

MOST = 2**20  # tokens of one sequence, where no engine tells its context
TURNS = 16  # of a model and its tools, whose tokens a response is the sum of
PER_BYTE = 1.2  # tokens at most
PER_CALL, PER_MESSAGE = 4096, 64  # tokens at most of a chat template
PAIRED = ("rerank", "score")  # kinds of route that read their query once for each document


def believed(
    call: Call, size: int, prompt: int, completion: int, context_of: Callable[[str], int | None]
) -> tuple[int, int]:
    """An engine's own prompt and completion tokens, each no more than it can be: by the `size` of the body in bytes,
    what was asked for and the context of the model's engines (`context_of`; None: not known). One wrong number is not
    to shut a tenant out."""
    if prompt <= PER_CALL and completion <= (call.shaped or call.asked) * call.n:
        return prompt, completion  # nearly every call
    context = context_of(call.model)
    longest = MOST if context is None else context
    if call.route.kind == "response":  # it may go on from another that is not in its body
        return min(prompt, TURNS * longest), min(completion, TURNS * longest)
    times = max(1, call.messages)
    text = PER_BYTE * size * (times if call.route.kind in PAIRED else 1)
    read = text + PER_CALL + PER_MESSAGE * times + call.media * longest
    written = min(call.shaped or call.max_tokens or longest, longest)
    return min(prompt, times * longest, int(read)), min(completion, written * call.n)


def written(call: Call, known: int, seconds: float, pace: float) -> int:
    """Tokens that an engine can have written of all the call's sequences: `known`, and what comes in `seconds` at
    `pace` seconds a token."""
    if not call.asked:
        return 0
    most = (call.shaped or call.asked) * call.n
    return min(most, known + math.ceil(max(0.0, seconds) / pace) * call.n)
