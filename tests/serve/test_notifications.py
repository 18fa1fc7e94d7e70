"""Gateway and sidecar under a service manager: they say when they are ready and when they end, and beat meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.processes import Child, Gateway
from tests.sidecar.laid_out import lay_out

pytestmark = pytest.mark.slow  # a second for each process started

SIDECAR = """
gateways: ["http://127.0.0.1:9"]
token_file: sidecar.token
listen: 127.0.0.1:0
engine: {simulated: h100-8b}
models: {one: {model_path: /m/one}}
"""


class Systemd:
    """Hears what a process says to its service manager."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(60.0)

    def next(self, but: str = "WATCHDOG=1") -> str:
        """The next message of another kind."""
        while (message := self.socket.recv(4096).decode()) == but:
            continue
        return message

    def falls_silent(self, seconds: float) -> bool:
        """Whether nothing is said for so long, after what was on its way."""
        self.socket.settimeout(seconds)
        try:
            for _ in range(100):
                self.socket.recv(100)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(60.0)
        return False


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")  # Linux keeps ten messages for one who reads late
    heard = Systemd(tmp_path / "notify")
    with heard.socket:
        yield heard


def test_a_gateway_is_ready_once_it_listens_and_beats_until_it_has_ended(tmp_path: Path, systemd: Systemd) -> None:
    with Gateway(tmp_path / "log", "--engine", "sim:1", "--log", "none") as running:
        assert systemd.next().startswith(f"READY=1\nSTATUS=data port {running.url}, control port ")
        assert systemd.socket.recv(100) == b"WATCHDOG=1"
        running.child.process.terminate()
        assert systemd.next() == "STOPPING=1"
        assert running.child.process.wait(60.0) == 0


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_an_upgrade_makes_the_new_process_the_main_one(
    tmp_path: Path, systemd: Systemd, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "0")  # who beats, systemd tells by the process; this socket does not
    argv = ("--engine", "http://127.0.0.1:9", "--log", "none", *words)
    with Gateway(tmp_path / "log", *argv, ready=False) as running:
        assert systemd.next().startswith("READY=1\n")
        os.kill(running.child.pid, signal.SIGUSR2)
        started = running.child.line(r"process (\d+) was started to take over", 60.0)
        said = {systemd.next().partition("\n")[0] for _ in range(2)}
        assert said == {f"MAINPID={started}", "READY=1"}
        assert running.child.process.wait(60.0) == 0
        running.child.kill()


def test_a_gateway_that_hangs_misses_its_beats(tmp_path: Path, systemd: Systemd) -> None:
    with Gateway(tmp_path / "log", "--engine", "sim:1", "--log", "none") as running:
        systemd.next()
        os.kill(running.child.pid, signal.SIGSTOP)
        try:
            assert systemd.falls_silent(2.0)  # twice the watchdog's time
        finally:
            os.kill(running.child.pid, signal.SIGCONT)
        assert systemd.socket.recv(100) == b"WATCHDOG=1"


def test_a_sidecar_says_the_same(tmp_path: Path, systemd: Systemd) -> None:
    (tmp_path / "sidecar.yaml").write_text(SIDECAR)
    (tmp_path / "sidecar.token").write_text("t" * 32)
    (tmp_path / "sidecar.token").chmod(0o600)
    lay_out(tmp_path / "gpus", [80 * 1024**3])
    argv = [sys.executable, "-m", "sidecar.cli", "serve", "--config", str(tmp_path / "sidecar.yaml"),
            "--gpus-from", str(tmp_path / "gpus")]  # fmt: skip
    with Child("sidecar", argv, tmp_path / "log") as child:
        assert systemd.next().startswith("READY=1\nSTATUS=control API http://127.0.0.1:")
        assert systemd.socket.recv(100) == b"WATCHDOG=1"
        child.process.terminate()
        assert systemd.next() == "STOPPING=1"
