"""Invariants of the sidecar's manager under random orders, faults and calls.

Every call ends within its patience, and is cut off only where its engine was harmed; nothing is sent to an engine that
does not serve; no GPU is promised twice and no two engines of one start, sleep or wake at once. When it is quiet again,
all memory belongs to an engine that runs or sleeps, and all engines have ended when the sidecar has ended them.

One caller who asks for one model after the other, without a pause, has each started once. From then on it wakes: no
engine that sleeps is stopped for calls that are about to end, and no call is told of a start. `Site` sees to it all the
while that no GPU and no host memory is promised twice.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from loadtest.lab.residency.faults import Storm, storm
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted, file
from loadtest.simulate import vtime

TEXT = file(
    "abcdef",
    2,
    a="sleep: {after: 40s}, stop_after: 3m",
    b="sleep: {level: 2}, max_starvation: 20s",
    c="sleep: null, max_starvation: 20s",
    d="tensor_parallel: 2, max_starvation: 30s",
    e="stop_after: 60s",
    f="gpus: [1]",
)
TOTALS = (24 * GIB, 40 * GIB)
CLAIMS = {"a": 11, "b": 11, "c": 8, "d": 12, "e": 5, "f": 16}  # GiB
MODELS = {name: Model(weights=claim * GIB // 2, claim=claim * GIB) for name, claim in CLAIMS.items()}


async def weathered(seed: int, *, orders: bool, events: int = 100, seconds: float = 600.0) -> Storm:
    """One storm on two GPUs, and nothing wrong after it. With odd seeds host memory is short, and engines keep theirs
    when they have woken, half as much again as was thought; with every third NVML lists the host's pids."""
    made_of, host = MODELS, 1 << 50
    if seed % 2:
        made_of = {n: msgspec.structs.replace(each, pinned=1.5, keeps_pinned=True) for n, each in made_of.items()}
        host = 15 * GIB
    async with Site(TEXT, made_of, *TOTALS, gateways=2, host_memory=host) as made:
        made.machine.listing = "own" if seed % 3 else "host"
        found = await storm(made, seed, events=events, seconds=seconds, orders=orders)
        assert found.wrong == []
        assert made.left_over() == []
        assert made.machine.overlaps == []
    assert made.machine.held == {}
    return found


def test_a_short_storm_of_faults_and_orders() -> None:
    found = vtime.run(weathered(3, orders=True, events=20, seconds=100.0))
    assert found.answers["served"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("orders", [False, True], ids=["faults", "faults and orders"])
@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_faults_in_ten_minutes(seed: int, orders: bool) -> None:
    found = vtime.run(weathered(seed, orders=orders))
    assert found.answers["served"] > 50
    assert found.events.total() == 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_an_order_or_a_fault_every_half_second(seed: int) -> None:
    vtime.run(weathered(seed, orders=True, events=400, seconds=200.0))


async def asked_in_turn(seed: int) -> None:
    """One caller, without a pause, of three to five models on two GPUs that each have room for one."""
    rng = random.Random(seed)
    names = "abcde"[: rng.randint(3, 5)]
    text = file(names, 2, **dict.fromkeys(names, f"max_starvation: {rng.choice((1, 60))}s"))
    model = Model(weights=6 * GIB, claim=11 * GIB)  # 13.2 s to start; sleeps in 0.84 s and wakes in 0.84 s
    async with Site(text, dict.fromkeys(names, model), 16 * GIB, 16 * GIB, gateways=rng.randint(1, 2)) as made:
        for round_ in range(4):
            for name in rng.sample(names, len(names)):
                seconds = rng.choice((0.05, 0.4, 1.0))
                answer = await rng.choice(made.gateways).call(name, seconds)
                assert answer.ending == "served"
                if round_ > 1:  # by now it is known how long it takes to put each to sleep and to wake it
                    assert answer.waited <= 2.5
                    assert abs(answer.foretold - answer.waited) <= 2.5, "calls of a second, and word of them as old"
        assert set(counted(made, "ready").values()) == {1}
        assert counted(made, "stopped").total() == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_one_call_after_the_other_starts_each_model_once(seed: int) -> None:
    vtime.run(asked_in_turn(seed))
