"""Child processes of a load test: a gateway, an engine, each in a process group of its own.

No child is left behind. Where SIGKILL leaves this process no time to end them, the kernel does.

Synchronous, for the process that drives a run. Output goes to a file, so a child can never block on a pipe that nobody
reads, and is quoted when something goes wrong. Every wait has an end and is given up at once when the child dies.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from loadtest import die_with_parent
from sidecar.process.process_family import everyone

POLL, SELDOM = 0.02, 0.1  # seconds between two looks: at first, and after two seconds
QUOTED = 6000  # bytes of a child's output in an error
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ChildError(Exception):
    """A child ended, or did not get ready in time. The message quotes the end of its output."""


def get(url: str, *, timeout: float = 60.0, method: str = "GET", token: str = "") -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own, that shows the token if there is one. OSError or
    HTTPException where there is no answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        connection.request(method, parts.path + (f"?{parts.query}" if parts.query else ""), headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def answers(url: str, *, timeout: float = 2.0) -> bool:
    """Whether a GET of `url` is answered with 200 now."""
    try:
        return get(url, timeout=timeout)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def samples(url: str, name: str) -> list[tuple[dict[str, str], float]]:
    """The labels and value of every sample called exactly `name` in the Prometheus text at `url`."""
    text = get(url)[1].decode()
    found = (match for match in SAMPLE.finditer(text) if match["name"] == name)
    return [(dict(LABEL.findall(match["labels"] or "")), float(match["value"])) for match in found]


def total(url: str, name: str, **labels: str) -> float:
    """The sum of the samples called `name` that carry `labels`; 0.0 where there is none."""
    return sum(value for has, value in samples(url, name) if all(has.get(key) == labels[key] for key in labels))


def walk(first: int, last: int) -> Iterator[int]:
    """Iterate for ever over the ports from `first` up to `last`, not included, from anywhere on. Neighbours come far
    apart: whoever is given a port may take some behind it too."""
    at = secrets.randbelow(last - first)
    while True:
        yield first + at
        at = (at + 11) % (last - first)


ports = walk(10_000, 20_000)  # below those that the kernel gives to connections and to listeners on port 0


def free_port() -> int:
    """A TCP port of loopback that nobody listens on. Nobody else is given it by chance before it is used, or while its
    server is stopped."""
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            break
    return port


def until(condition: Callable[[], bool], timeout: float, *, every: float | None = None) -> float | None:
    """Seconds until `condition` held, None if it did not within `timeout`. Looks come `every` so many seconds; None:
    ever more rarely."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        if waited > timeout:
            return None
        time.sleep(min(max(POLL, waited / 20), SELDOM) if every is None else every)
    return time.monotonic() - start


def executed(argv: Sequence[str], output: IO[bytes], env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    """A process of its own session that ends with this thread, over a program that ties it."""
    return subprocess.Popen(
        [sys.executable, "-IS", die_with_parent.__file__, str(os.getpid()), *argv],
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Child:
    """A started child process and the group it leads; `with` stops it. SIGTERM first, then SIGKILL for the group. It
    gets SIGTERM too when the thread that has started it ends, however that ends."""

    started = staticmethod(executed)  # tests have a cheaper way

    def __init__(self, name: str, argv: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self.process = Child.started(argv, output, env)
        self.pid = self.process.pid

    def __repr__(self) -> str:
        code = self.process.poll()
        return f"<Child {self.name} pid {self.pid} {'running' if code is None else f'exit {code}'}>"

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def failure(self, what: str) -> ChildError:
        return ChildError(f"{self!r} {what}; its last output:\n{self.output()[-QUOTED:]}")

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around the waits for its start: a failure or Ctrl-C there kills it."""
        try:
            yield
        except BaseException:
            self.kill()
            raise

    def wait(self, condition: Callable[[], bool], timeout: float, what: str, *, every: float | None = None) -> float:
        """Seconds until `condition` held. Raises ChildError if the child dies first, or after `timeout` seconds."""
        waited = until(lambda: condition() or not self.alive, timeout, every=every)
        if waited is None:
            raise self.failure(f"did not get to {what} within {timeout:.0f} s")
        if not (self.alive or condition()):
            raise self.failure(f"ended before {what}")
        return waited

    def says(self, words: str, timeout: float = 60.0) -> None:
        """Wait for `words` in the output, which may come a moment after what they tell of."""
        self.wait(lambda: words in self.output(), timeout, repr(words))

    def line(self, pattern: str, timeout: float) -> str:
        """The first group of the first match of `pattern` in the output, waited for."""
        compiled = re.compile(pattern, re.MULTILINE)
        self.wait(lambda: compiled.search(self.output()) is not None, timeout, f"the line {pattern!r}")
        match = compiled.search(self.output())
        assert match is not None  # noqa: S101 - the wait has just seen it, and output only grows
        return match[1]

    def group(self) -> list[int]:
        """The pids of the group that still run, zombies left out; children that outlive their parent are in it."""
        return [seen.pid for seen in everyone() if seen.group == self.pid and not seen.ended]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, if anything of it is left."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        """SIGKILL the whole group at once, and reap it."""
        self.signal(signal.SIGKILL)
        self.process.wait(60.0)
        if until(lambda: not self.group(), 60.0) is None:
            raise self.failure(f"left processes {self.group()} that SIGKILL did not end")

    def stop(self, grace: float = 10.0) -> int:
        """SIGTERM, `grace` seconds to leave, then SIGKILL for what is left of the group. The exit status."""
        self.process.terminate()
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            self.kill() if self.group() else None
        return self.process.returncode


class Gateway:
    """`gateway serve` on free ports. `/readyz` has answered 200, unless `ready` is False. `with` stops it."""

    def __init__(
        self,
        log: Path,
        *arguments: str,
        ready: bool = True,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        ports = ("--listen", f"127.0.0.1:{free_port()}", "--control", f"127.0.0.1:{free_port()}")
        self.child = Child("gateway", [sys.executable, "-m", "gateway.cli", "serve", *ports, *arguments], log, env=env)
        with self.child.starting():
            self.url = self.child.line(r"^data port (http://\S+)", timeout)
            self.control = self.child.line(r"^control port (http://\S+)", timeout)
            if ready:
                self.child.wait(lambda: answers(f"{self.control}/readyz"), timeout, "200 on /readyz")

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop()

    def fleet(self) -> Any:
        """The JSON of `GET /fleet`."""
        return json.loads(get(f"{self.control}/fleet")[1])

    def total(self, name: str, **labels: str) -> float:
        """The sum of the gateway's own samples called `name`."""
        return total(f"{self.control}/metrics", name, **labels)

    def idle(self) -> bool:
        """Whether nothing is held and nothing is in flight, on any engine."""
        return all(engine["held_tokens"] == 0 and engine["in_flight"] == 0 for engine in self.fleet()["engines"])
