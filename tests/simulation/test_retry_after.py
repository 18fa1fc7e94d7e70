"""Retry-After under steady overload, in virtual time: a client that returns at that time is admitted."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from loadtest.clients.calls import ClientCall, Try
from loadtest.clients.retries import DO_NOT, Clients
from loadtest.engine.config import sim_config
from loadtest.load.lengths import Length
from loadtest.load.plan import poisson
from loadtest.load.workload import Kind
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.simulation import SimulationRun

POLICY = b"""
version: 1
classes: {interactive: {}, default: {ttft: 1s, deadline: 5s, max_queue: 64}}
service_tiers: {}
"""
CALL = (Kind(prompt=Length(constant=16), output=Length(constant=20), ignore_eos=True),)  # 0.15 s on the engine
TOGETHER = 2  # calls on the engine
RATE = 26.0  # calls a second: twice what it does, about
WARM = 4.0  # seconds until it is overload
SECONDS = 40.0
REFUSED = {"deadline_unreachable", "queue_full", "shed"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_who_comes_back_when_it_was_told_to_is_let_in(seed: int) -> None:
    """Beside newcomers at a steady rate, who do not come back: five clients a second who obey, once."""
    obedient: list[list[Try]] = []

    async def scenario() -> Counter[str]:
        loop = asyncio.get_running_loop()
        engine = MemoryEngine(sim_config("h100-8b", max_num_seqs=TOGETHER).engine, seed=seed)
        target = GatewayTarget(POLICY, [engine], seed=seed)
        for call in poisson(CALL, 5.0, SECONDS - WARM, seed + 100):
            obeys = Clients(retries=1, exact=True)
            probe = ClientCall(call, target, obeys, random.Random(0), lambda ended: obedient.append(ended.tries))
            loop.call_at(WARM + call.at, probe.send)
        newcomers = poisson(CALL, RATE, SECONDS, seed)
        run = SimulationRun([engine], target, newcomers, clients=Clients(retries=0), seed=seed)
        result = await run.until(SECONDS, grace=30.0)
        await asyncio.sleep(60.0)  # the last of those who come back have done so
        assert target.left_over() == []
        return Counter(tried.outcome for tried in result.tries)

    outcomes = vtime.run(scenario())
    assert outcomes["deadline_unreachable"] > 0.2 * outcomes.total(), "it is overload"
    refused = [tried for tries in obedient for tried in tries if tried.outcome != "ok"]
    assert {tried.outcome for tried in refused} <= REFUSED
    assert all(tried.status == 503 and (tried.advised > 0.0 or tried.advised == DO_NOT) for tried in refused)
    returned = [tries for tries in obedient if len(tries) == 2]
    admitted = [tries for tries in returned if tries[1].status == 200]
    waits = sorted(tries[0].advised for tries in returned)
    told = f"{len(admitted)} of {len(returned)} let in, after {waits[0]}..{waits[-1]} s; {outcomes}"
    assert len(returned) >= 50, told
    assert len(admitted) >= 0.95 * len(returned), told
