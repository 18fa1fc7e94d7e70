"""Port of a decider among several processes, without its parent: what it keeps for the next one."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.decider.loading import Configuration
from gateway.decider.relays.session import RelaySession
from gateway.frames.messages import AllHeld, RelayCounts
from gateway.serve.data_port import MachinePort
from gateway.serve.processes.deciding import DeciderProcess
from gateway.serve.processes.place import Beats
from gateway.serve.starting import Options
from gateway.serve.upgrade.receiver import InheritedSockets
from tests.cluster.test_port import place_in
from tests.faults.scripted import gateway_over
from tests.flow.test_relays import hello

COUNTS = RelayCounts(b"", 0, 0, 0, {}, {}, {}, 0, 0, 0)


def test_relays_that_leave_a_decider_that_can_keep_nothing_are_gone_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(gateway_over([]))
            place = place_in(folder, stack)
            process = DeciderProcess(place, Beats(place.beats, lambda: None))
            options = Options(announce=lambda _: None)
            port = MachinePort(gateway, options, Configuration(), InheritedSockets(), process)
            stack.push_async_callback(port.aclose)
            relay = RelaySession(port._hub)
            for message in (hello(), AllHeld(0, []), COUNTS):
                relay.take(message)
            shutil.rmtree(folder)
            relay.lost("")
            async with asyncio.timeout(20):
                await port.drain(0.0)

    asyncio.run(scenario())
    assert "if this decider dies, the next one does not know them" in capsys.readouterr().err
