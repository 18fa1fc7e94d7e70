"""Real Envoy of a test."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.lab.operate.debian import NoProgram
from loadtest.lab.operate.envoy import envoy_command
from loadtest.processes import Child, free_port, until


def envoy(folder: Path, picker: str, engines: list[str], *, allow: bool = False, mode: str = "") -> tuple[Child, str]:
    """Start Envoy over engines, at `HOST:PORT`. Return it and its URL. `mode`: of bodies, in place of the file's.

    Skips the test where Envoy is not installed, unless WEIR_REQUIRE_ENVOY is 1.
    """
    port = free_port()
    ports = [int(each.rpartition(":")[2]) for each in engines]
    try:
        argv = envoy_command(
            folder / f"envoy-{port}.yaml", port, ports, int(picker.rpartition(":")[2]), allow=allow, mode=mode
        )
    except NoProgram as error:
        if os.environ.get("WEIR_REQUIRE_ENVOY") == "1":
            raise
        pytest.skip(str(error))
    child = Child("envoy", argv, folder / f"envoy-{port}.log")
    with child.starting():
        child.wait(lambda: _listens(port), 30.0, "its listener")
    return child, f"http://127.0.0.1:{port}"


def waits(condition: Callable[[], bool], what: str, within: float = 20.0) -> None:
    assert until(condition, within, every=0.05) is not None, what


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
