"""Runs of one load with and without copies: Zipf calls for four models, one of them hot, on two GPUs.

Each GPU has room for two models awake. An engine runs four calls at once, 16 seconds each, so it serves a call in four
seconds; the hot model is asked for a little more than two engines serve. Its copy takes the place of a model that is
seldom called, and gives it back when that is. The gateway, its queues and its sidecar are the real ones.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from loadtest.lab.residency.gateway_callers import GatewayCall, GatewayCallers
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted
from loadtest.lab.rows import OnProgress
from loadtest.simulate import vtime

MODEL = Model(weights=6 * GIB, claim=11 * GIB)  # 13.2 s to start; sleeps in 0.84 s and wakes in 0.84 s
POLICY = """
fleet: {sidecars: {copies: COPIES}}
budget: {max_concurrency: 4}
classes: {default: {ttft: 20s, deadline: 120s}}
"""
FILE = """
gpus: [0, 1]
models:
  hot: {model_path: /m/hot}
  hot-2: {model_path: /m/hot, served_name: hot}
  warm: {model_path: /m/warm}
  mild: {model_path: /m/mild}
  cold: {model_path: /m/cold}
"""
NAMES = ("hot", "warm", "mild", "cold")
PROFILES = ("hot", "hot-2", "warm", "mild", "cold")
SKEW = 3.5  # exponent of Zipf's law
RATE = 0.65  # calls a second, 90 % of them for the hot model
SECONDS = 16.0  # of a call on its engine, on average
ROOM = 26 * GIB  # of each GPU: two models awake and others asleep


class PlannedCall(msgspec.Struct, frozen=True):
    """Call that comes `at` seconds after the start, and that an engine needs `seconds` for."""

    at: float
    model: str
    seconds: float


class CopiesRun(msgspec.Struct):
    """Run with its calls, its seconds, and how often copies were woken and gave their place back."""

    calls: list[GatewayCall]
    seconds: float
    woken: int
    gave_place: int
    left: list[str]

    @property
    def goodput(self) -> float:
        """Calls a second that were served, all of which began in time: else they are refused."""
        return sum(call.ending == "served" for call in self.calls) / self.seconds

    def ends(self) -> str:
        return ", ".join(f"{end} {count}" for end, count in Counter(call.ending for call in self.calls).most_common())


def planned(seed: int, calls: int) -> list[PlannedCall]:
    """Poisson calls, Zipf over the models, exponential in length."""
    rng = random.Random(seed)  # noqa: S311 # a workload, no secrets
    weights = [rank**-SKEW for rank in range(1, len(NAMES) + 1)]
    at, found = 0.0, []
    for _ in range(calls):
        at += rng.expovariate(RATE)
        found.append(PlannedCall(at, rng.choices(NAMES, weights)[0], rng.expovariate(1 / SECONDS)))
    return found


def run(calls: Sequence[PlannedCall], label: str, progress: OnProgress, *, copies: bool) -> CopiesRun:
    """The same calls through the gateway, with copies or without."""

    async def whole() -> CopiesRun:
        policy = POLICY.replace("COPIES", "2s" if copies else "null")
        async with Site(FILE, dict.fromkeys(PROFILES, MODEL), ROOM, ROOM, gateways=0, look_every=5.0) as site:
            callers = GatewayCallers(site, policy)
            reports = asyncio.ensure_future(callers.run())
            for name in PROFILES:  # every engine is made once, as on a node of a pool
                site.manager.orders.ensure(name)
                await site.until(name, "running")
            begin, asked = site.now, []
            for number, call in enumerate(calls):
                await asyncio.sleep(max(0.0, begin + call.at - site.now))
                asked.append(asyncio.ensure_future(callers.call(call.model, call.seconds)))
                progress(label, number / len(calls))
            answers = await asyncio.gather(*asked)
            seconds = site.now - begin
            await asyncio.sleep(120.0)
            left = [*site.left_over(), *site.machine.overlaps]
            reports.cancel()
            await asyncio.wait((reports,))
            await callers.gateway.aclose()
            woken, gave = counted(site, "copy").total(), counted(site, "gave_place").total()
            return CopiesRun(list(answers), seconds, woken, gave, left)

    return vtime.run(whole())
