"""Locality of sessions: an engine that knows a call's session is worth waiting for, and the call goes before its turn.

An engine *knows* a call's session if it has most of its prompt cached. A prompt that is shared by many, such as a
system prompt, makes no engine know one. Two calls are set aside, so that others pass them, though an engine has room:

- One whose session is known by a full engine, for as long as reading the prompt anew elsewhere would take. So it never
  waits longer than it would have saved by twice (ski rental).
- One that no engine knows, where all room that is left is kept for sessions that are expected back; for `most_ahead`.

Synchronous and pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from gateway.core.engines.choice import Choice, cached_tokens, choose, knows, usable_of
from gateway.core.engines.fleet import Engine
from gateway.core.policy.policy import Routing
from gateway.core.request.call import Call
from gateway.core.sessions.memory import SessionMemory

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
    residence: float = 0.0,
) -> Choice | Aside | None:
    """The best engine for the call, by `choose`; ASIDE: it had better wait; None: no engine has room. `waited`:
    seconds so far; `residence`: seconds that a hold lasts, on average."""
    rate = max([engine.prefill_rate for engine in engines], default=1.0)
    patient = waited < min(sessions.policy.most_ahead, sessions.policy.head_start * call.cost / rate)

    def spoken_for(engine: Engine) -> int:
        return sessions.spoken_for(engine.id, engine.budget, call) if patient else 0

    choice = choose(engines, call, now, routing=routing, rng=rng, exclude=exclude, spoken_for=spoken_for)
    if choice is None:
        fits = patient and any(engine.fits(call.cost, call.class_name) for engine in usable_of(engines, now))
        return ASIDE if fits else None
    saved = saved_by_waiting(engines, call, choice, now, residence)
    return ASIDE if patient and saved > WORTH_WAITING and waited < saved else choice


def saved_by_waiting(
    engines: Sequence[Engine], call: Call, choice: Choice, now: float, residence: float = 0.0
) -> float:
    """Seconds of reading that the call is spared if it waits for an engine that knows its session and is full, in place
    of going to `choice` now; 0: none does, or none will have room as soon."""
    most = 0.0
    for engine in usable_of(engines, now):
        if engine is not choice.engine and knows(engine, call, now) and not engine.fits(call.cost, call.class_name):
            spared = choice.prefill - (call.prompt_tokens - cached_tokens(engine, call, now))
            seconds = spared / engine.prefill_rate
            if seconds > room_in(engine, call, residence):
                most = max(most, seconds)
    return most


def room_in(engine: Engine, call: Call, residence: float) -> float:
    """Seconds until the engine has room for the call, where each of its holds lasts `residence` seconds."""
    missing = max(0, engine.load + call.cost - engine.budget)
    tokens = missing / max(1, engine.held) * residence
    return max(tokens, residence / max(1, engine.in_flight)) if engine.in_flight >= engine.slots else tokens


def saved_by_cache(engines: Sequence[Engine], call: Call, now: float) -> float:
    """Seconds of reading that the call is spared by an engine that knows its session, at most; 0: none does."""
    known = [cached_tokens(engine, call, now) / engine.prefill_rate for engine in engines if knows(engine, call, now)]
    return max(known, default=0.0)


def seconds_ahead(sessions: SessionMemory | None, engines: Sequence[Engine], call: Call, now: float) -> float:
    """Seconds by which the call goes before its turn among its tenant's, by its agent's hint and its session; below 0:
    after it."""
    return call.hinted_ahead + (0.0 if sessions is None else _by_session(sessions, engines, call, now))


def _by_session(sessions: SessionMemory, engines: Sequence[Engine], call: Call, now: float) -> float:
    policy = sessions.policy
    if policy.order == "arrival":
        return 0.0
    if policy.order == "least_served":
        rate = max([engine.prefill_rate for engine in engines], default=1.0)
        return max(-policy.most_ahead, -policy.head_start * sessions.served(call) / rate)
    return min(policy.most_ahead, policy.head_start * saved_by_cache(engines, call, now))
