"""Valkey, or Redis, in a child process."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from loadtest.processes import Child
from tests.programs import VALKEY


class Valkey:
    """A server on a port of loopback that keeps nothing. `with` stops it."""

    def __init__(self, log: Path, port: int, *more: str) -> None:
        argv = [*VALKEY.command(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                "--dir", str(log.parent), "--maxmemory-policy", "noeviction", *more]  # fmt: skip
        self.port = port
        self.url = f"valkey://127.0.0.1:{port}/0"
        self.child = Child("valkey", argv, log)
        with self.child.starting():
            self.child.line(r"(eady to accept connections)", 60.0)

    def __enter__(self) -> Valkey:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.child.kill()
