"""Port of one member, without its cluster: reloads of its policy, and strangers at its door."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from gateway.core.policy.file import decode
from gateway.decider.loading import ClusterFiles, Configuration
from gateway.frames.messages import VERSION
from gateway.serve.assembly import Gateway
from gateway.serve.cluster import port as module
from gateway.serve.cluster.port import ClusterPort
from gateway.serve.processes.deciding import DeciderProcess
from gateway.serve.processes.place import TAKE, Beats, Place
from gateway.serve.starting import Options, StartError
from gateway.serve.upgrade.receiver import InheritedSockets, Predecessor
from gateway.serve.upgrade.rendezvous import Offer
from gateway.shared.certificate import Certificate
from loadtest.processes import free_port
from tests.certificates import certificate
from tests.faults.scripted import gateway_over

SHOWN = "of-sixteen-characters"
CLUSTER = "cluster: {{url: 'redis://127.0.0.1:1', advertise: '127.0.0.1:{port}', token_file: t}}\n"


def place_in(folder: Path, stack: AsyncExitStack) -> Place:
    """The place of a decider that is not the first of its gateway."""
    data, control, inner = (
        stack.enter_context(socket.create_server(("127.0.0.1", 0))),
        stack.enter_context(socket.create_server(("127.0.0.1", 0))),
        stack.enter_context(socket.socket(socket.AF_UNIX)),
    )
    inner.bind(str(folder / "decider"))
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
        stack.enter_context(each)
    return Place(
        role="decider", number=0, epoch=2, relays=1, data=[data], control=control, inner=inner,
        path=str(folder / "decider"), beats=theirs, living={}, secret="s" * 64, parent=os.getpid(), started=0.0,
        parent_started=0.0, first=False, inherited=InheritedSockets(),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def port_of(folder: Path, configuration: Configuration) -> AsyncIterator[tuple[ClusterPort, Gateway]]:
    """The port, once it listens, and its gateway."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(gateway_over([]))
        gateway.apply(configuration)
        place = place_in(folder, stack)
        process = DeciderProcess(place, Beats(place.beats, lambda: None))
        port = ClusterPort(gateway, Options(announce=lambda _: None), configuration, process)
        stack.push_async_callback(port.aclose)
        await port.listen(None)
        yield port, gateway


def configuration(number: int, folder: Path, more: str = "") -> Configuration:
    """The policy of a member at this port, and its secrets."""
    files = ClusterFiles((SHOWN,), None, None, Certificate(folder / "localhost.pem", folder / "localhost.key"))
    return Configuration(decode((CLUSTER.format(port=number) + more).encode()), cluster=files)


def test_a_certificate_that_cannot_be_renewed_leaves_the_policy_before_in_force(tmp_path: Path) -> None:
    _, key = certificate(tmp_path)
    number = free_port()
    before, after = (configuration(number, tmp_path, more) for more in ("", "body: {max: 1MiB}\n"))

    async def scenario() -> None:
        async with port_of(tmp_path, before) as (port, gateway):
            key.write_text("no key")
            with pytest.raises(OSError, match="PEM"):
                port.apply(after)
            assert gateway.policy is before.policy
            assert port._leadership._configuration is before
            certificate(tmp_path)
            port.apply(after)
            assert gateway.policy is after.policy
            assert port._leadership._configuration is after

    asyncio.run(scenario())


def test_a_member_that_is_started_again_shows_the_certificate_before_while_its_files_are_faulty(tmp_path: Path) -> None:
    chain, key = certificate(tmp_path)
    number = free_port()
    held = {path: path.read_bytes() for path in (chain, key)}
    files = ClusterFiles((SHOWN,), None, None, Certificate(chain, key), held)
    loaded = msgspec.structs.replace(configuration(number, tmp_path), cluster=files)
    chain.write_text("no certificate")
    trust = ssl.create_default_context(cadata=held[chain].decode())

    async def scenario() -> None:
        async with port_of(tmp_path, loaded):
            _, writer = await asyncio.open_connection("127.0.0.1", number, ssl=trust, server_hostname="localhost")
            writer.close()

    asyncio.run(scenario())


def test_an_address_at_which_nobody_can_listen_is_found_before_the_gateway_before_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate(tmp_path)
    number = free_port()

    async def scenario() -> None:
        async with port_of(tmp_path, configuration(number, tmp_path)) as (port, _):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                told: list[bytes] = []
                monkeypatch.setattr(port._beats, "tell", told.append)
                port._listen = "192.0.2.1:1"  # of documentation: no machine has it
                taken = Predecessor(ours, 1, Offer(VERSION, member=port._member))
                with pytest.raises(StartError, match=r"^cluster\.listen 192\.0\.2\.1:1: "):
                    await port.take_over(taken)
                assert TAKE not in told

    asyncio.run(scenario())


def test_a_member_that_drains_leaves_no_socket_open_from_which_nobody_accepts(tmp_path: Path) -> None:
    certificate(tmp_path)

    async def scenario() -> None:
        async with port_of(tmp_path, configuration(free_port(), tmp_path)) as (port, _):
            where = port._place.data[0].getsockname()
            await port.drain(0.0)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(where)

    asyncio.run(scenario())


def test_whoever_begins_no_handshake_is_sent_away_as_soon_as_one_who_shows_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate(tmp_path)
    number = free_port()
    monkeypatch.setattr(module, "WITHIN", 0.2)

    async def scenario() -> None:
        async with port_of(tmp_path, configuration(number, tmp_path)):
            reader, writer = await asyncio.open_connection("127.0.0.1", number)
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(scenario())
