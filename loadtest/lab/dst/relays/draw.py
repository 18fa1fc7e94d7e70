"""Draw of a simulation with relays: calls, relays and deciders that die, hang and are cut off, and old messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

from msgspec.structs import replace

from loadtest.lab.dst.case import Case, DeciderFault, Event, MemberFault, RelayFault, Reload
from loadtest.lab.dst.draw import MODELS, a_call, a_fault, a_machine, by_route
from loadtest.lab.dst.policy import Traits

ALIKE = 20  # seeds that share their policies: reading one takes as long as a simulation under it
ROUTES_FROM = 30_000  # seeds from here on may have a model route, and engines of several models
STORES_FROM = 20_000  # seeds from here on have more that befalls stores; those before are as they were found to fail
ROUTED = 0.6  # share of the policies that have a model route then
EXCHANGING = 0.4  # share of cases whose engines exchange KV caches
BEFALLS = ("kill", "reboot", "stop", "stop", "cut", "cut", "parted", "parted", "lost", "emptied")


def relay_case(seed: int) -> Case:
    """The simulation of this seed."""
    rng = random.Random(f"dst of relays {seed}")  # noqa: S311 # a simulation
    fixed = tuple(a_machine(rng, "sim") for _ in range(rng.choice((1, 2, 3))))
    relays, seconds = rng.choice((1, 2, 3, 4)), rng.choice((2.0, 4.0))
    members = rng.choice((0, 0, 2, 3))
    if members:
        relays, seconds = max(relays, members), 6.0  # an election lasts
    aligned = rng.random() < 0.5
    policies = random.Random(f"policies of relays {seed // ALIKE}")  # noqa: S311 # a simulation
    routed = seed >= ROUTES_FROM and policies.random() < ROUTED
    if routed:
        fixed = tuple(replace(each, model=rng.choice(MODELS)) for each in fixed)
    traits = Traits(policies, 0, sidecars=False, cancels=True, models=MODELS if routed else ())

    def when() -> float:
        at = rng.uniform(0.25, seconds)
        return int(at * 8) / 8 if aligned else at

    count = rng.choice((4, 8, 16, 30))
    calls = [replace(a_call(rng, when(), aligned), model="sim", upload=0.0) for _ in range(count)]
    calls = by_route(seed, calls) if routed else calls
    events: list[Event] = [*calls, *_relay_faults(rng, when, relays)]
    events += _other_faults(rng, when, relays, len(fixed))
    policy = traits.policy()
    events += [Reload(at=when(), policy=traits.policy()) for _ in range(rng.choice((0, 0, 0, 1)))]
    if members:
        events += _member_faults(rng, when, members)
        if seed >= STORES_FROM:
            events += _store_faults(rng, aligned=aligned)
    ordered = tuple(sorted(events, key=lambda event: event.at))
    return Case(
        seed=seed,
        policy=policy,
        fixed=fixed,
        relays=relays,
        delay=rng.choice((0.0, 0.0002, 0.002, 0.02)),
        spread=rng.choice((0.0, 0.001, 0.05)),
        events=ordered,
        numbers=tuple(range(len(ordered))),
        members=members,
        exchanges=random.Random(f"relays' exchanges {seed}").random() < EXCHANGING,  # noqa: S311 # a simulation
    )


def _relay_faults(rng: random.Random, when: Callable[[], float], relays: int) -> list[Event]:
    """Faults of relays and of their connections to the decider."""
    faults: list[Event] = []
    for _ in range(rng.choice((0, 1, 2, 4, 6))):
        what: Literal["kill", "break", "hold"] = rng.choice(("kill", "break", "break", "hold"))
        lasts = rng.choice((0.0, 0.1, 0.6, 2.0))
        at, relay = when(), rng.randrange(relays)
        faults.append(RelayFault(at=at, what=what, relay=relay, seconds=lasts))
        if what == "hold" and rng.random() < 0.7:  # answers that were sent are lost, and come once more later
            faults.append(RelayFault(at=at + lasts / 2, what="break", relay=relay))
            faults += [RelayFault(at=at + lasts / 2 + after, what="echo", relay=relay) for after in (0.15, 0.3)]
    return faults


def _other_faults(rng: random.Random, when: Callable[[], float], relays: int, engines: int) -> list[Event]:
    """Faults of deciders and of engines, and messages of the past."""
    faults: list[Event] = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        what: Literal["kill", "hang"] = rng.choice(("kill", "kill", "hang"))
        faults.append(DeciderFault(at=when(), what=what, seconds=rng.choice((0.02, 0.3, 1.0))))
    echoes = range(rng.choice((0, 2, 6)))
    faults += [RelayFault(at=when(), what="echo", relay=rng.randrange(relays)) for _ in echoes]
    faults += [a_fault(rng, when(), engines) for _ in range(rng.choice((0, 0, 1, 2)))]
    if rng.random() < 0.25:  # an engine fails while a new decider waits for a relay that cannot reach it
        at = when()
        faults.append(RelayFault(at=at, what="break", relay=rng.randrange(relays), seconds=2.0))
        faults.append(DeciderFault(at=at + 0.05, what="kill", seconds=0.02))
        faults.append(replace(a_fault(rng, at + 0.25, engines), what=rng.choice(("die", "errors"))))
    return faults


def _store_faults(rng: random.Random, *, aligned: bool) -> list[Event]:
    """A store that is restarted without its data, also again and again, by itself or behind a proxy; and calls that
    come while it is back."""
    faults: list[Event] = []
    at = rng.uniform(0.3, 3.0)
    for _ in range(rng.choice((1, 1, 2))):
        seconds = rng.choice((1.0, 3.0, 3.0, 4.0, 15.0))
        if rng.random() < 0.5:
            faults.append(MemberFault(at=at, what="refused", member=-1, seconds=seconds))
        faults.append(MemberFault(at=at, what="began_anew", member=-1, seconds=seconds))
        at += seconds
        for _ in range(rng.choice((4, 16))):
            call = a_call(rng, at + rng.uniform(-2.0, 1.0), aligned)
            faults.append(replace(call, model="sim", upload=0.0))
        at += rng.uniform(0.2, 3.0)
    return faults


def _member_faults(rng: random.Random, when: Callable[[], float], members: int) -> list[Event]:
    """Some at times of their own, and some one upon the other, within an election."""
    faults: list[Event] = []
    for _ in range(rng.choice((1, 2, 4))):
        at = when()
        for _ in range(rng.choice((1, 1, 2, 3))):
            what: Any = rng.choice(BEFALLS)
            number, seconds = rng.randrange(-1, members), rng.choice((0.3, 1.9, 3.0, 4.0))
            faults.append(MemberFault(at=at, what=what, member=number, seconds=seconds))
            at += rng.choice((0.0, 0.1, 0.5, 1.0))
    return faults
