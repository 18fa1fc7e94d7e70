"""Locality of sessions: an engine that knows a call's session is worth waiting for, and the call goes before its turn.

An engine *knows* a call's session if it has most of its prompt cached. A prompt that is shared by many, such as a
system prompt, makes no engine know one. Two calls are set aside, so that others pass them, though an engine has room:

- One whose session is known by a full engine, for HEAD_START seconds for each second of reading that it would be
  spared. Its own reading is not all that leaving costs: it pushes as much of others' out of the other engine, and they
  then read and leave too.
- One that no engine knows, where it would not leave sessions their room: what is kept for those that are expected back,
  and a quarter of the engine's memory, into which those under way grow. Were it let in, they would push each other out,
  and each would read everything anew, which makes it stay longer: engines with more sessions than fit do little else. A
  session that has lost its cache waits until another has ended; a call that begins one, for HEAD_START seconds for
  each second of reading.

Neither waits for longer than MOST_AHEAD, nor past the time by which it has to go to any engine that has room.

Synchronous and pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from gateway.core.engines.choice import Choice, cached_tokens, choose, knows, least_ttft, usable_of
from gateway.core.engines.fleet import Engine
from gateway.core.policy.policy import Routing
from gateway.core.request.call import Call
from gateway.core.sessions.memory import SessionMemory

HEAD_START = 10.0  # seconds before its turn, and of waiting for its engine, for each second of reading saved
MOST_AHEAD = 60.0  # seconds at most
FULL = 0.75  # of an engine's memory: what is under way grows into the rest
WORTH_WAITING = 1.0  # seconds of reading; a queue is looked at twice in that time


class Aside(msgspec.Struct, frozen=True):
    """The call waits although an engine has room for it. Others may pass it meanwhile."""


ASIDE = Aside()


def choose_for_session(
    sessions: SessionMemory,
    engines: Sequence[Engine],
    call: Call,
    now: float,
    *,
    routing: Routing,
    rng: random.Random,
    exclude: frozenset[str] = frozenset(),
    waited: float = 0.0,
) -> Choice | Aside | None:
    """The best engine for the call, by `choose`; ASIDE: it had better wait; None: no engine has room. `waited`:
    seconds so far."""
    patience = MOST_AHEAD
    if not sessions.returns(call):
        rate = max([engine.prefill_rate for engine in engines], default=1.0)
        patience = min(patience, HEAD_START * call.cost / rate)
    patient = waited < patience and _in_time(engines, call, now)

    def leaves(engine: Engine) -> bool:
        kept = sessions.spoken_for(engine.id, engine.budget, call) if patient else 0
        if not patient or not (kept or engine.in_flight):
            return True
        return engine.load + call.cost + kept <= FULL * engine.capacity

    choice = choose(engines, call, now, routing=routing, rng=rng, exclude=exclude, leaves=leaves)
    if choice is None:
        fits = patient and any(engine.fits(call.cost, call.class_name) for engine in usable_of(engines, now))
        return ASIDE if fits else None
    saved = saved_by_waiting(engines, call, choice, now) if patient else 0.0
    return ASIDE if saved > WORTH_WAITING and waited < HEAD_START * saved else choice


def _in_time(engines: Sequence[Engine], call: Call, now: float) -> bool:
    """Whether the call can wait on and have its first token in time all the same, were that twice as late as is
    predicted: nobody is to be refused for having waited where an engine had room."""
    ttft, _, _ = least_ttft(usable_of(engines, now), call, now)
    return now + WORTH_WAITING + 2.0 * ttft <= min(call.ttft_by, call.deadline)


def saved_by_waiting(engines: Sequence[Engine], call: Call, choice: Choice, now: float) -> float:
    """Seconds of reading that the call is spared if it waits for an engine that knows its session and is full, in place
    of going to `choice` now; 0: none does."""
    most = 0.0
    for engine in usable_of(engines, now):
        if engine is not choice.engine and knows(engine, call) and not engine.fits(call.cost, call.class_name):
            spared = choice.prefill - (call.prompt_tokens - cached_tokens(engine, call))
            most = max(most, spared / engine.prefill_rate)
    return most


def saved_by_cache(engines: Sequence[Engine], call: Call, now: float) -> float:
    """Seconds of reading that the call is spared by an engine that knows its session, at most; 0: none does."""
    known = [cached_tokens(engine, call) / engine.prefill_rate for engine in engines if knows(engine, call)]
    return max(known, default=0.0)


def seconds_ahead(sessions: SessionMemory | None, engines: Sequence[Engine], call: Call, now: float) -> float:
    """Seconds by which the call goes before its turn among its tenant's, by its agent's hint and its session; below 0:
    after it."""
    if sessions is None:
        return call.hinted_ahead
    return call.hinted_ahead + min(MOST_AHEAD, HEAD_START * saved_by_cache(engines, call, now))
