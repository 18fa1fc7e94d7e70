"""CPU of relays and their decider, beside the gateway in one process, in one run.

    python -m loadtest.lab.cost.scale [--rounds 3] [--relays 4]

One process, and `--workers N`, are loaded in turns: JSON requests, then streams. All processes of a gateway are on core
0; an engine that costs almost nothing and the load are on core 1. CPU time is the kernel's, of each process. Then both
get all cores, which they share with engine and load, and events a second are counted while 1,000 streams are open.

A turn of the loop costs the same for one call and for ten, and each of N relays has fewer calls in a turn. So one
process is also loaded by an Nth of the clients, as few as each relay would have if they were spread evenly.

The ceiling of the decider is what its CPU per call allows on a core. What N relays on N cores relay is worked out from
CPU per event: on two cores engine and load take more of them than a gateway does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop

from loadtest.clients.stub import StubLoad, serve_stub
from loadtest.lab.cost.overhead import ENGINE_PORT, cpu_seconds, under_test
from loadtest.processes import ChildError, get

PORT = 19350
CLIENTS = 64  # at once; of several relays each has its share of them
STREAMS = 1200  # open at once for the throughput: 60,000 events a second, more than there is room for
POLICY = f"""\
fleet: {{engines: [{{url: 'http://127.0.0.1:{ENGINE_PORT}', max_concurrency: {2 * STREAMS}}}]}}
classes: {{default: {{max_queue: {STREAMS}}}}}
"""
Row = dict[str, list[float]]


class GatewayUnderTest(msgspec.Struct, frozen=True):
    """A gateway on `port`. `roles`: of its processes, with their ids."""

    port: int
    roles: list[tuple[str, int]]

    def cpu(self) -> dict[str, float]:
        """Seconds of all relays, and of the decider."""
        spent = {"relay": 0.0, "decider": 0.0}
        for role, pid in self.roles:
            spent[role] += cpu_seconds(pid)
        return spent


@contextmanager
def serving(workers: int, port: int, cores: str) -> Iterator[GatewayUnderTest]:
    """A gateway with so many relays; 1: one process."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(POLICY)
        control = f"127.0.0.1:{port + 100}"
        argv = [
            *(sys.executable, "-m", "gateway.cli", "serve", "--policy", str(policy), "--workers", str(workers)),
            *("--listen", f"127.0.0.1:{port}", "--control", control, "--log", os.devnull),
        ]
        with under_test(argv, port, cores):
            found = json.loads(get(f"http://{control}/processes")[1])["processes"]
            yield GatewayUnderTest(port, [(each["role"], each["pid"]) for each in found if each["role"] != "parent"])


def per_call_and_event(server: GatewayUnderTest, rows: dict[str, Row], name: str, share: int) -> None:
    """CPU in us: of a JSON request, also of `share` clients alone, and of an event, in relays and in the decider."""
    uvloop.run(StubLoad(requests=500, connections=CLIENTS).run(server.port))
    for what, load in (
        ("request", StubLoad(requests=6000, connections=CLIENTS)),
        ("request of few", StubLoad(requests=6000, connections=share)),
        ("event", StubLoad(requests=300, connections=100, tokens=60)),
    ):
        before = server.cpu()
        result = uvloop.run(load.run(server.port))
        if result.errors:
            raise ChildError(f"{name}: {result.errors} of {result.finished} calls failed")
        number = result.events if what == "event" else result.finished
        for role, spent in server.cpu().items():
            rows.setdefault(name, {}).setdefault(f"{role} us/{what}", []).append((spent - before[role]) / number * 1e6)


def throughput(server: GatewayUnderTest, rows: dict[str, Row], name: str) -> None:
    """Events a second."""
    began = time.monotonic()
    result = uvloop.run(StubLoad(requests=STREAMS, connections=STREAMS, tokens=100).run(server.port))
    if result.errors:
        raise ChildError(f"{name}: {result.errors} of {result.finished} calls failed")
    rows.setdefault(name, {}).setdefault("events/s", []).append(result.events / (time.monotonic() - began))


def report(rows: dict[str, Row], relays: int) -> None:
    one, several = (
        {key: statistics.median(values) for key, values in rows[name].items()} for name in ("1", str(relays))
    )
    two = statistics.median(rows["2"]["events/s"])
    alone = one["decider us/request"]  # the one process
    alone_event = one["decider us/event"]
    decider, relay = several["decider us/request"], several["relay us/request"]
    event = several["decider us/event"] + several["relay us/event"]
    print(f"{'':44}{'one process':>14}{f'{relays} relays':>14}{'target':>12}")
    print(f"{'decider, us of CPU per call':44}{'':14}{decider:14.1f}{'<= 45':>12}")
    print(f"{'  its ceiling, calls/s on a core':44}{'':14}{1e6 / decider:14,.0f}")
    print(f"{'relay, us of CPU per JSON request':44}{alone:14.1f}{relay:14.1f}{'<= +10 %':>12}")
    print(f"{'  beside one process':44}{'':14}{relay / alone - 1:+14.1%}")
    few = one["decider us/request of few"]
    print(f"{'  one process with a share of the clients':44}{few:14.1f}{relay / few - 1:+14.1%}")
    print(f"{'us of CPU per SSE event':44}{alone_event:14.1f}{event:14.1f}")
    print(
        f"{'  events/s of 2 relays on 2 cores, by CPU':44}{1e6 / alone_event:14,.0f}{2e6 / event:14,.0f}{'>= 1.5x':>12}"
    )
    print(f"{'  beside one process':44}{'':14}{2 * alone_event / event:13.2f}x")
    print(f"{'events/s seen, 2 cores with engine and load':44}{one['events/s']:14,.0f}{two:14,.0f}  (2 relays)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--relays", type=int, default=4, help="that ask the decider (default: 4)")
    args = parser.parse_args()
    os.sched_setaffinity(0, {1})
    rows: dict[str, Row] = {}
    port = PORT
    with serve_stub(ENGINE_PORT):
        try:
            for number in range(args.rounds):
                print(f"round {number + 1}/{args.rounds}", file=sys.stderr)
                for workers in (1, args.relays):
                    port += 1
                    with serving(workers, port, "0") as server:
                        per_call_and_event(server, rows, str(workers), CLIENTS // args.relays)
                for workers in (1, 2):
                    port += 1
                    with serving(workers, port, "0,1") as server:
                        throughput(server, rows, str(workers))
        except ChildError as error:
            sys.exit(f"scale: {error}")
    report(rows, args.relays)


if __name__ == "__main__":
    main()
