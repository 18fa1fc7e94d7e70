"""CPU time of a sidecar's relay per request and per SSE event.

    python -m loadtest.lab.cost.relay [--rounds 3]

The relay runs alone on core 0; an engine that costs almost nothing and the load share core 1, as in overhead.py.
Medians are printed. `--serve PORT` is the relay itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
from pathlib import Path

import uvloop

from loadtest.clients.stub import StubLoad, serve_stub
from loadtest.lab.cost.overhead import ENGINE_PORT, FIRST_PORT, ServerUnderTest
from sidecar.core.addresses import Address
from sidecar.core.config import RelaySettings
from sidecar.relay.relay import Relay, RelayedEngine

TOKEN = "sk-test"  # noqa: S105 # what the load shows
PREFIX = "/engines/m"


async def serve(port: int) -> None:
    """A relay to the stub engine, until it is killed."""
    engine = RelayedEngine(f"http://127.0.0.1:{ENGINE_PORT}", awake=True)
    relay = Relay(TOKEN, engine=lambda _: engine, ensure=lambda _: None, leaving=bool, say=print)
    await relay.start(RelaySettings(listen=Address("127.0.0.1", port)), Path())
    await asyncio.Event().wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def measure(row: dict[str, list[float]]) -> None:
    """One round."""
    command = [sys.executable, "-m", "loadtest.lab.cost.relay", "--serve", str(FIRST_PORT)]
    with ServerUnderTest(command, FIRST_PORT, listens) as server:
        server.load(StubLoad(requests=500, connections=64, prefix=PREFIX))
        plain, cpu = server.load(StubLoad(requests=6000, connections=64, prefix=PREFIX))
        row.setdefault("us/request", []).append(cpu / plain.finished * 1e6)
        stream, cpu = server.load(StubLoad(requests=200, connections=100, tokens=60, prefix=PREFIX))
        row.setdefault("us/event", []).append(cpu / stream.events * 1e6)
        row.setdefault("errors", []).append(plain.errors + stream.errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the relay")
    args = parser.parse_args()
    if args.serve is not None:
        uvloop.run(serve(args.serve))
        return
    os.sched_setaffinity(0, {1})
    row: dict[str, list[float]] = {}
    with serve_stub(ENGINE_PORT):
        for _ in range(args.rounds):
            measure(row)
    print("  ".join(f"{name} {statistics.median(values):.1f}" for name, values in row.items()))


if __name__ == "__main__":
    main()
