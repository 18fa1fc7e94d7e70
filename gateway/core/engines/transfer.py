"""Prefill elsewhere: whether another engine reads a call's prompt, and the call's own engine fetches the KV cache.

    here   = predicted TTFT on the chosen engine, which reads the prompt itself
    there  = max(read + moved, queued) + step
    read   = predicted TTFT of the prompt on the engine that would read it
    moved  = prompt tokens that the chosen engine lacks / its measured transfer rate
    queued = time until the chosen engine has read the prompts that it was sent before

The prompt is read there if the first token comes sooner so. It is also read there in two cases for the sake of streams
that the chosen engine writes now. Reading it here would break their target for the time per token: R seconds of reading
make each token of a stream of n tokens slower by R / n. Or the streams of the chosen engine lose more than the call
gains: each second of reading is worth LOST seconds for each call of the engine that reads. Without that the engines of
a split fleet read prompts themselves, until their streams are slow, while those that read for others are idle. `where`
decides once a call, at its grant, by the predictions that the choice has made anyway. Pure; `now` is monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from gateway.core.engines.choice import Choice, cached_tokens, predicted_ttft, usable_of
from gateway.core.engines.engine import Engine
from gateway.core.engines.speed import PREFILL_RATE
from gateway.core.request.call import Call

LOST = 0.06  # of the time to read a prompt, that each other call of the engine that reads is worth
WORTH_MOVING = 0.05  # seconds of reading; less is read sooner than asked for
AT_MOST = 3.0  # times the wait here that a call may have elsewhere for the sake of other streams
WITHIN = 3.0  # times its prediction that a prefill engine may take
LEAST_WITHIN = 1.0  # seconds that it may always take
UNKNOWN_WITHIN = 30.0  # seconds that an engine may take whose speed is not known yet
# Reasons to read the prompt there, then those to read it here.
SOONER, CROWDED, STALLS = "sooner", "crowded", "stalls"
SHORT, NO_ENGINE, LATER = "short", "no_engine", "later"


class Prefill(msgspec.Struct, frozen=True, gc=False):
    """Decision about one prompt. `engine` reads it; None: the call's own does. `reason`: one of the words above.

    `here` and `there`: predicted seconds to the first token, `there` 0 if no engine was compared. `unread`: prompt
    tokens that `engine` has to read. `moved`: those that the call's own engine fetches. `within`: seconds that the
    reading may take. `priority`: what the engine is told, as in Grant.
    """

    engine: Engine | None
    reason: str
    here: float
    there: float = 0.0
    unread: int = 0
    moved: int = 0
    priority: int = 0
    within: float = 0.0


def where(
    call: Call, choice: Choice, readers: Sequence[Engine], targets: Mapping[str, float], now: float
) -> Prefill | None:
    """Decide where the prompt of a call for `choice` is read. None: no other engine could ever read it.

    `readers`: engines of the model that read prompts for others. `targets`: seconds per output token, by class.
    """
    engine = choice.engine
    group = engine.transfers.group
    if not call.splits or not group:
        return None
    others = [each for each in readers if each.transfers.group == group and each is not engine]
    if not others:
        return None
    here = choice.ttft
    if choice.prefill < WORTH_MOVING * engine.speed.prefill_rate:
        return Prefill(None, SHORT, here)
    best = _soonest(call, others, now)
    if best is None:
        return Prefill(None, NO_ENGINE, here)
    reader, unread, read = best
    queued = engine.prefills.ahead(now) / engine.speed.prefill_rate
    there = max(read + choice.prefill / engine.transfers.rate(now), queued) + engine.speed.tpot
    reason = LATER
    if there < here:
        reason = SOONER
    elif now + there <= call.ttft_by:
        if there + _lost(reader, unread) < here + _lost(engine, choice.prefill):
            reason = CROWDED
        elif there < AT_MOST * here and stalls(engine, choice.prefill, targets, now):
            reason = LATER if stalls(reader, unread, targets, now) else STALLS
    if reason == LATER:
        return Prefill(None, LATER, here, there)
    return Prefill(reader, reason, here, there, unread, choice.prefill, within=_within(reader, read))


def _lost(engine: Engine, unread: int) -> float:
    """Seconds that reading so many prompt tokens is worth to the other calls of the engine."""
    return LOST * engine.ledger.in_flight * unread / engine.speed.prefill_rate


def _within(reader: Engine, read: float) -> float:
    """Seconds that the reading may take, which is predicted to take `read`."""
    least = UNKNOWN_WITHIN if reader.speed.prefill_rate == PREFILL_RATE else LEAST_WITHIN
    return max(least, WITHIN * read)


def _soonest(call: Call, others: Sequence[Engine], now: float) -> tuple[Engine, int, float] | None:
    """The engine with room for the prompt that has read it first, others' calls counted, the tokens that it has to
    read, and the seconds."""
    best: tuple[Engine, int, float] | None = None
    least = math.inf
    for engine in usable_of(others, now):
        if engine.transfers.shunned(now) or not engine.ledger.fits(call.prompt_tokens, call.class_name):
            continue
        unread = max(1, call.prompt_tokens - cached_tokens(engine, call))
        read = predicted_ttft(engine, unread, now)
        cost = read + _lost(engine, unread)
        if cost < least:
            best, least = (engine, unread, read), cost
    return best


def stalls(engine: Engine, unread: int, targets: Mapping[str, float], now: float) -> bool:
    """Whether reading so many prompt tokens more makes streams of the engine miss their target for time per token."""
    ledger = engine.ledger
    target = min([targets[name] for name, (_, calls) in ledger.used.items() if calls and name in targets], default=0.0)
    if not target or not ledger.output_held:
        return False
    reading = engine.prefills.reading(unread, now) / engine.speed.prefill_rate
    return engine.speed.tpot + reading * ledger.in_flight / ledger.output_held > target
