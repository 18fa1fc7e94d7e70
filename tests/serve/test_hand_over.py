"""Hand-over from a gateway to its successor: sockets, calls that run and wait, and every way in which it can fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from starlette.applications import Starlette

from gateway.cli import parser_for
from gateway.core.engines.speed import TPOT
from gateway.core.money.tariff import MICRO
from gateway.core.policy.file import decode
from gateway.decider.loading import Configuration
from gateway.frames.messages import VERSION
from gateway.relay.wire.server import Server
from gateway.serve import ending as endings
from gateway.serve.assembly import Gateway
from gateway.serve.data_port import MachinePort
from gateway.serve.ending import end, listen_for_successor
from gateway.serve.starting import Options, ProcessSignals, StartError
from gateway.serve.upgrade import receiver
from gateway.serve.upgrade.next_gateway import command
from gateway.serve.upgrade.receiver import (
    LATER,
    InheritedSockets,
    Predecessor,
    inherited,
    receive_payload,
    same_member,
    tell_ready,
)
from gateway.serve.upgrade.rendezvous import HandOffPayload, Offer, Ready, UnsafeFolder, line_of, listen_at
from gateway.shared.control.http1 import ControlPort
from gateway.shared.service_manager import ServiceManager
from tests.beside import beside
from tests.faults.scripted import gateway_over
from tests.flow.test_relays import Asking, until

NOBODY = 65534  # a user
PRICED = "engines_price: 3600/hour\nstorage: kept\n"  # one a second
ENGINES = ["http://127.0.0.1:9"]  # nobody sends it anything


class Signals:
    """Nobody sends any."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()


class Side:
    """One gateway, and what `serve` has beside it."""

    def __init__(self, gateway: Gateway, sockets: InheritedSockets) -> None:
        self.gateway = gateway
        self.sockets = sockets
        self.engine = next(iter(gateway.fleet))
        self.engine.ledger.slots = self.engine.ledger.max_slots = 2
        self.port = MachinePort(gateway, Options(announce=lambda _: None), Configuration(), sockets)
        self.control = ControlPort(Starlette(), "127.0.0.1:0")


@contextlib.asynccontextmanager
async def side(sockets: InheritedSockets | None = None, policy: str = "") -> AsyncIterator[Side]:
    async with gateway_over(ENGINES, decode(policy.encode())) as gateway:
        made = Side(gateway, sockets or InheritedSockets())
        try:
            yield made
        finally:
            await made.port.aclose()
            await made.control.aclose()
            close(made.sockets)


def close(sockets: InheritedSockets) -> None:
    for each in (*sockets.data, sockets.control, None if sockets.taken is None else sockets.taken.connection):
        if each is not None:
            each.close()


@contextlib.asynccontextmanager
async def running(path: Path, policy: str = "") -> AsyncIterator[tuple[Side, asyncio.Task[None]]]:
    """A gateway that can be taken over at `path`, and the task that ends with it."""
    async with side(policy=policy) as old, AsyncExitStack() as stack:
        await old.control.start()
        sender = listen_for_successor(path, old.port, old.control, stack, None)
        signals: Any = Signals()
        ending = asyncio.create_task(end(old.gateway, old.port, old.control, signals, sender, ServiceManager({})))
        try:
            yield old, ending
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)


async def taken_from(path: Path) -> InheritedSockets:
    return await asyncio.to_thread(inherited, str(path), "", {})


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(240):
            await scenario()

    uvloop.run(main())


@pytest.fixture(autouse=True)
def control_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "CONTROL_STAYS", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own" / "gateway"


def test_the_successor_knows_what_is_held_and_grants_what_waited_first(path: Path) -> None:
    async def scenario() -> None:
        async with running(path) as (old, ending):
            decider: Any = old.gateway.decider
            made: Any = old
            held = [Asking(made, decider, "a"), Asking(made, decider, "b")]
            for each in held:
                await each.granted.wait()
            assert held[0].grant is not None
            held[0].grant.first_byte(held[0].call.arrived)
            waiting = []
            for number in range(3):
                waiting.append(Asking(made, decider, str(number)))
                await until(lambda: old.gateway.dispatch.estimates.waiting("m") == len(waiting))
            tokens = old.engine.ledger.held
            sockets = await taken_from(path)
            assert sockets.taken is not None
            async with side(sockets) as new:
                await new.port.take_over(sockets.taken)
                assert (new.engine.ledger.held, new.engine.ledger.in_flight) == (tokens, 2)
                assert new.engine.prefills.queued == held[1].call.prompt_tokens, "the other's prompt was read"
                await until(lambda: new.gateway.dispatch.estimates.waiting("m") == 3)
                new_made: Any = new
                late = Asking(new_made, new_made.gateway.decider, "late")
                calls = [*held, *waiting]
                for last, next_one in zip(calls, [*waiting, late], strict=False):
                    await last.end()
                    async with asyncio.timeout(60):
                        await next_one.granted.wait()
                    await until(lambda: new.engine.ledger.in_flight == 2)
                assert {process.role for process in new.port.processes()} == {"decider", "relay"}
                for each in (calls[-1], late):
                    await each.end()
                await until(lambda: new.engine.ledger.held == 0)
                assert old.engine.ledger.held == 0
                await ending
                await old.port.aclose()

    run(scenario)


def test_a_gateway_that_is_told_to_end_in_the_middle_of_it_hands_over_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would serve: the successor waits for its word, and gives up while the last streams end here."""
    monkeypatch.setattr(receiver, "GIVEN_WITHIN", 5.0)

    servers, data = list[Server](), path.parents[1] / "data"

    async def lasts(within: float, *, gently: bool = False) -> None:
        servers[0].stop_accepting(given=gently)
        await asyncio.sleep(3600 if within and not gently else 0)

    async def scenario() -> None:
        async with side() as old, AsyncExitStack() as stack:
            made: Any = old
            servers.append(old.gateway.server)
            await servers[0].listen(f"unix:{data}")
            await old.control.start()
            signals = ProcessSignals(asyncio.get_running_loop(), child=True)
            stack.callback(signals.close)
            sender = listen_for_successor(path, old.port, old.control, stack, None)
            ending = asyncio.create_task(end(old.gateway, old.port, old.control, signals, sender, ServiceManager({})))
            call = Asking(made, made.gateway.decider)
            await call.granted.wait()
            monkeypatch.setattr(old.gateway.server, "drain", lasts)
            sockets = await taken_from(path)
            assert sockets.taken is not None
            signals.end()
            await until(lambda: old.gateway.dispatch.draining)
            async with side(sockets) as new:
                await new.port.take_over(sockets.taken)
                assert data.exists(), "clients find it by its path"
                assert (new.engine.ledger.held, new.engine.ledger.in_flight) == (old.engine.ledger.held, 1)
                await call.end()
                await until(lambda: new.engine.ledger.held == 0)
                await ending
                await old.port.aclose()

    run(scenario)


@pytest.mark.parametrize("grace", [3600, 0], ids=["its grace", "giving up the lead"])
def test_what_waits_is_not_refused_by_one_that_is_taken_over_in(
    path: Path, monkeypatch: pytest.MonkeyPatch, grace: int
) -> None:
    monkeypatch.setattr(receiver, "GIVEN_WITHIN", 5.0)

    async def scenario() -> None:
        async with side(policy=f"timeouts: {{drain_grace: {grace}s}}\n") as old, AsyncExitStack() as stack:
            made: Any = old
            await old.control.start()
            signals = ProcessSignals(asyncio.get_running_loop(), child=True)
            stack.callback(signals.close)
            sender = listen_for_successor(path, old.port, old.control, stack, None)
            assert sender is not None

            async def resign() -> None:  # a store may take its time
                await asyncio.wait([sender.ready])

            monkeypatch.setattr(old.port, "resign", resign)
            ending = asyncio.create_task(end(old.gateway, old.port, old.control, signals, sender, ServiceManager({})))
            calls = [Asking(made, made.gateway.decider, str(number)) for number in range(3)]
            await until(lambda: old.gateway.dispatch.estimates.waiting("m") == 1)
            signals.end()
            await until(lambda: old.gateway.dispatch.leaving)
            sockets = await taken_from(path)
            assert sockets.taken is not None
            async with side(sockets) as new:
                await new.port.take_over(sockets.taken)
                for call in calls:
                    await call.granted.wait()
                    await call.end()
                await ending
                await old.port.aclose()

    run(scenario)


def test_what_a_call_uses_is_counted_once_whether_it_ran_or_waited_at_the_hand_over(path: Path) -> None:
    async def scenario() -> None:
        async with running(path, PRICED) as (old, ending):
            made: Any = old
            began = old.gateway.clock()
            calls = [Asking(made, made.gateway.decider, str(number)) for number in range(3)]  # two run, one waits
            for each in calls[:2]:
                await each.granted.wait()
            await asyncio.sleep(0.2)
            sockets = await taken_from(path)
            assert sockets.taken is not None
            async with side(sockets, PRICED) as new:
                await new.port.take_over(sockets.taken)
                for each, tokens in zip(calls, (10, 20, 30), strict=True):
                    await each.granted.wait()
                    assert each.grant is not None
                    each.grant.first_byte(old.gateway.clock())
                    if tokens == 20:
                        each.grant.wrote(400 + tokens)
                    else:
                        each.grant.finished(old.gateway.clock(), 400, tokens, None)
                    await asyncio.sleep(0.1)
                    await each.end()
                await until(lambda: new.engine.ledger.held == 0)
                book, passed = new.gateway.limits, new.gateway.clock() - began
                ((before, none),), ((after, tokens),) = (
                    each.gateway.limits.money.totals.values() for each in (old, new)
                )
                assert (none, tokens) == (0, 1260)
                assert 0.4 <= (before + after) / MICRO <= passed
                assert [each.tokens for each in book.quotas.states()] == [1260, 1260]
                assert not any(window.reserved for window in book.quotas)
                await ending
                await old.port.aclose()
                assert sum(micro for micro, _ in old.gateway.limits.money.totals.values()) == before, "kept is kept"

    run(scenario)


@pytest.mark.parametrize("moved", [False, True])
def test_the_successor_learns_of_a_call_what_its_own_teach_it(path: Path, moved: bool) -> None:
    """Time per output token is measured from the first byte, not from the grant. `moved`: another attempt was made."""

    async def scenario() -> None:
        async with running(path) as (old, ending):
            made: Any = old
            call = Asking(made, made.gateway.decider)
            await call.granted.wait()
            assert call.grant is not None
            if moved:
                await call.grant.move(frozenset())
            await asyncio.sleep(1.0)
            call.grant.first_byte(old.gateway.clock())
            sockets = await taken_from(path)
            assert sockets.taken is not None
            async with side(sockets) as new:
                await new.port.take_over(sockets.taken)
                call.grant.finished(old.gateway.clock(), 400, 20, None)
                await call.end()
                await until(lambda: new.engine.ledger.held == 0)
                learned = pytest.approx(old.engine.speed.tpot, abs=0.01)  # the successor is told a moment later
                assert new.engine.speed.tpot == learned != TPOT
                await ending
                await old.port.aclose()

    run(scenario)


def test_the_sockets_are_those_of_the_one_before_and_nobody_is_refused(path: Path) -> None:
    async def scenario() -> None:
        async with running(path) as (old, ending):
            address = old.gateway.server.addresses[0]
            sockets = await taken_from(path)
            assert sockets.taken is not None
            assert (sockets.epoch, sockets.relays) == (1 + LATER, 1)
            async with side(sockets) as new:
                await new.port.take_over(sockets.taken)
                await ending
                assert old.gateway.decider.up, "balancers that ask on an old connection come back"
                port = int(address.rpartition(":")[2])
                with socket.create_connection(("127.0.0.1", port)):
                    await new.port.listen(None)
                    assert address in new.port.addresses
                    await until(lambda: new.gateway.server.connections == 1)
                await old.port.aclose()

    run(scenario)


def test_a_successor_that_ends_before_it_is_ready_changes_nothing(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with running(path) as (old, ending):
            decider: Any = old.gateway.decider
            made: Any = old
            for _ in range(2):
                sockets = await taken_from(path)
                assert sockets.taken is not None
                close(sockets)
                await asyncio.sleep(0)
                call = Asking(made, decider)
                await call.granted.wait()
                await call.end()
                await until(lambda: "has ended before it could: this one goes on" in capsys.readouterr().err)
            assert not ending.done()
            assert old.gateway.dispatch.successor is None

    run(scenario)


def test_two_cannot_take_over_at_once(path: Path) -> None:
    async def scenario() -> None:
        async with running(path):
            first = await taken_from(path)
            with pytest.raises(StartError, match=r"refuses: another gateway is taking over already$"):
                await taken_from(path)
            close(first)

    run(scenario)


def test_one_that_speaks_other_frames_decides_for_its_own_calls_to_their_end(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with running(path) as (old, _):
            made: Any = old
            call = Asking(made, made.gateway.decider)
            await call.granted.wait()
            sockets = await taken_from(path)
            assert sockets.taken is not None
            sockets.taken.offer.frames = VERSION + 1
            async with side(sockets) as new:
                await new.port.take_over(sockets.taken)
                assert f"speaks version {VERSION + 1} of the frames, and this one {VERSION}" in capsys.readouterr().err
                assert new.engine.ledger.held == 0
                assert old.gateway.dispatch.successor is None
            await call.end()

    run(scenario)


def test_a_take_over_of_nothing_says_what_to_do(path: Path) -> None:
    with pytest.raises(StartError, match=r"^--take-over: no gateway of this user runs .*: start without --take-over$"):
        inherited(str(path), "", {})


@pytest.mark.slow
@pytest.mark.parametrize("meets", [False, True], ids=["before they met", "before it made its offer"])
def test_a_gateway_that_was_killed_is_no_reason_not_to_serve(
    path: Path, meets: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with listen_at(path) as listening:
        if meets:  # it ends with a connection that nobody has taken
            ending = threading.Timer(0.2, listening.close)
            ending.start()
        else:
            listening.close()
        assert inherited(str(path), "", {}).taken is None
    assert f"{path}: the gateway that ran here has ended: this one serves in its place" in capsys.readouterr().err


@pytest.mark.slow
def test_a_gateway_whose_decider_was_killed_is_taken_over_once_the_next_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "NEXT_WITHIN", 10.0)  # a busy machine may hold both threads for longer than a second
    listen_at(path).close()

    def next_decider() -> None:
        time.sleep(0.3)  # the other looks, and finds nobody yet
        with listen_at(path) as listening:
            listening.settimeout(60.0)
            connection, _ = listening.accept()
            with connection:
                connection.sendall(line_of(Offer(refused="it is here")))

    with beside(next_decider), pytest.raises(StartError, match="refuses: it is here"):
        inherited(str(path), "", {})


@pytest.mark.parametrize(
    ("listens", "another", "pid", "goes_on"),
    [
        (True, True, os.getpid(), True),
        (True, False, os.getpid(), False),
        (False, False, os.getpid(), False),
        (False, False, 0, False),
    ],
    ids=["another decider is there", "its end takes a moment", "it had stopped", "all of it has ended"],
)
def test_a_gateway_whose_decider_is_killed_before_it_is_told_to_stop_is_not_doubled(
    path: Path, listens: bool, another: bool, pid: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent starts another decider, so the two gateways would grant the same engines."""
    monkeypatch.setattr(receiver, "ANOTHER_WITHIN", 0.3)

    def decider(listening: socket.socket) -> None:
        listening.settimeout(60.0)
        connection, _ = listening.accept()
        with connection, socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            offer = Offer(VERSION, data=1, pids={1: pid})
            socket.send_fds(connection, [line_of(offer)], [one.fileno(), two.fileno()])
            connection.recv(4096)
            if not listens:
                listening.close()

    async def main() -> HandOffPayload:
        sockets = await taken_from(path)
        taken = sockets.taken
        assert taken is not None
        taken.pid -= another  # who listens now is another process
        try:
            return await receive_payload(taken, partial(tell_ready, taken, ""))
        finally:
            close(sockets)

    with listen_at(path) as listening, beside(lambda: decider(listening)):
        if goes_on:
            with pytest.raises(StartError, match=r"has started another decider .*: try again$"):
                asyncio.run(main())
        else:
            assert asyncio.run(main()) == HandOffPayload()


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (b"hello\n", "has not answered"),
        (line_of(Offer(data=1)), "has not given its listening sockets"),
        (b"x" * 70_000, "sends something else"),
    ],
)
def test_what_is_no_gateway_is_not_taken_over(path: Path, said: bytes, line: str) -> None:
    with listen_at(path) as listening:
        listening.setblocking(True)
        child = os.fork()
        if child == 0:
            connection, _ = listening.accept()
            with contextlib.suppress(OSError):
                connection.sendall(said)
            os._exit(0)
        with pytest.raises(StartError, match=line):
            inherited(str(path), "", {})
        os.waitpid(child, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_another_user_is_refused_also_where_the_folder_was_opened(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(path: Path) -> None:
        async with running(path) as (_, ending):
            for each in (path.parent, path):
                os.chmod(each, 0o777)  # noqa: S103 # that is what is tried
            told = await asyncio.to_thread(_as_nobody, path)
            assert b"it is of user 0, and only that user may take it over" in told
            assert f"of user {NOBODY} wanted to take over" in capsys.readouterr().err
            assert not ending.done()

    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        Path(folder).chmod(0o755)
        run(lambda: scenario(Path(folder) / "own" / "gateway"))


def _as_nobody(path: Path) -> bytes:
    """What another user is told there."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            os.setuid(NOBODY)
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                theirs.sendall(connection.recv(999))
            os._exit(0)
        os.waitpid(child, 0)
        theirs.close()
        return ours.recv(999)


def test_a_folder_that_others_may_use_is_no_rendezvous(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UnsafeFolder, match="expected a folder of this user's alone"):
        listen_at(tmp_path / "open" / "gateway")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UnsafeFolder):
        listen_at(tmp_path / "link" / "gateway")


def test_a_signal_to_be_taken_over_ends_no_gateway_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGUSR2 without a handler ends the process at once, with all that streams."""
    (tmp_path / "open").mkdir(mode=0o755)

    async def scenario() -> None:
        signals = ProcessSignals(asyncio.get_running_loop(), child=False)
        async with side() as old, AsyncExitStack() as stack:
            stack.callback(signals.close)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert listen_for_successor(tmp_path / "open" / "one", old.port, old.control, stack, signals) is None
            capsys.readouterr()
            os.kill(os.getpid(), signal.SIGUSR2)
            await until(lambda: "no other gateway can take over from this one" in capsys.readouterr().err)

    run(scenario)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python", "-m", "gateway.cli", "serve"], ["-m", "gateway.cli", "serve"]),
        (["python", "g", "serve", "--take-over", "--log", "none"], ["g", "serve", "--take-over", "--log", "none"]),
        (["python", "g", "serve", "--take-over", "/a"], ["g", "serve", "--take-over", "/a"]),
        (["python", "g", "serve", "--take-over=/a"], ["g", "serve"]),
    ],
)
def test_the_next_gateway_has_the_same_command_line(words: list[str], expected: list[str]) -> None:
    found = command(words, Path("/run/weir/g"))
    assert found == [sys.executable, *expected, "--take-over=/run/weir/g"]
    flags = found[found.index("serve") :]
    assert parser_for(flags).parse_args(flags).take_over == "/run/weir/g"


# -- sockets of a service manager -------------------------------------------------------------------------------------

ACTIVATED = """
import os, socket, sys
from gateway.serve.starting import StartError
from gateway.serve.upgrade.receiver import inherited

os.environ["LISTEN_PID"] = str(os.getpid() + int(sys.argv[1]))
try:
    given = inherited(None, "")
except StartError as error:
    sys.exit(str(error))
names = [each.getsockname()[1] for each in given.data]
print(names, given.control and given.control.getsockname()[1], given.owner, "LISTEN_FDS" in os.environ)
"""


def activated(sockets: list[socket.socket], names: str, offset: int = 0) -> subprocess.CompletedProcess[str]:
    """A process that was given these sockets, from descriptor 3 on."""
    copies = [os.dup(each.fileno()) for each in sockets]
    program = f"""
import os, sys
copies = {copies}
high = [os.dup2(each, 200 + number) for number, each in enumerate(copies)]
for number, each in enumerate(high):
    os.dup2(each, 3 + number)
os.execve(sys.executable, [sys.executable, "-c", {ACTIVATED!r}, "{offset}"], os.environ)
"""
    environ = {**os.environ, "LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": names}
    try:
        return subprocess.run(
            [sys.executable, "-c", program], pass_fds=copies, env=environ, capture_output=True, text=True, check=False
        )
    finally:
        for each in copies:
            os.close(each)


@pytest.mark.slow
def test_sockets_of_a_socket_unit_are_taken_by_their_names() -> None:
    with socket.create_server(("127.0.0.1", 0)) as data, socket.create_server(("127.0.0.1", 0)) as control:
        ports = [each.getsockname()[1] for each in (data, control)]
        ran = activated([data, control], "weir-gateway.socket:control")
        assert ran.stdout == f"[{ports[0]}] {ports[1]} False False\n", ran.stderr
        ran = activated([data, control], "")
        assert ran.stdout == f"{ports} None False False\n", ran.stderr
        ran = activated([control], "control")
        assert ran.stdout == f"[] {ports[1]} True False\n", "the data port's path is the gateway's own"
        ran = activated([data], "data", offset=1)
        assert ran.stdout == "[] None True False\n", "they are for another process"


@pytest.mark.slow
def test_what_is_no_listening_socket_is_refused_by_name() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        ran = activated([udp], "logs")
        assert ran.stderr == "LISTEN_FDS: descriptor 3 (logs) is no ListenStream= of a socket unit\n"


@pytest.mark.parametrize(
    ("was", "would_be", "frames", "why"),
    [
        ("prod a:1", "", VERSION, "is the member prod a:1, and this one would be in no cluster"),
        ("", "prod a:1", VERSION, "is in no cluster, and this one would be the member prod a:1"),
        ("prod a:1", "prod b:1", VERSION, "is the member prod a:1, and this one would be the member prod b:1"),
        ("prod a:1", "prod a:1", VERSION + 1, f"speaks version {VERSION + 1} of the frames, and this one {VERSION}"),
    ],
)
def test_nobody_else_takes_over_from_a_member_of_a_cluster(was: str, would_be: str, frames: int, why: str) -> None:
    with socket.socket(socket.AF_UNIX) as nobody:
        taken = Predecessor(nobody, 7, Offer(frames, member=was))
        with pytest.raises(StartError, match=rf"\(pid 7\) {why}: end that one with SIGTERM"):
            same_member(taken, would_be)
        same_member(Predecessor(nobody, 7, Offer(VERSION, member=was)), was)


@pytest.mark.parametrize("message", [Offer(data=1), Ready("/d"), HandOffPayload({1: 2}, state=b"s")])
def test_what_a_later_version_adds_is_left_out(message: Offer | Ready | HandOffPayload) -> None:
    more = b'{"to_come": {"deep": [1]},' + line_of(message)[1:]
    assert msgspec.json.decode(more, type=type(message)) == message


@pytest.mark.parametrize("said", [b'{"frames": "one"}', b'{"pids": [1]}', b"[]"])
def test_what_is_no_offer_is_none(said: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        msgspec.json.decode(said, type=Offer)
