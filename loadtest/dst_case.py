"""What happens in one simulation: all of it follows from the seed, as a list of things and their times.

Nothing here runs. A part of the list is a simulation too (`Case.only`), which is how a failure is made smaller: what
one thing does depends on its own fields and on the seed, never on a stream of random numbers shared with others.
"""

from __future__ import annotations

import random
from collections.abc import Container
from typing import Any, Literal

import msgspec

from loadtest.dst_policy import Traits
from loadtest.simulation import Fault

MODELS = ("sim", "m1", "m2")
CLASSES = ("interactive", "default", "batch", "offline")
KEYS = {"": "anonymous", "key-of-acme": "acme", "key-of-zeta": "zeta"}
GRID = 0.25  # seconds: on it things collide, as ends of answers and deadlines do


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One client's call. Tokens, seconds; `within`: the deadline it asks for, 0 for its class's; `leaves`: so long
    after it was sent, negative for never; `leaves_granted`: in the very moment it gets its turn; `retries`: how often
    at most it comes back."""

    at: float
    class_name: str
    key: str
    model: str
    prompt: int
    asked: int
    stream: bool
    group: int  # calls of one group begin alike
    within: float = 0.0
    leaves: float = -1.0
    leaves_granted: bool = False
    retries: int = 0


class Reload(msgspec.Struct, frozen=True, kw_only=True):
    """Another policy, as YAML; `bad`: it names an engine twice, so it must be refused and change nothing."""

    at: float
    policy: str
    bad: bool = False


class Hand(msgspec.Struct, frozen=True, kw_only=True):
    """An operator drains an engine of the command line's, or gives it back; None: all of the gateway is drained."""

    at: float
    engine: int | None
    drain: bool = True


Saying = Literal["sleep", "stop", "drain", "wake", "error", "vanish", "silence", "reboot", "late", "deaf", "lost"]


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What a sidecar does with a profile, or with itself for `seconds`."""

    at: float
    sidecar: int
    what: Saying
    profile: int = 0
    seconds: float = 0.0


Event = Call | Fault | Reload | Hand | Word


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: sizes in blocks of 16 tokens and sequences; seconds per step and per prompt token."""

    model: str
    blocks: int
    sequences: int
    step: float
    prefill: float
    jitter: float


class Helper(msgspec.Struct, frozen=True, kw_only=True):
    """One sidecar: its profiles' engines, which of them run at first, and the seconds it takes to have one ready."""

    engines: tuple[Machine, ...]
    running: tuple[bool, ...]
    takes: float


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation. `fixed` engines are the command line's, `extra` ones are there while the policy names them."""

    seed: int
    policy: str
    fixed: tuple[Machine, ...]
    extra: tuple[Machine, ...]
    sidecars: tuple[Helper, ...]
    events: tuple[Event, ...]  # in order of time
    numbers: tuple[int, ...]  # of the events, in the whole case
    cancels: bool  # what runs past its deadline is cancelled, by every policy

    def only(self, numbers: Container[int]) -> Case:
        """The same with these events alone."""
        kept = [(number, event) for number, event in zip(self.numbers, self.events, strict=True) if number in numbers]
        return msgspec.structs.replace(
            self, events=tuple([event for _, event in kept]), numbers=tuple([number for number, _ in kept])
        )


def case(seed: int) -> Case:
    """The simulation of this seed."""
    rng = random.Random(f"dst {seed}")  # noqa: S311 # a simulation
    sidecars = tuple(_helper(rng) for _ in range(rng.choice((0, 0, 1, 1, 2))))
    fixed = tuple(_machine(rng, rng.choice(("sim", "sim", "m1"))) for _ in range(rng.choice((1, 2, 2, 3))))
    if sidecars and rng.random() < 0.15:
        fixed = ()
    extra = tuple(_machine(rng, "sim") for _ in range(rng.choice((0, 1, 2))))
    seconds = rng.choice((8.0, 16.0, 30.0))
    aligned = rng.random() < 0.6

    def when() -> float:
        at = rng.uniform(0.0, seconds)
        return int(at / GRID) * GRID if aligned else at

    cancels = rng.random() < 0.8
    traits = Traits(rng, len(extra), cancels=cancels, sidecars=bool(sidecars))
    calls = [_call(rng, when(), aligned) for _ in range(rng.choice((10, 30, 60, 100)))]
    others: list[Event] = [_fault(rng, when(), len(fixed)) for _ in range(rng.choice((0, 1, 2, 4)) if fixed else 0)]
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        bad = bool(fixed) and rng.random() < 0.1
        others.append(Reload(at=when(), policy=traits.policy(twice=bad), bad=bad))
    for _ in range(rng.choice((0, 0, 1, 2)) if fixed else 0):
        others.append(Hand(at=when(), engine=rng.randrange(len(fixed)), drain=rng.random() < 0.6))
    if rng.random() < 0.1:
        others.append(Hand(at=when(), engine=None))
    for number, helper in enumerate(sidecars):
        others += [_word(rng, when(), number, len(helper.engines)) for _ in range(rng.choice((1, 2, 4, 6)))]
    events = tuple(sorted([*calls, *others], key=lambda event: event.at))
    return Case(
        seed=seed,
        policy=traits.policy(),
        fixed=fixed,
        extra=extra,
        sidecars=sidecars,
        events=events,
        numbers=tuple(range(len(events))),
        cancels=cancels,
    )


def _machine(rng: random.Random, model: str) -> Machine:
    return Machine(
        model=model,
        blocks=rng.choice((40, 60, 100, 160)),
        sequences=rng.choice((2, 4, 8)),
        step=rng.choice((1 / 32, 1 / 16, 1 / 8)),  # binary fractions add up exactly, so that times can be equal
        prefill=rng.choice((0.0, 0.0, 1 / 2048, 1 / 1024)),
        jitter=rng.choice((0.0, 0.0, 0.05)),
    )


def _helper(rng: random.Random) -> Helper:
    count = rng.choice((1, 2))
    return Helper(
        engines=tuple(_machine(rng, rng.choice(MODELS)) for _ in range(count)),
        running=tuple(rng.random() < 0.5 for _ in range(count)),
        takes=rng.choice((0.5, 2.0, 6.0)),
    )


def _call(rng: random.Random, at: float, aligned: bool) -> Call:
    within = rng.choice((0.0, 0.0, 0.5, 1.0, 2.0, 4.0))
    leaves = rng.choice((0.0, 0.25, 0.5, 1.0, 3.0)) if rng.random() < 0.25 else -1.0
    return Call(
        at=at,
        class_name=rng.choice(CLASSES),
        key=rng.choice(tuple(KEYS)),
        model=rng.choices(MODELS, (6, 2, 1))[0],
        prompt=rng.choice((16, 40, 120, 400)) if aligned else rng.randint(8, 420),
        asked=rng.choice((4, 16, 32, 64)),
        stream=rng.random() < 0.8,
        group=rng.randrange(6),
        within=within if aligned or not within else within * rng.uniform(0.5, 1.5),
        leaves=leaves if aligned or leaves < 0.0 else leaves * rng.uniform(0.5, 1.5),
        leaves_granted=rng.random() < 0.05,
        retries=rng.choice((0, 0, 1, 2)),
    )


def _fault(rng: random.Random, at: float, engines: int) -> Fault:
    what: Any = rng.choice(("die", "die", "stop", "recover", "recover", "recover", "slow", "errors", "errors"))
    value = rng.choice((2.0, 8.0)) if what == "slow" else rng.choice((0.3, 1.0))
    return Fault(at=at, what=what, engines=(rng.randrange(engines),), value=value, status=rng.choice((429, 500, 503)))


def _word(rng: random.Random, at: float, sidecar: int, profiles: int) -> Word:
    what: Any = rng.choice(
        (
            "sleep",
            "sleep",
            "stop",
            "drain",
            "wake",
            "wake",
            "error",
            "vanish",
            "silence",
            "reboot",
            "late",
            "deaf",
            "lost",
        )
    )
    profile, seconds = rng.randrange(profiles), rng.choice((1.0, 4.0, 12.0))
    return Word(at=at, sidecar=sidecar, what=what, profile=profile, seconds=seconds)
