"""CPU of a call through Envoy with the gateway as its endpoint picker, beside Envoy alone and the gateway by itself.

    python -m loadtest.lab.cost.picker [--rounds 3]

Plain calls, as `overhead.py` measures them: every server on core 0, the engine's stub and the load on core 1. Envoy and
the picker's gateway count together, and the gateway's part is shown. `make envoy` installs Envoy.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

import uvloop

from loadtest.clients.stub import StubLoad, serve_stub
from loadtest.lab.cost.overhead import ENGINE_PORT, FIRST_PORT, cpu_seconds, gateway_command, tree, under_test
from loadtest.lab.operate.debian import NoProgram
from loadtest.lab.operate.envoy import envoy_command
from loadtest.processes import ChildError

CALLS = 3000
ALONE, BOTH, OWN = "Envoy alone", "Envoy, gateway picks", "gateway's data port"


def command(name: str, port: int, folder: Path) -> list[str]:
    """Return the command of a server on `port`. Raises NoProgram."""
    if name == OWN:
        return gateway_command(port)
    picker = port + 1000 if name == BOTH else None
    proxy = envoy_command(folder / f"envoy-{port}.yaml", port, [ENGINE_PORT], picker)
    if picker is None:
        return proxy
    gateway = [*gateway_command(port + 2000), "--epp", f"127.0.0.1:{picker}"]
    return ["bash", "-c", f"{shlex.join(gateway)} & exec {shlex.join(proxy)}"]


def measure(name: str, port: int, folder: Path) -> tuple[float, float]:
    """Return microseconds of CPU for each call, of all processes and of the first one's children."""
    with under_test(command(name, port, folder), port) as child:
        children = tree(child.pid)[1:]
        uvloop.run(StubLoad(requests=200, connections=16).run(port))
        before, part = cpu_seconds(child.pid), sum(map(cpu_seconds, children))
        result = uvloop.run(StubLoad(requests=CALLS, connections=16).run(port))
        if result.errors:
            raise ChildError(f"{name}: {result.errors} of {CALLS} calls failed")
        each = 1e6 / result.finished
        return (cpu_seconds(child.pid) - before) * each, (sum(map(cpu_seconds, children)) - part) * each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    os.sched_setaffinity(0, {1})
    rows: dict[str, list[tuple[float, float]]] = {ALONE: [], BOTH: [], OWN: []}
    port = FIRST_PORT
    with tempfile.TemporaryDirectory(prefix="picker-") as folder, serve_stub(ENGINE_PORT):
        for _ in range(rounds):
            for name, row in rows.items():
                port += 1
                try:
                    row.append(measure(name, port, Path(folder)))
                except (ChildError, NoProgram) as error:
                    sys.exit(f"picker: {error}")
    for name, row in rows.items():
        whole, part = (statistics.median(values) for values in zip(*row, strict=True))
        print(f"{name:24}{whole:10,.0f} us/call" + (f", {part:,.0f} of it the gateway's" if name == BOTH else ""))


if __name__ == "__main__":
    main()
