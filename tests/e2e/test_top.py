"""`gateway top` on a real gateway: its output under a little load, and a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from loadtest.processes import Gateway, until
from tests.e2e.children import Call

TOKEN = "0123456789abcdef-of-this-test"  # noqa: S105 # a test's own
TOP = [sys.executable, "-m", "gateway.cli", "top"]
ON_THE_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
TAKEN, GIVEN_BACK = "\x1b[?1049h", "\x1b[?1049l"  # the other screen

pytestmark = pytest.mark.slow


def top(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120", **(env or {})}
    return subprocess.run([*TOP, *arguments], capture_output=True, text=True, timeout=30, env=environment, check=False)


@contextmanager
def load(gateway: Gateway) -> Iterator[None]:
    """Two long calls in flight, and three that have been answered when the body begins to run."""
    running = [Call(gateway.url, stream=True, max_tokens=2000) for _ in range(2)]
    try:
        for _ in range(3):
            assert Call(gateway.url, stream=False).read()[0] == 200
        yield
    finally:
        for call in running:
            call.socket.close()


def test_one_frame_as_text(gateway: Gateway) -> None:
    with load(gateway):
        ran = top("--url", gateway.control, "--once", "--interval", "200ms")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    lines = ran.stdout.splitlines()
    assert all(len(line) <= 120 and line == line.rstrip() for line in lines)
    assert lines[0].startswith(f"weir {gateway.control}   0.")
    assert [line.split()[0] for line in lines if re.match(r"[A-Z]{4}", line)] == ["CALLS", "CLASS", "MODEL", "ENGINE"]
    (row,) = [line.split() for line in lines if line.startswith("default ")]
    assert (row[1], row[3]) == ("0", "2")  # queued, running
    assert re.search(r"^sim +normal +2 ", ran.stdout, re.MULTILINE)
    engines = re.findall(r"^127\.0\.0\.1:\d+ +up +(\d)/\d+ .*┃", ran.stdout, re.MULTILINE)
    assert sorted(engines) in (["0", "2"], ["1", "1"])


def test_json_is_what_the_frame_is_made_of(gateway: Gateway) -> None:
    with load(gateway):
        ran = top("--url", gateway.control, "--once", "--json", "--interval", "0.5")
    (view,) = map(json.loads, ran.stdout.splitlines())
    assert sum(row["running"] for row in view["classes"]) == sum(row["in_flight"] for row in view["engines"]) == 2
    assert 0.45 < view["seconds"] < 10.0
    assert [flow["name"] for flow in view["tokens"]] == ["prompt", "cached", "completion"]


@pytest.mark.parametrize(
    ("port", "status", "why"),
    [
        ("url", 2, "this is not the control port of a gateway: it answers 404 to /summary"),
        ("nowhere", 1, "no connection: no gateway has its control port there"),
    ],
)
def test_no_gateway_is_one_clear_line(gateway: Gateway, port: str, status: int, why: str) -> None:
    url = gateway.url if port == "url" else "http://127.0.0.1:9"
    ran = top("--url", url, "--once")
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", f"gateway: {url}: {why}\n")


def test_the_token(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(TOKEN)
    wrong.write_text(TOKEN[::-1])
    with Gateway(tmp_path / "log", "--engine", "sim", "--admin-token-file", str(right), ready=False) as gateway:
        for arguments, status, why in (
            ([], 2, "it wants its admin token: give --token-file FILE or set WEIR_ADMIN_TOKEN"),
            (["--token-file", str(wrong)], 2, "it refuses the token"),
            (["--token-file", str(right)], 0, ""),
        ):
            ran = top("--url", gateway.control, "--once", "--interval", "0.1", *arguments)
            said = f"gateway: {gateway.control}: {why}\n" if why else ""
            assert (ran.returncode, ran.stderr) == (status, said)
        assert top("--url", gateway.control, "--once", env={"WEIR_ADMIN_TOKEN": TOKEN}).returncode == 0


class Terminal:
    """A terminal with a `gateway top` on it, which is its foreground process; `with` ends it."""

    def __init__(self, width: int, height: int, *arguments: str, **env: str) -> None:
        self.end, other = os.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(other)
        self.other = other
        self.output = ""
        argv = [sys.executable, "-c", ON_THE_TERMINAL, *TOP[1:], *arguments]
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1", **env}
        self.process = subprocess.Popen(argv, stdin=other, stdout=other, stderr=other, env=environment)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self.end)
        os.close(self.other)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.end, keys)

    def frame(self) -> list[str]:
        """The lines of the last frame; none before there is one."""
        text = self.output.rpartition("\x1b[H")[2] if TAKEN in self.output else ""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").split("\n")

    def read(self) -> None:
        """What has come meanwhile, at once."""
        while select.select([self.end], [], [], 0.02)[0]:
            self.output += os.read(self.end, 65536).decode(errors="replace")

    def shows(self, pattern: str, within: float = 15.0) -> bool:
        """Whether a frame comes with a line of that pattern."""

        def shown() -> bool:
            self.read()
            return any(re.search(pattern, line) for line in self.frame())

        return until(shown, within) is not None

    def ended(self, within: float = 5.0) -> int | None:
        """The exit status, None where it goes on."""

        def over() -> bool:
            self.read()
            return self.process.poll() is not None

        until(over, within)
        self.read()
        return self.process.poll()

    def is_as_before(self) -> bool:
        """Whether the terminal is as it was: its modes, its screen, its cursor."""
        seen = self.output.rindex("\x1b[?25h") > self.output.rindex("\x1b[?25l")
        return seen and self.output.count(TAKEN) == self.output.count(GIVEN_BACK) == 1 and self.modes() == self.before

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.other)


@pytest.mark.parametrize("way", ["Ctrl-C", "q", "SIGTERM"])
def test_every_way_out_gives_the_terminal_back(gateway: Gateway, way: str) -> None:
    with Terminal(80, 24, "--url", gateway.control, "--interval", "60") as terminal:
        assert terminal.shows("^ENGINE")
        assert terminal.modes() != terminal.before
        match way:
            case "Ctrl-C":
                terminal.type(b"\x03")
            case "q":
                terminal.type(b"q")
            case _:
                terminal.process.send_signal(signal.SIGTERM)
        assert terminal.ended() == 0
        assert terminal.is_as_before()
        assert "Traceback" not in terminal.output


def test_it_follows_the_size_of_the_terminal_at_once(gateway: Gateway) -> None:
    with Terminal(80, 24, "--url", gateway.control, "--interval", "60", COLUMNS="33", LINES="7") as terminal:
        assert terminal.shows("^ENGINE")
        assert (len(terminal.frame()), max(map(len, terminal.frame()))) == (24, 80)
        assert not terminal.shows("TRIM", 0)
        terminal.resize(140, 30)
        assert terminal.shows("^ENGINE.*TRIM", 3)
        assert (len(terminal.frame()), max(map(len, terminal.frame()))) == (30, 140)
        terminal.resize(30, 6)
        assert until(lambda: terminal.shows("weir", 0) and len(terminal.frame()) == 6, 3) is not None
        assert max(map(len, terminal.frame())) == 30


def test_colours_only_where_they_are_wanted(gateway: Gateway) -> None:
    colour = re.compile(r"\x1b\[(?:\d+;)*3[0-7]m")
    with Terminal(80, 24, "--url", gateway.control) as coloured:
        assert coloured.shows("^ENGINE")
        assert colour.search(coloured.output)
    with Terminal(80, 24, "--url", gateway.control, NO_COLOR="1") as plain:
        assert plain.shows("^ENGINE")
        assert not colour.search(plain.output)


def test_stopped_and_gone_on_with(gateway: Gateway) -> None:
    with Terminal(80, 24, "--url", gateway.control, "--interval", "0.2") as terminal:
        assert terminal.shows("^ENGINE")
        terminal.process.send_signal(signal.SIGTSTP)
        assert until(lambda: os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED | os.WNOHANG) is not None, 5)
        terminal.read()
        assert terminal.is_as_before()
        terminal.output = ""
        terminal.process.send_signal(signal.SIGCONT)
        assert terminal.shows("^ENGINE")
        terminal.type(b"q")
        assert terminal.ended() == 0
        assert terminal.is_as_before()


def test_a_gateway_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    with Gateway(tmp_path / "log", "--engine", "sim") as gateway:
        port = urlsplit(gateway.control).port
        for _ in range(3):
            assert Call(gateway.url, stream=False).read()[0] == 200
        with Terminal(100, 30, "--url", gateway.control, "--interval", "0.2") as terminal:
            assert terminal.shows(r"^ok +0\.0")
            gateway.child.kill()
            assert terminal.shows("^NO ANSWER for [0-9]+ s, still trying: no connection")
            assert terminal.shows("^ENGINE", 0)
            with Gateway(tmp_path / "again", "--engine", "sim", "--control", f"127.0.0.1:{port}"):
                assert terminal.shows("^its counters began again: it was restarted")
                assert not terminal.shows("NO ANSWER", 0)
            assert terminal.shows("^NO ANSWER")
            assert not re.search(r"\s-[0-9]", "\n".join(terminal.frame()))
            terminal.type(b"\x03")
            assert terminal.ended() == 0
            assert terminal.is_as_before()


def test_one_that_is_not_there_yet_is_waited_for_and_who_is_no_gateway_is_not(gateway: Gateway) -> None:
    with Terminal(80, 24, "--url", "http://127.0.0.1:9", "--interval", "0.2") as terminal:
        assert terminal.shows("^NO ANSWER for 1 s")
        terminal.type(b"\x03")
        assert terminal.ended() == 0
        assert terminal.is_as_before()
    with Terminal(80, 24, "--url", gateway.url) as terminal:
        assert terminal.ended(15) == 2
        assert terminal.output.replace("\r", "") == (
            f"gateway: {gateway.url}: this is not the control port of a gateway: it answers 404 to /summary\n"
        )


def test_another_reader_of_the_pipe_may_leave(gateway: Gateway) -> None:
    started = time.monotonic()
    argv = [*TOP, "--url", gateway.control, "--json", "--interval", "0.1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        json.loads(running.stdout.readline())
        running.stdout.close()
        assert running.wait(10) == 0
        assert running.stderr.read() == b""
    assert time.monotonic() - started < 15
