"""Evasions of rate limits: no way around a limit gets tokens for nothing.

Each case sends calls that end before their engine told its usage, through the whole gateway over one simulated engine,
and compares what the engine read and wrote with what the tenant was charged. IN_FLIGHT tokens of each call are of steps
that had begun.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.relay import forwarding, pipeline
from loadtest.lab.dst.case import Call, Case, EngineSpec
from loadtest.lab.dst.policy import DAYS
from loadtest.lab.dst.world import World
from loadtest.simulate.vtime import run

CALLS = 20
IN_FLIGHT = 2  # tokens
MACHINE = EngineSpec(model="sim", blocks=400, sequences=8, step=1 / 32, prefill=1 / 2048, jitter=0.0)
POLICY: dict[str, Any] = {
    "version": 1,
    "limits": {"global": {"requests": DAYS, "tokens": DAYS}},
    "retries": "0%",
    "routing": {"slow_start": "0s"},
}
CALL = Call(at=0.0, class_name="default", key="", model="sim", prompt=400, asked=200, stream=True, group=0)
EVASIONS: dict[str, dict[str, Any]] = {
    "a stream is left before its usage": {"leaves": 3.0},
    "a stream is cut by its own deadline": {"within": 3.0},
    "a stream is left before its first byte": {"leaves": 0.125, "asked": 4},
    "its own deadline, before the first byte": {"within": 0.125, "asked": 4},
    "a whole answer is left": {"stream": False, "leaves": 3.0},
    "a whole answer is cut by its own deadline": {"stream": False, "within": 3.0},
    "an embedding is left": {"kind": "embeddings", "stream": False, "asked": 0, "leaves": 0.125},
}


async def got(fields: dict[str, Any]) -> tuple[int, int]:
    """Tokens that the engine read and wrote, and tokens that were charged."""
    events = tuple([msgspec.structs.replace(CALL, at=4.0 * number, **fields) for number in range(CALLS)])
    case = Case(
        seed=1,
        policy=msgspec.json.encode(POLICY).decode(),
        fixed=(MACHINE,),
        extra=(),
        sidecars=(),
        events=events,
        numbers=tuple(range(CALLS)),
        cancels=True,
    )
    world = World(case, [])
    (memory,) = world.gateway.memories.values()
    written: list[int] = []
    memory.left = lambda _, tokens: written.append(tokens)
    wrong = await world.run()
    assert wrong == ""
    charged = sum([charge.settled or 0 for charge in world.gateway.laws.charges.made.values()])
    return sum(written) + memory.posts * CALL.prompt, charged


@pytest.mark.parametrize("what", EVASIONS)
def test_nothing_is_got_for_nothing(what: str) -> None:
    worked, charged = run(got(EVASIONS[what]))
    assert worked - charged <= IN_FLIGHT * CALLS


@pytest.mark.parametrize("what", [what for what in EVASIONS if "before its first" in what or "whole" in what])
def test_it_would_be_without_the_charge_for_what_was_left(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(*_: Any, **__: Any) -> None:
        """As if no engine had it."""

    for module in (forwarding, pipeline):
        monkeypatch.setattr(module, "settle_unanswered", free)
    worked, charged = run(got(EVASIONS[what]))
    assert worked - charged > IN_FLIGHT * CALLS
