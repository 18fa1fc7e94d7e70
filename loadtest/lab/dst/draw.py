"""Draw of a simulation: everything that happens in it follows from its seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from loadtest.lab.dst.case import (
    KEYS,
    Call,
    Case,
    EngineSpec,
    Event,
    OperatorDrain,
    Proxied,
    Reload,
    SidecarAct,
    SidecarSpec,
)
from loadtest.lab.dst.policy import ROUTE, Traits
from loadtest.simulate.simulation import Fault

MODELS = ("sim", "m1", "m2")
ADAPTER = "sql"
CLASSES = ("interactive", "default", "batch", "offline")
PROXIED: tuple[Proxied, ...] = ("plain", "plain", "plain", "doubled", "lost", "dies")
GRID = 0.25  # seconds: on it things collide, as ends of answers and deadlines do


def case(seed: int) -> Case:
    """The simulation of this seed."""
    rng = random.Random(f"dst {seed}")  # noqa: S311 # a simulation
    sidecars = tuple(_helper(rng) for _ in range(rng.choice((0, 0, 1, 1, 2))))
    fixed = tuple(a_machine(rng, rng.choice(("sim", "sim", "m1"))) for _ in range(rng.choice((1, 2, 2, 3))))
    if sidecars and rng.random() < 0.15:
        fixed = ()
    extra = tuple(a_machine(rng, "sim") for _ in range(rng.choice((0, 1, 2))))
    seconds = rng.choice((8.0, 16.0, 30.0))
    aligned = rng.random() < 0.6

    def when() -> float:
        at = rng.uniform(0.0, seconds)
        return int(at / GRID) * GRID if aligned else at

    cancels = rng.random() < 0.8
    routed = random.Random(f"route {seed}").random() < 0.3  # noqa: S311 # of its own
    traits = Traits(rng, len(extra), cancels=cancels, sidecars=bool(sidecars), models=MODELS if routed else ())
    if rng.random() < 0.2:
        calls = _flood(rng, aligned)
    else:
        calls = [a_call(rng, when(), aligned) for _ in range(rng.choice((10, 30, 60, 100)))]
        calls += [echo for call in calls if call.kind != "chat" for echo in _echoes(rng, call)]
    agents = random.Random(f"agents {seed}")  # noqa: S311 # of its own
    if len(fixed) > 1 and agents.random() < 0.25:
        fixed, calls = _by_agents(agents, fixed, calls)
    if seed % 3 == 1:
        calls = _through_proxies(seed, calls)
    if routed:
        calls = by_route(seed, calls)
    elif seed % 8 == 7:
        fixed = tuple([msgspec.structs.replace(one, more=(ADAPTER,)) for one in fixed])
        calls = by_route(seed, calls, ADAPTER)
    others = _acts(rng, when, traits, len(fixed))
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
        lost=rng.choice((-1.0, -1.0, 0.0, 0.1)),
        exchanges=random.Random(f"exchanges{seed}").random() < 0.5,  # noqa: S311 # a test's draw
    )


def _acts(rng: random.Random, when: Callable[[], float], traits: Traits, engines: int) -> list[Event]:
    """Draw faults of so many engines, and what an operator does."""
    acts: list[Event] = [a_fault(rng, when(), engines) for _ in range(rng.choice((0, 1, 2, 4)) if engines else 0)]
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        bad = bool(engines) and rng.random() < 0.1
        acts.append(Reload(at=when(), policy=traits.policy(twice=bad), bad=bad))
    for _ in range(rng.choice((0, 0, 1, 2)) if engines else 0):
        acts.append(OperatorDrain(at=when(), engine=rng.randrange(engines), drain=rng.random() < 0.6))
    if rng.random() < 0.1:
        acts.append(OperatorDrain(at=when(), engine=None))
    return acts


def a_machine(rng: random.Random, model: str) -> EngineSpec:
    return EngineSpec(
        model=model,
        blocks=rng.choice((40, 60, 100, 160)),
        sequences=rng.choice((2, 4, 8)),
        step=rng.choice((1 / 32, 1 / 16, 1 / 8)),  # binary fractions add up exactly, so that times can be equal
        prefill=rng.choice((0.0, 0.0, 1 / 2048, 1 / 1024)),
        jitter=rng.choice((0.0, 0.0, 0.05)),
    )


def _helper(rng: random.Random) -> SidecarSpec:
    count = rng.choice((1, 2))
    return SidecarSpec(
        engines=tuple(a_machine(rng, rng.choice(MODELS)) for _ in range(count)),
        running=tuple(rng.random() < 0.5 for _ in range(count)),
        takes=rng.choice((0.5, 2.0, 6.0)),
    )


def a_call(rng: random.Random, at: float, aligned: bool) -> Call:
    within = rng.choice((0.0, 0.0, 0.5, 1.0, 2.0, 4.0))
    leaves = rng.choice((0.0, 0.25, 0.5, 1.0, 3.0)) if rng.random() < 0.25 else -1.0
    kind: Any = rng.choices(("chat", "embeddings", "rerank"), (12, 3, 1))[0]
    pooled = kind != "chat"
    return Call(
        at=at,
        class_name=rng.choice(CLASSES),
        key=rng.choice(tuple(KEYS)),
        model=rng.choices(MODELS, (6, 2, 1))[0],
        prompt=rng.choice((16, 40, 120, 400)) if aligned else rng.randint(8, 420),
        asked=0 if pooled else rng.choice((4, 16, 32, 64)),
        stream=not pooled and rng.random() < 0.8,
        group=rng.randrange(6),
        within=within if aligned or not within else within * rng.uniform(0.5, 1.5),
        leaves=leaves if aligned or leaves < 0.0 else leaves * rng.uniform(0.5, 1.5),
        leaves_granted=rng.random() < 0.05,
        retries=rng.choice((0, 0, 1, 2)),
        usage=rng.random() < 0.3,
        kind=kind,
        items=rng.choice((1, 1, 2, 5)),
        top=rng.choice((0, 1, 3)),
        session=rng.choice((0, 0, 1, 2, 3)),
        upload=rng.choice((0.25, 1.0, 3.0)) if rng.random() < 0.08 else 0.0,
    )


def _echoes(rng: random.Random, call: Call) -> list[Call]:
    """Others like it at nearly the same time, as whoever embeds a document sends them."""
    calls = []
    for _ in range(rng.choice((0, 2, 6))):
        at = call.at + rng.choice((0.0, 1 / 64, 1 / 16))
        leaves = rng.choice((0.0, 1 / 64, 0.25)) if rng.random() < 0.15 else -1.0
        calls.append(msgspec.structs.replace(call, at=at, items=rng.choice((1, 2, 5)), leaves=leaves, upload=0.0))
    return calls


def _through_proxies(seed: int, calls: list[Call]) -> list[Call]:
    """Some of them, or all, go through proxies that ask the endpoint picker."""
    rng = random.Random(f"decide {seed}")  # noqa: S311 # of its own
    share = rng.choice((0.2, 0.5, 1.0))
    return [
        msgspec.structs.replace(call, proxied=rng.choice(PROXIED), upload=0.0) if rng.random() < share else call
        for call in calls
    ]


def _by_agents(
    rng: random.Random, machines: tuple[EngineSpec, ...], calls: list[Call]
) -> tuple[tuple[EngineSpec, ...], list[Call]]:
    """Turns of few conversations, on engines where reading one anew takes longer than to wait for its engine."""
    few = [msgspec.structs.replace(one, model="sim", prefill=1 / 512, blocks=rng.choice((40, 60))) for one in machines]
    turns = [
        msgspec.structs.replace(call, at=call.at + turn, model="sim", prompt=400, history=384, asked=call.asked // 2,
                                stream=True, within=2.0 * call.within, group=rng.randrange(3))
        for call in calls if call.kind == "chat" for turn in (0.0, 2.0)
    ]  # fmt: skip
    return tuple(few), turns


def by_route(seed: int, calls: list[Call], name: str = ROUTE) -> list[Call]:
    """Half of them, or all, are for the model route, or for the name that engines of several models have."""
    rng = random.Random(f"by route {seed}")  # noqa: S311 # of its own
    share = rng.choice((0.5, 1.0))
    return [msgspec.structs.replace(call, model=name) if rng.random() < share else call for call in calls]


def _flood(rng: random.Random, aligned: bool) -> list[Call]:
    """Much more than can be done at a time, of few kinds: several tenants have calls waiting for long."""
    names, kinds = rng.choices(CLASSES, k=2), rng.choice((("chat",), ("chat",), ("chat", "embeddings")))
    calls = []
    for _ in range(rng.choice((60, 120))):
        at = rng.choice((0.0, 0.0, 0.5, 2.0))
        call = a_call(rng, at if aligned else at + rng.random(), aligned)
        kind: Any = rng.choice(kinds)
        few = {"class_name": rng.choice(names), "model": "sim", "kind": kind, "prompt": call.prompt // 4 + 4}
        few |= {"asked": call.asked or 16, "stream": call.stream} if kind == "chat" else {"asked": 0, "stream": False}
        patient = {"within": 0.0, "leaves": -1.0} if rng.random() < 0.8 else {}
        calls.append(msgspec.structs.replace(call, **few, **patient))
    return calls


def a_fault(rng: random.Random, at: float, engines: int) -> Fault:
    what: Any = rng.choice(("die", "die", "stop", "stall", "recover", "recover", "recover", "slow", "errors", "errors"))
    value = rng.choice((2.0, 8.0)) if what == "slow" else rng.choice((0.3, 1.0))
    return Fault(at=at, what=what, engines=(rng.randrange(engines),), value=value, status=rng.choice((429, 500, 503)))


def _word(rng: random.Random, at: float, sidecar: int, profiles: int) -> SidecarAct:
    own, whole = (
        ("sleep", "sleep", "stop", "drain", "wake", "wake", "error"),
        ("silence", "reboot", "late", "deaf", "lost"),
    )
    what: Any = rng.choice((*own, "vanish", *whole))
    profile, seconds = rng.randrange(profiles), rng.choice((1.0, 4.0, 12.0))
    return SidecarAct(at=at, sidecar=sidecar, what=what, profile=profile, seconds=seconds)
