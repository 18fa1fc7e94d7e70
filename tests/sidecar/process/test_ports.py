"""Free ports, and the paths of sockets, with real sockets in the way."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest import processes
from sidecar.process.ports import AddressTaken, clear_socket, free_port
from tests.sidecar.nothing_left import nothing_left


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.mark.parametrize("listening", [True, False], ids=["listening", "bound with SO_REUSEADDR"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 # somebody else's
def test_a_port_that_another_has_is_passed_over(listening: bool, host: str) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, 0))
        if listening:
            other.listen()
        busy, free = other.getsockname()[1], processes.free_port()
        assert free_port([busy, free]) == free
        with pytest.raises(AddressTaken, match=r"no free port on 127.0.0.1 .*Address already in use: give it more"):
            free_port([busy, free], taken={free})


def test_the_port_of_an_engine_that_has_just_ended_is_the_last_resort() -> None:
    """The server has closed a connection first, as vLLM does, and the kernel keeps that for a minute."""
    with socket.socket() as engine:
        engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        engine.bind(("127.0.0.1", 0))
        engine.listen()
        port, free = engine.getsockname()[1], processes.free_port()
        with socket.create_connection(("127.0.0.1", port)) as client:
            engine.accept()[0].close()
            assert client.recv(1) == b""
    assert free_port([port, free]) == free
    assert free_port([port]) == port
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(AddressTaken):
            free_port([port])


def test_no_port_at_all() -> None:
    with pytest.raises(AddressTaken, match=r"no free port on 127.0.0.1 in the sidecar's pool: "):
        free_port([])


def test_a_path_where_nothing_is(tmp_path: Path) -> None:
    clear_socket(tmp_path / "a.sock")


def test_a_dead_engine_s_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    (tmp_path / "link.sock").symlink_to(path)
    with pytest.raises(AddressTaken, match="is no socket"):
        clear_socket(tmp_path / "link.sock")
    clear_socket(path)
    assert not path.exists()


@pytest.mark.parametrize("how", ["listens", "its queue is full", "bound, not listening yet", "datagrams"])
def test_a_socket_that_somebody_has_is_refused(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.sock"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if how == "datagrams" else socket.SOCK_STREAM) as other,
        socket.socket(socket.AF_UNIX) as waiting,
    ):
        other.bind(str(path))
        if how in {"listens", "its queue is full"}:
            other.listen(0)
        if how == "its queue is full":
            waiting.connect(str(path))
        with pytest.raises(AddressTaken, match="another process has this socket: end it"):
            clear_socket(path)
    assert path.exists()


def test_what_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    path.write_text("precious")
    with pytest.raises(AddressTaken, match="is no socket: it was not removed"):
        clear_socket(path)
    (tmp_path / "link.sock").symlink_to(path)
    with pytest.raises(AddressTaken, match="is no socket"):
        clear_socket(tmp_path / "link.sock")
    with pytest.raises(AddressTaken, match="Not a directory"):
        clear_socket(path / "b.sock")
    assert path.read_text() == "precious"


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(AddressTaken, match="longer than the 107 bytes"):
        clear_socket(tmp_path / ("x" * 108))
