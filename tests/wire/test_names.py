"""Name resolution of engines' hosts: the number of queries, and service while name servers are silent.

`Servers` stands in for `getaddrinfo`: a name can be answered, denied, or left without an answer until `speak`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.upstream import names as module
from gateway.upstream.client import Client, ClientSettings, EngineError, parse_origin
from gateway.upstream.failures import UnknownName
from gateway.upstream.names import AGAIN, AT_ONCE, PATIENCE, TTL, Names


class Servers:
    """What name servers know. `asked`: the names that came, in order."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, ...]] = {}
        self.silent: set[str] = set()
        self.failing: dict[str, int] = {}
        self.asked: list[str] = []
        self.hung = 0
        self._speak = threading.Event()
        self._lock = threading.Lock()

    def speak(self) -> None:
        """Those that were silent answer from now on."""
        self.silent.clear()
        self._speak.set()

    def getaddrinfo(self, host: str, port: Any, **_: Any) -> list[Any]:
        with self._lock:
            self.asked.append(host)
            silent = host in self.silent
            self.hung += silent
        if silent:
            self._speak.wait(60.0)
        if host in self.failing:
            raise socket.gaierror(self.failing[host], "it failed")
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.known[host]]


class Clock:
    """The loop's time, ahead by as much as a test has let pass."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        real = loop.time
        patch.setattr(loop, "time", lambda: real() + self.ahead)


Scenario = Callable[[Names, Servers, Clock], Awaitable[None]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    servers = Servers()
    monkeypatch.setattr(module.socket, "getaddrinfo", servers.getaddrinfo)

    def played(scenario: Scenario) -> None:
        async def main() -> None:
            clock = Clock(asyncio.get_running_loop(), monkeypatch)
            async with asyncio.timeout(60):
                await scenario(Names(), servers, clock)

        try:
            asyncio.run(main())
        finally:
            servers.speak()

    return played


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # a thread has no event for the loop
        await asyncio.sleep(0.001)


def test_an_address_is_not_looked_up(play: Callable[[Scenario], None]) -> None:
    async def scenario(names: Names, servers: Servers, _: Clock) -> None:
        assert await names.addresses("10.0.0.1") == ("10.0.0.1",)
        assert await names.addresses("::1") == ("::1",)
        assert servers.asked == []

    play(scenario)


def test_a_name_is_looked_up_once_in_its_time_however_many_ask(play: Callable[[Scenario], None]) -> None:
    async def scenario(names: Names, servers: Servers, clock: Clock) -> None:
        servers.known["vllm"] = ("10.0.0.2", "10.0.0.3", "10.0.0.2")
        found = await asyncio.gather(*(names.addresses("vllm") for _ in range(500)))
        assert set(found) == {("10.0.0.2", "10.0.0.3")}
        assert len(servers.asked) == names.look_ups == 1
        servers.known["vllm"] = ("10.0.0.9",)
        assert await names.addresses("vllm") == ("10.0.0.2", "10.0.0.3")
        clock.ahead += TTL
        assert await names.addresses("vllm") == ("10.0.0.9",)
        assert len(servers.asked) == 2

    play(scenario)


@pytest.mark.parametrize("how", ["silent", "failing"])
def test_the_last_good_addresses_serve_while_name_servers_do_not(how: str, play: Callable[[Scenario], None]) -> None:
    async def scenario(names: Names, servers: Servers, clock: Clock) -> None:
        servers.known["vllm"] = ("10.0.0.2",)
        await names.addresses("vllm")
        clock.ahead += TTL
        if how == "silent":
            servers.silent.add("vllm")
        else:
            servers.failing["vllm"] = socket.EAI_AGAIN
        for _ in range(100):
            assert await names.addresses("vllm") == ("10.0.0.2",)
        if how == "silent":
            clock.ahead += PATIENCE
            assert await asyncio.wait_for(names.addresses("vllm"), 60.0) == ("10.0.0.2",)
        assert len(servers.asked) == 2
        servers.failing.clear()
        servers.known["vllm"] = ("10.0.0.7",)
        servers.speak()
        clock.ahead += AGAIN

        async def moved() -> None:
            while await names.addresses("vllm") != ("10.0.0.7",):
                await asyncio.sleep(0.001)

        await moved()

    play(scenario)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("without", ["descriptor", "thread"])
def test_a_look_up_that_this_machine_cannot_make_is_made_again(
    without: str, known: bool, play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """getaddrinfo raises an OSError that is no gaierror where it can open nothing (EAI_SYSTEM)."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files") if without == "descriptor" else RuntimeError("no thread")

    async def scenario(names: Names, servers: Servers, clock: Clock) -> None:
        servers.known["vllm"] = ("10.0.0.2",)
        if known:
            await names.addresses("vllm")
            clock.ahead += TTL
        with monkeypatch.context() as patch:
            if without == "descriptor":
                patch.setattr(module.socket, "getaddrinfo", fails)
            else:
                patch.setattr(module.threading.Thread, "start", fails)
            for _ in range(3):
                if known:
                    assert await names.addresses("vllm") == ("10.0.0.2",)
                else:
                    with pytest.raises(UnknownName, match="the name vllm does not resolve"):
                        await asyncio.wait_for(names.addresses("vllm"), 10.0)
                clock.ahead += AGAIN
        servers.known["vllm"] = ("10.0.0.7",)

        async def moved() -> None:
            while await names.addresses("vllm") != ("10.0.0.7",):
                await asyncio.sleep(0.001)

        await asyncio.wait_for(moved(), 10.0)
        assert names._running == 0

    play(scenario)


def test_a_name_that_is_denied_is_no_longer_believed(play: Callable[[Scenario], None]) -> None:
    async def scenario(names: Names, servers: Servers, clock: Clock) -> None:
        servers.known["vllm"] = ("10.0.0.2",)
        await names.addresses("vllm")
        servers.known.clear()
        clock.ahead += TTL
        for _ in range(50):
            with pytest.raises(UnknownName, match="the name vllm does not resolve: Name or service not known"):
                await names.addresses("vllm")
        assert len(servers.asked) == 2
        servers.known["vllm"] = ("10.0.0.4",)
        clock.ahead += AGAIN
        assert await names.addresses("vllm") == ("10.0.0.4",)

    play(scenario)


def test_a_doubted_name_is_asked_for_again_but_not_at_every_failure(play: Callable[[Scenario], None]) -> None:
    async def scenario(names: Names, servers: Servers, clock: Clock) -> None:
        servers.known["vllm"] = ("10.0.0.2",)
        names.doubt("vllm")
        await names.addresses("vllm")
        servers.known["vllm"] = ("10.0.0.5",)
        for _ in range(50):
            names.doubt("vllm")
            assert await names.addresses("vllm") == ("10.0.0.2",)
        assert len(servers.asked) == 1
        clock.ahead += AGAIN
        assert await names.addresses("vllm") == ("10.0.0.5",)

    play(scenario)


def test_names_that_hang_keep_no_other_waiting_and_no_more_than_so_many_are_asked_at_once(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(names: Names, servers: Servers, _: Clock) -> None:
        servers.known["good"] = ("10.0.0.2",)
        hanging = [f"hangs-{number}" for number in range(AT_ONCE - 1)]
        servers.silent.update([*hanging, "late"])
        waiting = [asyncio.ensure_future(names.addresses(host)) for host in hanging]
        await until(lambda: servers.hung == AT_ONCE - 1)
        assert await asyncio.wait_for(names.addresses("good"), 60.0) == ("10.0.0.2",)
        waiting += [asyncio.ensure_future(names.addresses(host)) for host in ("late", "in-line")]
        await until(lambda: servers.hung == AT_ONCE)
        assert "in-line" not in servers.asked
        servers.known["in-line"] = ("10.0.0.3",)
        servers.speak()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert ended[-1] == ("10.0.0.3",)
        assert all(isinstance(error, UnknownName) for error in ended[:-1])

    play(scenario)


def test_who_no_longer_waits_leaves_the_look_up_to_the_others(play: Callable[[Scenario], None]) -> None:
    async def scenario(names: Names, servers: Servers, _: Clock) -> None:
        servers.known["vllm"] = ("10.0.0.2",)
        servers.silent.add("vllm")
        first, second = (asyncio.ensure_future(names.addresses("vllm")) for _ in range(2))
        await until(lambda: servers.hung == 1)
        first.cancel()
        await asyncio.wait((first,))
        servers.speak()
        assert await second == ("10.0.0.2",)
        assert len(servers.asked) == 1

    play(scenario)


def test_hosts_that_nobody_asks_for_any_more_are_forgotten(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 2)

    async def scenario(names: Names, servers: Servers, _: Clock) -> None:
        for host in ("a", "b", "c"):
            servers.known[host] = ("10.0.0.2",)
            await names.addresses(host)
        assert list(names._hosts) == ["b", "c"]

    play(scenario)


def test_a_process_ends_while_a_name_hangs(play: Callable[[Scenario], None]) -> None:
    """`asyncio.run` waits for the threads of its own executor: this one is a daemon, and nobody's but its own."""
    ended = threading.Event()

    async def scenario(names: Names, servers: Servers, _: Clock) -> None:
        servers.silent.add("hangs")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(names.addresses("hangs"), 0.05)
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "weir-name")
        ended.set()

    play(scenario)
    assert ended.is_set()


def test_a_client_says_that_the_name_is_at_fault_and_tries_every_address(play: Callable[[Scenario], None]) -> None:
    async def failure(client: Client, within: float) -> EngineError:
        with pytest.raises(EngineError) as caught:
            await client.send(b"GET", b"/health", b"", b"", timeout=within)
        return caught.value

    async def scenario(names: Names, servers: Servers, _: Clock) -> None:
        answered = asyncio.Event()

        async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            answered.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(parse_origin(f"http://vllm:{port}"), ClientSettings(), names=names)
        servers.silent.add("vllm")
        error = await failure(client, 0.1)
        assert (error.kind, error.reason) == ("timeout", "name")
        assert str(error).startswith("the name vllm does not resolve: no answer within 0.")
        servers.known["vllm"] = ("127.0.0.2", "127.0.0.1")  # nobody listens on the first
        servers.speak()
        reply = await client.send(b"GET", b"/health", b"", b"", timeout=60.0)
        assert (reply.status, answered.is_set()) == (200, True)
        reply.close()
        client.close()
        nobody = Client(parse_origin("http://nobody:1"), ClientSettings(), names=names)
        error = await failure(nobody, 5.0)
        assert (error.kind, error.reason, client.active) == ("connect", "name", 0)
        server.close()
        await server.wait_closed()

    play(scenario)
