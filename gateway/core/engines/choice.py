"""Load balancing: the choice of the engine on which a call costs least, its own wait and what others lose counted.

    cost = (prefill queued on it + own x (1 + CROWD x calls + TURNOVER x turnover)) / rate
    own = prompt tokens that the engine has not cached
    turnover = mean over the engines of the tokens promised in the last FLOW seconds / capacity

The first two terms are the call's own wait to its first token: the time to read what is queued and its own prompt. So
prefix affinity needs no rule of its own. Alone they are LPWL, "least prefill work left" (loadtest/simulate/rivals). The
others are what the call takes from others. Chunked prefill shares each step with the sequences that decode: each of the
engine's `calls` waits while the prompt is read. Reading a prompt also evicts as many cached tokens, which are asked for
again where caches turn over. Both multiply the call's own tokens, as LMetric's batch size does (OSDI 2026). The
turnover is the fleet's: an engine's own would send calls that have nothing cached to longer queues.
docs/decisions/routing.md has the measurements.

Learned rates that differ by less than ALIKE count as the fastest of them, because most of the difference is chance; an
engine that has not learned its rate counts as fast as the fastest.
An engine with too much to read (`Engine.takes`) is compared too if it has most of the call's prompt cached and another
engine has room: behind others' prompts the call may have its first token sooner than where all of its own is read.
A call whose prompt is mostly cached on an engine that is full now had better wait for it: elsewhere its prompt would be
read anew and evict as much of others'. `worth_waiting` says so for as long as the reading would take that is spared
(PATIENCE; ski rental: never more than twice the cost of either), while the call's own targets hold. Others may pass.
In a fleet that is sampled no call waits: the next look would sample other engines.
A LoRA adapter that an engine has not loaded makes its cost higher by the score of `adapters.py`. An engine that was
just started or woken, or is back from a failure, costs more for a while (slow start): its speed is unknown.
Synchronous and pure; ties are broken by `rng`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from gateway.core.engines.breaker import BreakerState, panicked
from gateway.core.engines.engine import Engine
from gateway.core.engines.speed import PREFILL_RATE, TPOT
from gateway.core.policy.policy import Routing
from gateway.core.request.call import Call

CLOSED = BreakerState.CLOSED
# Conditional expressions are in place of min() and max(): each of these costs as much as a call of one's own.
LOOKED_AT = 4  # engines whose state says enough of all
CROWD = 0.02  # of the time to read a prompt, that each call there is worth
TURNOVER = 10.0  # the same, where prompts have used all of the caches in FLOW seconds
ALIKE = 1.5  # times
NEW = 10.0  # times a call's own wait that an engine costs more at first
PATIENCE = 1.0  # seconds of waiting for each second of reading that is spared
WORTH_WAITING = 0.05  # seconds of reading spared
LOOKED_AGAIN = 1.0  # seconds: a call that waits is looked at more often
SCAN_AT_MOST = 32  # beyond this many engines, a random sample of this size (power of d choices), and likely ones


class Choice(msgspec.Struct, frozen=True, gc=False):
    """An engine that can take the call now. `prefill` is the prompt tokens it must still read; `ttft` is seconds.
    `others_full`: at least one usable engine was left out for want of room. `usable`: engines that may have the call,
    with room or without; none if they were a sample."""

    engine: Engine
    prefill: int
    cached: int
    ttft: float
    others_full: bool = False
    usable: Sequence[Engine] = ()


class Aside(msgspec.Struct, frozen=True):
    """The call waits for the full engine that has its prompt, although another has room. Others may pass the call."""


ASIDE = Aside()


def cached_tokens(engine: Engine, call: Call) -> int:
    """Prompt tokens of `call` this engine has probably cached."""
    blocks = engine.cache.leading(call.prefix)
    return call.prompt_tokens * blocks // (len(call.prefix) + 1)


def knows(engine: Engine, call: Call) -> bool:
    """Whether the engine has most of the call's prompt cached: its conversation was there."""
    return 2 * cached_tokens(engine, call) > call.prompt_tokens


def predicted_ttft(engine: Engine, prefill: int, now: float) -> float:
    """Seconds until the first token of a call with `prefill` unread prompt tokens, were it sent now."""
    return engine.speed.tpot + engine.prefills.reading(prefill, now) / engine.speed.prefill_rate


def newness(engine: Engine, now: float, slow_start: float) -> float:
    """Share of `slow_start` that an engine has yet to pass since it was started, woken or came back: from 1 to 0."""
    return min(1.0, max(0.0, 1.0 - (now - engine.health.back_at) / slow_start)) if slow_start else 0.0


def usable_of(engines: Sequence[Engine], now: float) -> Sequence[Engine]:
    """Engines that may receive calls: up, not draining, their breaker closed or due for a probe.

    If more than half of the breakers are open, breakers are ignored; never a provider's.
    """
    for engine in engines:
        if not engine.health.up or engine.draining or engine.breaker.state is not CLOSED:
            break
    else:
        return engines
    usable = [e for e in engines if e.health.up and not e.draining]
    allowed = [e for e in usable if e.breaker.allows(now)]
    shut = len(usable) - len(allowed)
    return usable if shut and panicked(shut, len(usable)) and not usable[0].provider else allowed


def any_idle(engines: Sequence[Engine], call: Call) -> bool:
    """Whether one of these has nothing to do and takes the call: no prediction refuses it then."""
    cost = call.cost
    return any(not engine.ledger.in_flight and cost <= engine.ledger.largest for engine in engines)


def least_ttft(engines: Sequence[Engine], call: Call, now: float) -> tuple[float, float, float]:
    """Predicted TTFT of the engine that would answer first if it had room, the part of it for reading the call's own
    prompt, and that engine's time per output token; in seconds. Looks at a few engines, for calls that have to wait."""
    best = (math.inf, 0.0, 0.0)
    for engine in engines[:LOOKED_AT]:
        ttft = predicted_ttft(engine, call.prompt_tokens, now)
        if ttft < best[0]:
            best = (ttft, call.prompt_tokens / engine.speed.prefill_rate, engine.speed.tpot)
    return best


def foreseen_ttft(engines: Sequence[Engine], call: Call, now: float) -> tuple[float, float, float]:
    """The same of engines that are not there yet: as they were, or as one is of which nothing is known."""
    reading = call.prompt_tokens / PREFILL_RATE
    return least_ttft(engines, call, now) if engines else (reading, reading, TPOT)


def choose(
    engines: Sequence[Engine],
    call: Call,
    now: float,
    *,
    routing: Routing,
    rng: random.Random,
    exclude: frozenset[str] = frozenset(),
    likely: Sequence[Engine] = (),
) -> Choice | None:
    """The best engine that can hold `call` now, or None: then it waits.

    Engines in `exclude` (already failed this call) are taken only if no other is up. `likely`: those of all engines
    that probably have its prompt cached; a sample holds them always.
    """
    sampled = len(engines) > SCAN_AT_MOST
    if sampled:
        likely = [engine for engine in likely if engine in engines]
        engines = [*likely, *[engine for engine in rng.sample(engines, SCAN_AT_MOST) if engine not in likely]]
    cost = call.cost
    usable = usable_of(engines, now)
    if exclude:
        usable = [e for e in usable if e.id not in exclude] or usable
    class_name = call.class_name
    open_ = [e for e in usable if e.takes(cost, class_name)]
    if open_ and call.prefix and len(open_) < len(usable):  # its place behind other prompts is compared, too
        open_ += [e for e in usable if knows(e, call) and e.ledger.fits(cost, class_name) and e not in open_]
    if open_ and open_[0].ledger.headrooms:
        open_ = [e for e in open_ if e.ledger.leaves_headroom(cost, class_name, now)]
    if not open_:
        return None
    others_full, seen = len(open_) < len(usable), () if sampled else usable
    if len(open_) == 1:  # there is nothing to compare
        engine = open_[0]
        cached = cached_tokens(engine, call) if call.prefix else 0
        prefill = call.prompt_tokens - cached if call.prompt_tokens > cached else 1
        return Choice(engine, prefill, cached, predicted_ttft(engine, prefill, now), others_full, seen)
    if routing.gateways > 1:
        open_ = rng.sample(open_, 2)  # what others send is not known here: never the whole herd to one engine
    else:
        first = int(rng.random() * len(open_))  # equals are taken in turn, from anywhere
        open_ = open_[first:] + open_[:first]
    return _soonest(open_, call, now, routing.slow_start, others_full=others_full, seen=seen)


def choose_by_role(
    engines: Sequence[Engine],
    call: Call,
    now: float,
    *,
    routing: Routing,
    rng: random.Random,
    exclude: frozenset[str],
    likely: Sequence[Engine] = (),
) -> Choice | None:
    """`choose`, where some engines read prompts for others: one that only reads answers what nobody else has room for,
    while it has no prompt to read. An engine that fails, or has failed the call, comes after it."""
    able = [e for e in usable_of(engines, now) if e.id not in exclude]
    answering = [e for e in able if e.transfers.answers]
    choice = choose(answering, call, now, routing=routing, rng=rng, likely=likely)
    if choice is None:
        reserve = [e for e in able if not e.transfers.answers and not e.prefills.ahead(now)]
        choice = choose(reserve, call, now, routing=routing, rng=rng)
        if choice is not None:
            return msgspec.structs.replace(choice, others_full=bool(answering))
    if choice is None and not answering:
        failed = [e for e in engines if e.transfers.answers]
        choice = choose(failed, call, now, routing=routing, rng=rng, exclude=exclude, likely=likely)
    return choice


def _soonest(
    open_: Sequence[Engine], call: Call, now: float, slow_start: float, *, others_full: bool, seen: Sequence[Engine]
) -> Choice | None:
    """Compare engines that have room by the reading that each has to do before this call's first token."""
    best: Choice | None = None
    least = math.inf
    fastest = max([e.speed.prefill_rate for e in open_ if e.speed.prefill_rate != PREFILL_RATE], default=PREFILL_RATE)
    turnover = sum([e.ledger.flow(now) / e.ledger.capacity for e in open_]) / len(open_)
    for engine in open_:
        cached = cached_tokens(engine, call) if call.prefix else 0
        prefill = call.prompt_tokens - cached if call.prompt_tokens > cached else 1
        reading, rate = engine.prefills.reading(prefill, now), engine.speed.prefill_rate
        ttft = engine.speed.tpot + reading / rate
        # The step of `ttft` is left out: one is longer by chance, and costs more cached tokens than it is worth.
        beyond = reading * (1.0 + NEW * newness(engine, now, slow_start))
        beyond += prefill * (CROWD * engine.ledger.in_flight + TURNOVER * turnover)
        beyond /= fastest if rate == PREFILL_RATE or ALIKE * rate >= fastest else rate
        if engine.adapters is not None:
            beyond /= engine.adapters.score(call.model)
        if beyond < least:
            best, least = Choice(engine, prefill, cached, ttft, others_full, seen), beyond
    return best


def worth_waiting(call: Call, choice: Choice, now: float, waited: float) -> bool:
    """Whether the call had better wait for a full engine that has most of its prompt cached than go to `choice` now.
    Only if `choice.others_full` is there such an engine. `waited`: seconds so far."""
    if not call.prefix:
        return False
    spared = reading_spared(call, choice)
    return spared > WORTH_WAITING and waited < PATIENCE * spared and _in_time(call, choice, now)


def reading_spared(call: Call, choice: Choice) -> float:
    """Seconds of reading that the call is spared by such a wait; 0: there is no such engine."""
    most, elsewhere = 0.0, choice.prefill / choice.engine.speed.prefill_rate
    for engine in choice.usable:
        full = engine is not choice.engine and not engine.ledger.fits(call.cost, call.class_name)
        if full and knows(engine, call):
            unread = call.prompt_tokens - cached_tokens(engine, call)
            most = max(most, elsewhere - unread / engine.speed.prefill_rate)
    return most


def _in_time(call: Call, choice: Choice, now: float) -> bool:
    """Whether the call can wait on and have its first token in time all the same, were that twice as late as is
    predicted: nobody is to be refused for having waited where an engine had room."""
    ttft, _, _ = least_ttft(choice.usable, call, now)
    return now + LOOKED_AGAIN + 2.0 * ttft <= min(call.ttft_by, call.deadline)
