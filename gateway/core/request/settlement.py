"""Settlement of a call: the tokens it is charged once it has ended.

Where the engine reported the usage of the whole answer, its numbers count, bounded by what is possible. An answer may
be cut short by either side. Then the charge is the prompt, the output that the engine reported, and the most that it
can have written since that report. The last part assumes the engine's fastest recent pace. So an estimate is high
rather than low, and never above what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gateway.core.request.call import Call

MOST = 2**20  # tokens of one sequence, where no engine reports its context
TURNS = 16  # turns of a model and its tools, whose tokens a response sums up
PER_BYTE = 1.2  # tokens at most
PER_CALL, PER_MESSAGE = 4096, 64  # tokens at most of a chat template


def clamped_usage(
    call: Call, size: int, prompt: int, completion: int, context_of: Callable[[str], int | None]
) -> tuple[int, int]:
    """The prompt and completion tokens that an engine reported, each clamped to what is possible.

    Bounds are the `size` of the body in bytes, the client's limit, and the context of the model's engines in tokens
    (`context_of`; None: not known). So one wrong number cannot lock a tenant out.
    """
    if prompt <= PER_CALL and completion <= (call.shaped or call.asked) * call.n:
        return prompt, completion  # nearly every call
    context = context_of(call.model)
    longest = MOST if context is None else context
    if call.route.continues:  # it may continue another response that is not in its body
        return min(prompt, TURNS * longest), min(completion, TURNS * longest)
    times = max(1, call.messages)
    text = PER_BYTE * size * (times if call.route.pairs else 1)
    read = text + PER_CALL + PER_MESSAGE * times + call.media * longest
    longest_output = min(call.shaped or call.max_tokens or longest, longest)
    return min(prompt, times * longest, int(read)), min(completion, longest_output * call.n)


def possible_output(call: Call, known: int, seconds: float, pace: float) -> int:
    """Tokens that an engine may have written, over all the call's sequences, no more than was asked for.

    They are the `known` ones, and those of the `seconds` since, at `pace` seconds per token of each sequence.
    """
    if not call.asked:
        return 0
    most = (call.shaped or call.asked) * call.n
    return min(most, known + math.ceil(max(0.0, seconds) / pace) * call.n)
