"""Real Envoy in front of engines, with the configuration that `deploy/envoy/` ships; `make envoy` installs it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from loadtest.processes import Child, free_port, until
from tests.programs import NoProgram, cache

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "envoy" / "epp.yaml"
PORT, PICKER, ENGINES = 8080, 9002, (9101, 9102)  # ports of the configuration, all on 127.0.0.1


def _command(file: Path, port: int, engines: Sequence[int], picker: int, *, allow: bool, mode: str) -> list[str]:
    """Return the command of an Envoy on `port` whose configuration is written to `file`. Raises NoProgram.

    `engines`: ports of one or two. `picker`: its port. `allow`: the failure mode. `mode`: of bodies, in place of
    FULL_DUPLEX_STREAMED.
    """
    program = cache() / "envoy" / "envoy" / "_bin" / "envoy"
    if not program.exists():
        raise NoProgram("no Envoy on this machine: `make envoy` installs it outside the tree")
    text = CONFIGURATION.read_text()
    ports = {PORT: port, PICKER: picker, ENGINES[0]: engines[0], ENGINES[1]: engines[-1]}
    text = re.sub(r"(?<=port_value: )\d+", lambda found: str(ports[int(found[0])]), text)
    if allow:
        text = text.replace("failure_mode_allow: false", "failure_mode_allow: true")
    if mode:
        text = text.replace("FULL_DUPLEX_STREAMED\n", f"{mode}\n")
    file.write_text(text)
    flags = ("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error", "-c", str(file))
    return [str(program), *flags]


def envoy(folder: Path, picker: str, engines: list[str], *, allow: bool = False, mode: str = "") -> tuple[Child, str]:
    """Start Envoy over engines, at `HOST:PORT`. Return it and its URL. `mode`: of bodies, in place of the file's.

    Skips the test where Envoy is not installed, unless WEIR_REQUIRE_ENVOY is 1.
    """
    port = free_port()
    ports = [int(each.rpartition(":")[2]) for each in engines]
    try:
        argv = _command(
            folder / f"envoy-{port}.yaml", port, ports, int(picker.rpartition(":")[2]), allow=allow, mode=mode
        )
    except NoProgram as error:
        if os.environ.get("WEIR_REQUIRE_ENVOY") == "1":
            raise
        pytest.skip(str(error))
    child = Child("envoy", argv, folder / f"envoy-{port}.log")
    with child.starting():
        child.wait(lambda: _listens(port), 60.0, "its listener")
    return child, f"http://127.0.0.1:{port}"


def waits(condition: Callable[[], bool], what: str, within: float = 60.0) -> None:
    assert until(condition, within, every=0.05) is not None, what


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
