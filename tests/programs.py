"""Servers of others that tests start: that of the machine, else of Debian's packages, unpacked outside the tree.

    python -m tests.programs prometheus | valkey

finds one, or gets it, and prints where it is. Nobody need be root, and nothing of the machine changes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest


def cache() -> Path:
    """Folder for what is unpacked outside the tree, whether it exists or not."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weir"


class NoProgram(Exception):
    """The machine has not got the program; the message says how to get it, or why it cannot be got."""


class DebianProgram(msgspec.Struct, frozen=True):
    """A server by the name of its target of make. `names`: those of its program, any of which will do."""

    target: str
    names: tuple[str, ...]
    packages: tuple[str, ...]

    def command(self, *names: str) -> list[str]:
        """The command that starts it, or another program of its packages. Raises NoProgram."""
        for name in names or self.names:
            found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
            if found is not None:
                return [found]
            found = shutil.which(name, path=f"{self._unpacked / 'usr/bin'}:{self._unpacked / 'usr/sbin'}")
            if found is not None:
                libraries = sorted(str(folder) for folder in self._unpacked.glob("usr/lib/*") if folder.is_dir())
                return ["env", f"LD_LIBRARY_PATH={':'.join(libraries)}", found]
        wanted = " or ".join(names or self.names)
        raise NoProgram(f"no {wanted} on this machine: install it, or run `make {self.target}` on a Debian")

    def install(self) -> list[str]:
        """The command, of a program that is got first where the machine has none. Raises NoProgram."""
        try:
            return self.command()
        except NoProgram as missing:
            try:
                self._unpack()
            except (OSError, subprocess.CalledProcessError) as error:
                raise NoProgram(f"{missing}; Debian's packages cannot be got: {error}") from error
        return self.command()

    @property
    def _unpacked(self) -> Path:
        return cache() / self.target

    def _unpack(self) -> None:
        folder = self._unpacked
        lists = folder / "lists"  # its own, so that nobody need be root
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        apt = ["apt-get", "-o", f"Dir::State::Lists={lists}"]
        subprocess.run([*apt, "update"], check=True, capture_output=True)
        subprocess.run([*apt, "download", *self.packages], cwd=folder, check=True, capture_output=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder], check=True, capture_output=True)  # noqa: S607 # the PATH's
            package.unlink()


PROMETHEUS = DebianProgram("prometheus", ("prometheus",), ("prometheus",))
VALKEY = DebianProgram(
    "valkey",
    ("valkey-server", "redis-server"),
    (
        "redis-server", "redis-tools", "libatomic1", "libjemalloc2", "liblua5.1-0", "liblzf1", "lua-bitop", "lua-cjson",
    ),
)  # fmt: skip
PROGRAMS = {program.target: program for program in (PROMETHEUS, VALKEY)}


def required(program: DebianProgram, *names: str) -> list[str]:
    """The command that starts it, or another program of its packages. Skips the test where there is none, unless
    WEIR_REQUIRE_PROMETHEUS or WEIR_REQUIRE_VALKEY is 1."""
    try:
        return program.command(*names)
    except NoProgram as error:
        if os.environ.get(f"WEIR_REQUIRE_{program.target.upper()}") == "1":
            raise
        pytest.skip(str(error))


def main() -> int:
    """Get one and say where it is; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__.split("\n")[0])
    parser.add_argument("program", choices=PROGRAMS)
    try:
        print(PROGRAMS[parser.parse_args().program].install()[-1])
    except NoProgram as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
