"""Valkey, or Redis, in a child process. `python -m loadtest.lab.operate.valkey` finds it on this machine, or gets it.

The program is the PATH's `valkey-server` or `redis-server`, else Debian's package, unpacked once outside the tree with
the libraries that it needs.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import TracebackType

from loadtest.lab.operate.debian import NoPackage, unpack
from loadtest.lab.vllm.real_vllm import cache
from loadtest.processes import Child

NAMES = ("valkey-server", "redis-server")
PACKAGES = (
    "redis-server", "redis-tools", "libatomic1", "libjemalloc2", "liblua5.1-0", "liblzf1", "lua-bitop", "lua-cjson",
)  # fmt: skip
REQUIRED = "WEIR_REQUIRE_VALKEY"  # 1: a test that needs it fails where there is none


class NoValkey(Exception):
    """There is no Valkey on this machine; the message says how to get one."""


def program() -> tuple[str, dict[str, str]]:
    """The path of the server, and the environment to start it in. Raises NoValkey."""
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return found, dict(os.environ)
    found = shutil.which("redis-server", path=str(_unpacked() / "usr/bin"))
    if found is None:
        raise NoValkey("no valkey-server or redis-server on this machine: install it, or run `make valkey` on a Debian")
    libraries = sorted(str(folder) for folder in (_unpacked() / "usr/lib").iterdir() if folder.is_dir())
    return found, os.environ | {"LD_LIBRARY_PATH": ":".join(libraries)}


class Valkey:
    """A server on a port of loopback that keeps nothing. `with` stops it."""

    def __init__(self, log: Path, port: int, *more: str) -> None:
        server, env = program()
        argv = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                "--maxmemory-policy", "noeviction", *more]  # fmt: skip
        self.port = port
        self.url = f"valkey://127.0.0.1:{port}/0"
        self.child = Child("valkey", argv, log, env=env)
        try:
            self.child.line(r"(eady to accept connections)", 20.0)
        except BaseException:
            self.child.kill()
            raise

    def __enter__(self) -> Valkey:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.child.kill()


def _unpacked() -> Path:
    return cache() / "valkey"


def install() -> str:
    """The path of the server, which is got first where the machine has none. Raises NoValkey."""
    try:
        return program()[0]
    except NoValkey:
        folder = _unpacked()
    try:
        unpack(PACKAGES, folder)
    except NoPackage as error:
        raise NoValkey(f"there is no Valkey on this machine, and Debian's Redis cannot be got: {error}") from error
    return program()[0]


def main() -> int:
    """Get it and say where it is; the exit status."""
    try:
        print(install())
    except NoValkey as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
