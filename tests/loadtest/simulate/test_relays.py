"""Relays in virtual time: the calls of several go by one decider, and connections of frames behave as TCP's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.frames.channel import Channel
from gateway.frames.codec import from_decider, from_relay
from gateway.frames.messages import CountsAsk, WaitAsk
from loadtest.clients.retries import Clients
from loadtest.engine.config import sim_config
from loadtest.load.lengths import Length
from loadtest.load.plan import poisson
from loadtest.load.workload import Kind
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.memory_frames import FrameLink
from loadtest.simulate.relays import Relays
from loadtest.simulate.simulated_client import Try
from loadtest.simulate.simulation import SimulationRun

KIND = Kind(class_name="default", share=1.0, prompt=Length(constant=64), output=Length(constant=8))


def through_relays(count: int, delay: float) -> list[Try]:
    async def scenario() -> list[Try]:
        config = sim_config("a100-8b", num_gpu_blocks=1024, max_model_len=4096).engine
        engines = [MemoryEngine(config, seed=number) for number in range(2)]
        target = GatewayTarget(b"", engines, seed=1)
        records, sends = target.records, target.sends
        relays = Relays(target.gateway, target.memories, records, sends, count=count, delay=delay, seed=1)
        await relays.ready()
        target.doors = relays.sides
        run = SimulationRun(engines, target, poisson((KIND,), 10.0, 3.0, 1), clients=Clients(), seed=1)
        result = await run.until(3.0, grace=60.0)
        await asyncio.sleep(1.0)
        assert target.left_over() + relays.left_over() == []
        counted = [counts.ended for counts in relays.hub.totals.all()]
        assert (sum(counted), len(counted)) == (len(result.tries), count)
        assert min(counted) > 0
        await relays.aclose()
        return result.tries

    return vtime.run(scenario())


def test_calls_of_two_relays_go_by_one_decider_and_are_late_by_its_distance() -> None:
    near, far = through_relays(2, 0.0), through_relays(2, 0.01)
    assert {tried.outcome for tried in near + far} == {"ok"}
    near_mean, far_mean = (sum(tried.first_byte - tried.sent for tried in each) / len(each) for each in (near, far))
    assert far_mean - near_mean == pytest.approx(0.02, abs=0.01), "a question and its answer"
    assert through_relays(2, 0.01) == far


class Side:
    """One end of a connection, and what came to it."""

    def __init__(self, reader: Any) -> None:
        self.came: list[tuple[float, Any]] = []
        self.ends: list[float] = []
        loop = asyncio.get_running_loop()
        self.channel = Channel(
            reader,
            lambda message: self.came.append((loop.time(), message)),
            lambda _: self.ends.append(loop.time()),
        )


async def connected(*delays: float) -> tuple[Side, Side, FrameLink]:
    relay, decider = Side(from_decider()), Side(from_relay())
    left = list(delays)
    return relay, decider, FrameLink(relay.channel, decider.channel, lambda: left.pop(0) if left else 0.0)


def test_what_is_sent_later_never_arrives_sooner() -> None:
    async def scenario() -> None:
        relay, decider, _ = await connected(2.0, 0.5)
        relay.channel.send(WaitAsk(1, 1))
        await asyncio.sleep(1.0)
        relay.channel.send(WaitAsk(2, 1))
        await asyncio.sleep(5.0)
        assert decider.came == [(2.0, WaitAsk(1, 1)), (2.0, WaitAsk(2, 1))]

    vtime.run(scenario())


def test_a_close_comes_after_what_was_sent_and_a_break_takes_it_along() -> None:
    async def scenario(cut: bool) -> tuple[Side, Side]:
        relay, decider, link = await connected(1.0, 1.0, 1.0)
        decider.channel.send(CountsAsk())
        await asyncio.sleep(0.5)
        link.cut() if cut else decider.channel.close()
        await asyncio.sleep(5.0)
        return relay, decider

    relay, decider = vtime.run(scenario(cut=False))
    assert (relay.came, relay.ends, decider.ends) == ([(1.0, CountsAsk())], [1.5], [0.5])
    relay, decider = vtime.run(scenario(cut=True))
    assert (relay.came, relay.ends, decider.ends) == ([], [0.5], [0.5])


def test_what_a_hang_holds_back_comes_at_its_end_in_order() -> None:
    async def scenario() -> None:
        relay, decider, link = await connected()
        link.hold()
        for number in (1, 2):
            relay.channel.send(WaitAsk(number, 1))
            await asyncio.sleep(1.0)
        assert decider.came == []
        link.let_go()
        assert decider.came == [(2.0, WaitAsk(1, 1)), (2.0, WaitAsk(2, 1))]

    vtime.run(scenario())
