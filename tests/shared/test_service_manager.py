"""Service manager's notifications, heard on a real datagram socket as systemd hears them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.shared.service_manager import ServiceManager


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(60.0)
        yield heard


def environ(heard: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": heard.getsockname()} | more


def beats(environ: dict[str, str], heard: socket.socket) -> list[str]:
    """What is heard in a tenth of a second after a process is ready."""
    heard.setblocking(False)

    async def live() -> None:
        with ServiceManager(environ) as manager:
            manager.ready("there")
            async with asyncio.timeout(0.1):
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(live())
    return list(datagrams(heard))


def datagrams(heard: socket.socket) -> Iterator[str]:
    while True:
        try:
            yield heard.recv(4096).decode()
        except BlockingIOError:
            return


def test_it_says_ready_and_stopping(systemd: socket.socket) -> None:
    with ServiceManager(environ(systemd)) as manager:
        manager.ready("data port http://127.0.0.1:8000")
        assert systemd.recv(4096) == b"READY=1\nSTATUS=data port http://127.0.0.1:8000"
        manager.stopping()
        assert systemd.recv(4096) == b"STOPPING=1"


def test_a_name_in_the_abstract_namespace() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0weir-test-{os.getpid()}")
        heard.settimeout(60.0)
        with ServiceManager({"NOTIFY_SOCKET": f"@weir-test-{os.getpid()}"}) as manager:
            manager.stopping()
            assert heard.recv(4096) == b"STOPPING=1"


def test_the_heart_beats_where_a_watchdog_is_set(systemd: socket.socket) -> None:
    heard = beats(environ(systemd, WATCHDOG_USEC="20000", WATCHDOG_PID=str(os.getpid())), systemd)
    assert heard.pop(0) == "READY=1\nSTATUS=there"
    assert set(heard) == {"WATCHDOG=1"}
    assert len(heard) >= 3  # of ten in a tenth of a second


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}])
def test_no_heart_beats_where_none_is_expected_of_this_process(
    systemd: socket.socket, watchdog: dict[str, str]
) -> None:
    assert beats(environ(systemd, **watchdog), systemd) == ["READY=1\nSTATUS=there"]


def test_nobody_need_listen(tmp_path: Path) -> None:
    for told in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        with ServiceManager(told) as manager:
            manager.stopping()
