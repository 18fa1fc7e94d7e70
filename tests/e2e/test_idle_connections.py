"""Ten thousand idle connections: their memory, their effect on other clients, and the return of all they took."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from loadtest.processes import Gateway, get, until
from tests.e2e.children import SimEngine, gateway, post, sockets

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

IDLE = 10_000
BURST = 500
SPARE = 20
NEEDED = IDLE + SPARE + 5_500  # the gateway keeps some for its engines
POLICY = f"server: {{max_connections: {IDLE + SPARE}}}\ntimeouts: {{keep_alive: 10m}}\n"
PEERS = (("127.0.0.1", 0), ("127.0.0.2", 0))  # each may have half
ASK = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def open_files() -> Iterator[None]:
    """As many as the system allows, in this process; the gateway sees to itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < NEEDED:
        pytest.skip(f"the hard limit of open files is {hard}, {NEEDED} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def memory(gateway: Gateway) -> int:
    """KiB resident in the gateway's process."""
    status = Path(f"/proc/{gateway.child.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1])


@contextlib.contextmanager
def idle_clients(gateway: Gateway) -> Iterator[list[socket.socket]]:
    """Half of them have sent nothing yet, half have had an answer.

    The gateway has taken a burst before the next begins: a connection that finds the queue of the listener full for a
    minute is forgotten by the kernel, which tells its client nothing.
    """
    where = urlsplit(gateway.url)
    with contextlib.ExitStack() as stack:
        clients = []
        for number in range(IDLE):
            address = (where.hostname or "", where.port or 0)
            client = socket.create_connection(address, timeout=60, source_address=PEERS[number % 2])
            clients.append(stack.enter_context(client))
            if number % 2:
                client.sendall(ASK)
            if len(clients) % BURST == 0:
                assert until(lambda: gateway.total("weir_connections") == len(clients), 120.0) is not None
        for client in clients[1::2]:
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        yield clients


def ask(gateway: Gateway) -> int:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    return post(gateway.url + "/v1/chat/completions", body)[0]


@pytest.mark.usefixtures("open_files")
def test_ten_thousand_idle_connections(tmp_path: Path, engine: SimEngine) -> None:
    with gateway(tmp_path, engine, POLICY) as running:

        def connections(count: int) -> bool:
            return running.total("weir_connections") == count

        assert [ask(running) for _ in range(20)] == [200] * 20
        before, held = memory(running), sockets(running.child.pid)
        full, empty = [], []
        for _ in range(2):
            with idle_clients(running) as clients:
                full.append(memory(running))
                assert [ask(running) for _ in range(20)] == [200] * 20
                assert get(f"{running.control}/readyz")[0] == 200
                for client in clients[: IDLE : IDLE // 100]:  # they are all still served
                    client.sendall(ASK)
                    assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
                with contextlib.ExitStack() as stack:
                    address = clients[0].getpeername()
                    more = [
                        stack.enter_context(socket.create_connection(address, 60, source_address=PEERS[number % 2]))
                        for number in range(SPARE + 1)
                    ]
                    assert more[-1].recv(65536).startswith(b"HTTP/1.1 503 "), "one too many"
            assert until(lambda: connections(0), 120.0) is not None
            assert until(lambda: sockets(running.child.pid) <= held, 120.0) is not None
            empty.append(memory(running))
        print(f"\nresident KiB: {before} before, {full} with {IDLE} idle connections, {empty} without them again")
        print(f"{(full[0] - before) / IDLE:.2f} KiB per idle connection")
        assert (full[0] - before) / IDLE < 20
        # Freed memory stays with the process for the next ones: what tells is that they need no more.
        assert full[-1] - full[0] < (full[0] - before) / 4
