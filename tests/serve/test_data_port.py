"""Port of a decider among several processes, without its parent: what it keeps for the next one."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from gateway.decider.loading import Configuration
from gateway.decider.relays.session import RelaySession
from gateway.frames.messages import VERSION, AllHeld, RelayCounts
from gateway.serve.data_port import MachinePort
from gateway.serve.processes.deciding import DeciderProcess
from gateway.serve.processes.place import Beats
from gateway.serve.starting import Options
from gateway.serve.upgrade.receiver import InheritedSockets, Predecessor
from gateway.serve.upgrade.rendezvous import Offer
from gateway.shared.process_start import born
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


@pytest.mark.parametrize("gently", [False, True])
def test_a_decider_that_ends_leaves_no_socket_open_from_which_nobody_accepts(tmp_path: Path, gently: bool) -> None:
    """A client that connects would wait until the last stream has ended, and be reset."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(gateway_over([]))
            place = place_in(tmp_path, stack)
            where = place.data[0].getsockname()
            process = DeciderProcess(place, Beats(place.beats, lambda: None))
            port = MachinePort(gateway, Options(announce=lambda _: None), Configuration(), InheritedSockets(), process)
            stack.push_async_callback(port.aclose)
            if gently:
                port.hand_over(0.0, "")
            else:
                await port.drain(0.0)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(where)
            assert port.offer()[0].data == 0, "who takes over now opens its own"

    asyncio.run(scenario())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux says when a process began")
def test_nobody_waits_for_a_program_that_has_the_pid_of_a_relay_of_the_gateway_before(tmp_path: Path) -> None:
    """Calls would wait for what it holds, for as long as it lives."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = msgspec.structs.replace(place_in(tmp_path, stack), living={1: 11})
            first = DeciderProcess(place, Beats(place.beats, lambda: None))
            first.take({7: os.getpid(), 8: os.getppid()})
            assert first.expected == {1: 11, 7: os.getpid(), 8: os.getppid()}
            first.memory.born[os.getppid()] -= 1  # it was another's
            first.keep([])
            assert DeciderProcess(place, first.beats).expected == {1: 11, 7: os.getpid()}

    asyncio.run(scenario())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux says when a process began")
def test_a_decider_that_ends_in_the_middle_of_a_take_over_leaves_no_other_program_to_be_waited_for(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            nobody = stack.enter_context(socket.socket())
            offer = Offer(VERSION, pids={7: os.getpid(), 8: os.getppid()})
            taken = Predecessor(nobody, 1, offer, {os.getpid(): born(os.getpid()), os.getppid(): 1})
            place = msgspec.structs.replace(place_in(tmp_path, stack), inherited=InheritedSockets(taken=taken))
            assert DeciderProcess(place, Beats(place.beats, lambda: None)).expected == {7: os.getpid()}

    asyncio.run(scenario())
