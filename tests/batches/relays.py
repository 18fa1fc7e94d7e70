"""Relays of a gateway of several processes, as a test of batches needs them: which one works, and calls through one."""

from __future__ import annotations

import http.client
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadtest.processes import Gateway, get, until

LOCK = re.compile(r"FLOCK +ADVISORY +WRITE (\d+) \S+:(\d+) ")


def relays(gateway: Gateway) -> list[int]:
    """Their processes."""
    found = json.loads(get(f"{gateway.control}/processes")[1])["processes"]
    return [each["pid"] for each in found if each["role"] == "relay"]


def working(files: Path) -> int:
    """The process that works the batches of this folder; 0: none, nor one that has made the folder."""
    if not files.exists():
        return 0
    inode = str(files.stat().st_ino)
    locks = LOCK.findall(Path("/proc/locks").read_text())
    return next((int(pid) for pid, locked in locks if locked == inode), 0)


def until_working(files: Path, beside: int = 0) -> int:
    """The process that works them, once it is another than this one."""
    assert until(lambda: working(files) not in {0, beside}, 60.0, every=0.01) is not None
    return working(files)


class RelayConnection:
    """A connection of a client with the relay of this process."""

    def __init__(self, gateway: Gateway, pid: int, key: str = "none") -> None:
        parts = urlsplit(gateway.url)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        strangers = []
        while True:
            self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60.0)
            self._connection.connect()
            if pid in _processes_of(self._connection.sock.getsockname()[1]):
                break
            strangers.append(self._connection)
        for each in strangers:
            each.close()

    def ask(self, method: str, path: str, body: object = None, status: int = 200) -> Any:
        """The answer's JSON."""
        text = None if body is None else json.dumps(body)
        self._connection.request(method, path, text, self._headers)
        return self._answer(status)

    def started(self, path: str) -> http.client.HTTPResponse:
        """The answer to a GET, of which only the head was read."""
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        assert answer.status == 200
        return answer

    def begin(self, path: str, content_type: str, length: int, part: bytes) -> None:
        """POST a body of this length, of which this part is sent."""
        self._connection.putrequest("POST", path)
        for name, value in (self._headers | {"content-type": content_type, "content-length": str(length)}).items():
            self._connection.putheader(name, value)
        self._connection.endheaders(part)

    def end(self, rest: bytes) -> Any:
        """Send the rest. The answer's JSON."""
        self._connection.send(rest)
        return self._answer(200)

    def _answer(self, status: int) -> Any:
        answer = self._connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == status, found
        return found

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> RelayConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _processes_of(port: int) -> set[int]:
    """The processes with the other end of a connection from this port of 127.0.0.1, once it was accepted."""
    found: set[int] = set()

    def accepted() -> bool:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[2].endswith(f":{port:04X}") and row[9] != "0"}
        found.update(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, sockets))
        return bool(found)

    assert until(accepted, 60.0) is not None
    return found


def _has(pid: int, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(each) in sockets for each in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended, or is another's
        return False
