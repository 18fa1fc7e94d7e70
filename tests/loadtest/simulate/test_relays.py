"""Connections of frames in virtual time, which behave as TCP's."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.frames.channel import Channel
from gateway.frames.codec import from_decider, from_relay
from gateway.frames.messages import CountsAsk, WaitAsk
from loadtest.simulate import vtime
from loadtest.simulate.memory_frames import FrameLink


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
        link.release()
        assert decider.came == [(2.0, WaitAsk(1, 1)), (2.0, WaitAsk(2, 1))]

    vtime.run(scenario())
