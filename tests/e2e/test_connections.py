"""Connections of a gateway process: under few file descriptors, and under certificates that change."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gateway.serve.starting import files_warning, shared_out
from loadtest.processes import Child, get, until
from tests.certificates import certificate
from tests.e2e.children import SimEngine
from tests.raw_calls import chat

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

MODELS = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
FEW = 256
HEAD = [sys.executable, "-m", "gateway.cli", "serve", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0"]


# -- descriptors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 20, 100, 256, 1024, 4096, 20_000, 1_048_576])
def test_the_shares_are_within_the_limit(limit: int) -> None:
    clients, control = shared_out(limit)
    assert clients >= 1
    assert control >= 1
    if limit >= 100:
        assert clients + control < limit - 32
        assert limit - clients - control >= min(clients, 4096), "as many for engines"
    assert (files_warning(limit, clients), bool(files_warning(limit, clients + 1))) == (None, True)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("limit", [12, 64])
def test_a_limit_that_leaves_no_room_to_serve_is_one_line(limit: int, workers: str, tmp_path: Path) -> None:
    argv = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *HEAD, "--engine", "sim:1", "--workers", workers]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert f"open files: the hard limit is {limit}, expected 100 at least" in ended.stderr


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SimEngine]:
    engine = SimEngine(tmp_path / "engine.log")
    with engine.child:
        yield engine


def test_idle_clients_leave_descriptors_for_engines_and_operators(tmp_path: Path, engine: SimEngine) -> None:
    argv = ["sh", "-c", f'ulimit -n {FEW}; exec "$@"', "sh", *HEAD, "--engine", engine.url]
    with Child("gateway", argv, tmp_path / "log") as child, contextlib.ExitStack() as stack:
        where = urlsplit(child.line(r"^data port (\S+)", 60.0))
        control = child.line(r"^control port (\S+)", 60.0)
        assert f"the hard limit of {FEW} leaves room for {shared_out(FEW)[0]} client connections" in child.output()
        child.wait(lambda: get(f"{control}/readyz")[0] == 200, 60.0, "200 on /readyz")

        def client() -> socket.socket:
            address = (where.hostname or "", where.port or 0)
            return stack.enter_context(socket.create_connection(address, timeout=60))

        engine.faults(slow=10.0)  # the answer takes half a minute: it has not ended while others come
        working = client()
        working.sendall(chat("localhost", "sim", "hello", max_tokens=400))
        assert working.recv(1000).startswith(b"HTTP/1.1 200")
        for _ in range(300):
            with contextlib.suppress(ConnectionResetError):  # the first of those beyond are told, the others only reset
                client()
        assert get(f"{control}/readyz")[0] == 200
        assert get(f"{control}/fleet")[0] == 200
        engine.faults()
        rest = b""
        while b"0\r\n\r\n" not in rest:
            rest += working.recv(65536)
        assert b"data: [DONE]" in rest
        working.sendall(chat("localhost", "sim", "again", max_tokens=3))
        assert working.recv(1000).startswith(b"HTTP/1.1 200")
        assert "Too many open files" not in child.output()


def test_streams_have_their_engines_connection(tmp_path: Path, engine: SimEngine) -> None:
    """Clients up to their share stream at once, and each gets through: none is told that no engine is there."""
    argv = ["sh", "-c", f'ulimit -n {FEW}; exec "$@"', "sh", *HEAD, "--engine", engine.url]
    policy = tmp_path / "policy.yaml"
    policy.write_text("budget: {max_concurrency: 256}\n")
    with Child("gateway", [*argv, "--policy", str(policy)], tmp_path / "log") as child, contextlib.ExitStack() as stack:
        where = urlsplit(child.line(r"^data port (\S+)", 60.0))
        control = child.line(r"^control port (\S+)", 60.0)
        child.wait(lambda: get(f"{control}/readyz")[0] == 200, 60.0, "200 on /readyz")
        engine.faults(slow=4.0)  # no answer ends, and leaves its place to another, while clients come
        clients, heads = [], []
        for number in range(200):
            address = (where.hostname or "", where.port or 0)
            with contextlib.suppress(ConnectionError):
                own = (f"127.0.0.{1 + number % 2}", 0)  # each address may have half
                client = stack.enter_context(socket.create_connection(address, timeout=60, source_address=own))
                client.sendall(chat("localhost", "sim", "hello", max_tokens=200))
                clients.append(client)  # not where sending has met the reset: reading would then find an end
        for client in clients:
            with contextlib.suppress(ConnectionError):
                heads.append(client.recv(400))
        assert sum(head.startswith(b"HTTP/1.1 200") for head in heads) == shared_out(FEW)[0]
        refused = [head for head in heads if not head.startswith(b"HTTP/1.1 200")]
        assert refused
        assert all(b"x-weir-reason: connections" in head for head in refused), refused


# -- certificates -----------------------------------------------------------------------------------------------------


def shown(port: int, *, own: tuple[Path, Path] | None = None) -> bytes:
    """The certificate that the gateway shows; it has then answered a call too."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if own is not None:
        context.load_cert_chain(*own)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as secure,
    ):
        secure.sendall(MODELS)
        answer = secure.recv(1000)
        if not answer:  # in TLS 1.3 a server refuses a client's certificate after the client's handshake
            raise ConnectionResetError
        assert answer.startswith(b"HTTP/1.1 200")
        return secure.getpeercert(binary_form=True) or b""


def put(pair: tuple[Path, Path], target: tuple[Path, Path]) -> None:
    for source, to in zip(pair, target, strict=True):
        to.with_suffix(".new").write_bytes(source.read_bytes())
        to.with_suffix(".new").rename(to)


@pytest.mark.parametrize("hangup", [False, True])
def test_a_new_certificate_is_used_and_a_bad_one_is_not(tmp_path: Path, hangup: bool) -> None:
    first, second = certificate(tmp_path, "first"), certificate(tmp_path, "second")
    used = (tmp_path / "used.pem", tmp_path / "used.key")
    put(first, used)
    argv = [*HEAD, "--engine", "http://127.0.0.1:9", "--tls-cert", str(used[0]), "--tls-key", str(used[1])]
    with Child("gateway", argv, tmp_path / "log") as child:
        port = urlsplit(child.line(r"^data port (\S+)", 60.0)).port or 0
        child.line(r"(no engine)", 60.0)
        before = shown(port)
        put(second, used)
        if hangup:
            child.process.send_signal(signal.SIGHUP)
        assert until(lambda: shown(port) != before, 60.0) is not None
        assert child.line(r"(tls: version 2 is active)", 60.0)
        after = shown(port)
        used[0].write_text("no certificate\n")
        if hangup:
            child.process.send_signal(signal.SIGHUP)
        assert child.line(r"(tls: version 2 stays active)", 60.0)
        assert shown(port) == after
        assert "Traceback" not in child.output()


def test_clients_show_a_certificate_where_that_is_asked(tmp_path: Path) -> None:
    own, client, other = (certificate(tmp_path, name) for name in ("own", "client", "other"))
    tls = ("--tls-cert", str(own[0]), "--tls-key", str(own[1]), "--tls-client-ca", str(client[0]))
    with Child("gateway", [*HEAD, "--engine", "http://127.0.0.1:9", *tls], tmp_path / "log") as child:
        port = urlsplit(child.line(r"^data port (\S+)", 60.0)).port or 0
        assert shown(port, own=client)
        for wrong in (None, other):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                shown(port, own=wrong)
