"""Parts for tests of a gateway process: an engine that can be stopped, and calls that are read later."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.processes import Child, Gateway, free_port, get
from tests.raw_calls import chat

PATIENCE = 300.0  # seconds without a byte: a real vLLM on a slow CPU takes a minute for four calls, one after another
# A bound of the class, as an engine's own is learned: it grows while a call runs alone.
ONE_AT_A_TIME = "classes: {default: {max_concurrency: 1, ttft: 60s}}\nfleet: {poll: 100ms, health: 20s}\n"


class SimEngine:
    """A simulated engine in a process of its own, whose steps can be stopped and let go on."""

    def __init__(self, log: Path, *arguments: str) -> None:
        argv = [sys.executable, "-m", "loadtest.engine", "--profile", "h100-8b", "--port", str(free_port()), *arguments]
        self.child = Child("engine", argv, log)
        self.url = self.child.line(r"^ready (\S+)", 60.0)

    def faults(self, **faults: object) -> None:
        post(self.url + "/_faults", faults)

    def running(self) -> float:
        lines = get(self.url + "/metrics")[1].decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def post(url: str, body: object, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


class Call:
    """One chat call on a connection of its own, sent at once and read later."""

    def __init__(self, url: str, *, stream: bool, max_tokens: int = 8, model: str = "sim") -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE)
        try:
            self.socket.sendall(chat(parts.hostname or "", model, "hello", max_tokens=max_tokens, stream=stream))
        except OSError:
            self.socket.close()
            raise
        self.answer = http.client.HTTPResponse(self.socket)

    def read(self) -> tuple[int, bytes]:
        """Status and all that is left to read of the body."""
        if self.answer.fp.closed or not hasattr(self.answer, "status") or self.answer.status == "UNKNOWN":
            self.answer.begin()
        try:
            return int(self.answer.status), self.answer.read()
        finally:
            self.close()

    def close(self) -> None:
        """Leave, whatever is still to be read."""
        self.answer.close()
        self.socket.close()


@contextlib.contextmanager
def gateway(tmp_path: Path, engine: SimEngine, policy: str = ONE_AT_A_TIME, *more: str) -> Iterator[Gateway]:
    (tmp_path / "policy.yaml").write_text(policy)
    arguments = ("--policy", str(tmp_path / "policy.yaml"), "--engine", engine.url, *more)
    with Gateway(tmp_path / "gateway.log", *arguments) as started:
        yield started
    assert "Traceback" not in started.child.output()


def sockets(pid: int) -> int:
    """Count the sockets that a process itself holds open."""
    return sum(_is_socket(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())


def _is_socket(fd: Path) -> bool:
    try:
        return str(fd.readlink()).startswith("socket:")
    except FileNotFoundError:
        return False
