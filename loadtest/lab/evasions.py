"""Tokens got for nothing by each way around a limit: `python -m loadtest.lab.evasions`, in virtual time.

Each row sends calls that end before their engine told its usage, through the whole gateway over one simulated engine,
and compares what the engine read and wrote with what the tenant was charged. Exit status 1: a row got tokens for
nothing, beyond IN_FLIGHT for each call, which are of steps that had begun.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from loadtest.lab.dst.case import Call, Case, EngineSpec
from loadtest.lab.dst.policy import DAYS
from loadtest.lab.dst.world import World
from loadtest.simulate import vtime

CALLS = 20
IN_FLIGHT = 2  # tokens
MACHINE = EngineSpec(model="sim", blocks=400, sequences=8, step=1 / 32, prefill=1 / 2048, jitter=0.0)
POLICY: dict[str, Any] = {
    "version": 1,
    "limits": {"global": {"requests": DAYS, "tokens": DAYS}},
    "retries": {"per_call": 0},
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
    (memory,) = world.memories.values()
    written: list[int] = []
    memory.left = lambda _, tokens: written.append(tokens)
    wrong = await world.run()
    if wrong:
        raise RuntimeError(wrong)
    charged = sum([charge.settled or 0 for charge in world.callers.charges.made.values()])
    return sum(written) + memory.posts * CALL.prompt, charged


def main() -> int:
    """Print a row for each; the exit status."""
    print(f"{'':44}{'engine':>8}{'charged':>9}{'for nothing':>13}")
    least = 0
    for what, fields in EVASIONS.items():
        worked, charged = vtime.run(got(fields))
        nothing = max(0, worked - charged - IN_FLIGHT * CALLS)
        least = max(least, nothing)
        print(f"{what:44}{worked:8,}{charged:9,}{nothing:13,}")
    return 1 if least else 0


if __name__ == "__main__":
    sys.exit(main())
