"""Overhead of the gateway: CPU per streamed call, request and SSE event, latency, memory idle and per open stream.

    python -m loadtest.lab.cost.overhead [--rounds 3] [--peers nginx,haproxy,envoy,vllm-router,smg]

Every server runs alone on core 0; an engine that costs almost nothing and the load share core 1. CPU time is what the
kernel accounts to the server's processes, which survives a noisy machine far better than a throughput does. Rounds are
interleaved, medians are printed, a row for each figure, and the gateway's ratio to each peer. The first row is what a
gateway of LLMs does all day: a streamed call of 200 tokens, its request and the end included. An event is a 200th of
it. Latency is what a server adds to a JSON request, one at a time, over the engine alone in the same moment.

Peers are used where they are installed: nginx, HAProxy and Envoy, vllm-router (on PATH, or named by the environment's
VLLM_ROUTER) by both of its policies, and smg, the SGLang Model Gateway, by its default one; and Envoy, as
`deploy/envoy/` has it, with the gateway as its endpoint picker, whose CPU and memory are counted with Envoy's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvloop

from loadtest.clients.stub import LoadResult, StubLoad, serve_stub
from loadtest.processes import Child, ChildError

ENGINE_PORT = 19301
FIRST_PORT = 19310
ENVOY_FLAGS = ("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error", "-c")
PICKER = "envoy picker"
PICKED = Path(__file__).parents[3] / "deploy" / "envoy" / "epp.yaml"
TOKENS = 200  # of a streamed call
ALONE = 1000  # requests, one at a time
STREAM, REQUEST, EVENT = f"us/stream of {TOKENS}", "us/request", "us/event"
P50, P99 = "us added, p50", "us added, p99"
ROWS = (STREAM, REQUEST, EVENT, P50, P99, "MiB idle", "KiB/stream", "refusals/s/core", "errors")
WIDTH = 13  # of a column
Command = Callable[[int], list[str]]


def gateway_command(port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "gateway.cli", "serve", "--engine", f"http://127.0.0.1:{ENGINE_PORT}"),
        *("--listen", f"127.0.0.1:{port}", "--control", "127.0.0.1:0", "--log", os.devnull),
    ]


def peers(wanted: set[str], folder: Path) -> dict[str, Command | None]:
    """Commands of the peers by name; None: not installed."""

    def configured(name: str, *flags: str) -> Callable[[str, int], list[str]]:
        """Command of a program whose last argument is this file's configuration, filled in."""

        def command(program: str, port: int) -> list[str]:
            places = {"DIR": folder, "PORT": port, "ENGINE": ENGINE_PORT}
            config = folder / f"{port}-{name}"  # Envoy goes by the suffix
            text = Path(__file__).with_name(name).read_text()
            config.write_text(re.sub(r"@([A-Z]+)@", lambda at: str(places[at[1]]), text))
            return [program, *flags, str(config)]

        return command

    router = os.environ.get("VLLM_ROUTER") or "vllm-router"
    known: dict[str, tuple[str, Callable[[str, int], list[str]]]] = {
        "nginx": ("nginx", configured("nginx.conf", "-c")),
        "haproxy": ("haproxy", configured("haproxy.cfg", "-db", "-f")),
        "envoy": ("envoy", configured("envoy.yaml", *ENVOY_FLAGS)),
        PICKER: ("envoy", partial(picker_command, folder)),
        "vllm-router round_robin": (router, partial(router_command, "round_robin")),
        "vllm-router cache_aware": (router, partial(router_command, "cache_aware")),
        "smg cache_aware": ("smg", partial(smg_command, "cache_aware")),
    }
    found: dict[str, Command | None] = {}
    for name, (program, command) in known.items():
        if not wanted or name.partition(" ")[0] in wanted:
            path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
            found[name] = None if path is None else partial(command, path)
    return found


def router_command(policy: str, router: str, port: int) -> list[str]:
    return [
        *(router, "--host", "127.0.0.1", "--port", str(port), "--policy", policy),
        *("--worker-urls", f"http://127.0.0.1:{ENGINE_PORT}", "--log-level", "error"),
        *("--prometheus-port", str(port + 500)),
    ]


def smg_command(policy: str, smg: str, port: int) -> list[str]:
    # Without a tokenizer it would look for one named like the model, in the network.
    return [smg, "launch", *router_command(policy, smg, port)[1:], "--disable-tokenizer-autoload"]


def picker_command(folder: Path, envoy: str, port: int) -> list[str]:
    """Command of an Envoy and, as its child, of the gateway that picks for it."""
    config, picker = folder / f"{port}.yaml", port + 500
    ports = {"8080": port, "9002": picker}
    config.write_text(
        re.sub(r"(?<=port_value: )\d+", lambda at: str(ports.get(at[0], ENGINE_PORT)), PICKED.read_text())
    )
    gateway = shlex.join([*gateway_command(port + 1000), "--epp", f"127.0.0.1:{picker}"])
    return ["sh", "-c", f"{gateway} & exec {shlex.join([envoy, *ENVOY_FLAGS, str(config)])}"]


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants that are alive."""
    pids, todo = [], [pid]
    while todo:
        at = todo.pop()
        try:
            for task in os.listdir(f"/proc/{at}/task"):
                todo += map(int, Path(f"/proc/{at}/task/{task}/children").read_text().split())
            pids.append(at)
        except FileNotFoundError:
            continue
    return pids


def cpu_seconds(pid: int) -> float:
    """User and system time of the process and its children, as the kernel accounts it."""
    ticks = 0
    for at in tree(pid):
        fields = Path(f"/proc/{at}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> int:
    """Bytes resident in the process and its children."""
    pages = sum(int(Path(f"/proc/{at}/statm").read_text().split()[1]) for at in tree(pid))
    return pages * os.sysconf("SC_PAGE_SIZE")


def answers_calls(port: int) -> bool:
    """Whether a call is answered with 200 now."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    request = urllib.request.Request(  # http on loopback
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310 # as above
            return int(answer.status) == 200
    except OSError:
        return False


@contextmanager
def under_test(argv: list[str], port: int, cores: str = "0") -> Iterator[Child]:
    """A server that has these cores and answers calls. Raises ChildError."""
    with Child(argv[0], ["taskset", "-c", cores, *argv], Path(os.devnull)) as child:
        child.wait(lambda: answers_calls(port), 60.0, f"200 on port {port}", every=0.1)
        yield child


def measure(command: Command, port: int, row: dict[str, list[float]], *, own: bool, few: bool = False) -> None:
    """Add a server's figures to its row. `few`: of a tenth of the calls, each of which takes ten times as long."""
    times = 1 if few else 10
    with under_test(command(port), port) as child:

        def spent(load: StubLoad) -> tuple[LoadResult, float]:
            """The result, and CPU seconds of the server meanwhile."""
            before = cpu_seconds(child.pid)
            return uvloop.run(load.run(port)), cpu_seconds(child.pid) - before

        row.setdefault("MiB idle", []).append(memory(child.pid) / 1024**2)
        spent(StubLoad(requests=50 * times, connections=64))
        plain, cpu = spent(StubLoad(requests=600 * times, connections=64))
        row.setdefault(REQUEST, []).append(cpu / plain.finished * 1e6)
        stream, cpu = spent(StubLoad(requests=20 * times, connections=10 * times, tokens=TOKENS))
        row.setdefault(STREAM, []).append(cpu / stream.finished * 1e6)
        row.setdefault(EVENT, []).append(cpu / stream.events * 1e6)
        direct, through = (uvloop.run(StubLoad(requests=ALONE, connections=1).run(at)) for at in (ENGINE_PORT, port))
        for key, rank in ((P50, 0.5), (P99, 0.99)):
            added = percentile(through.latencies, rank) - percentile(direct.latencies, rank)
            row.setdefault(key, []).append(added * 1e6)
        row.setdefault("errors", []).append(plain.errors + stream.errors + through.errors)
        if few:
            return
        before = memory(child.pid)
        row.setdefault("KiB/stream", []).append((uvloop.run(with_streams(child.pid, port)) - before) / 1000 / 1024)
        if own:
            refused, cpu = spent(StubLoad(requests=6000, connections=64, model="nobody"))
            row.setdefault("refusals/s/core", []).append(refused.finished / cpu)


def percentile(values: list[float], rank: float) -> float:
    return sorted(values)[int(rank * len(values))]


async def with_streams(pid: int, port: int) -> int:
    """Bytes resident while 1,000 streams are open."""
    load = StubLoad(requests=1000, connections=1000, tokens=400)
    running = asyncio.ensure_future(load.run(port))
    await load.all_streaming.wait()
    resident = memory(pid)
    load.stop()
    await running
    return resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="", help="comma-separated; default: all that are installed")
    args = parser.parse_args()
    os.sched_setaffinity(0, {1})
    rows: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder, serve_stub(ENGINE_PORT):
        found = {**peers(set(filter(None, args.peers.split(","))), Path(folder)), "gateway": gateway_command}
        servers = {name: command for name, command in found.items() if command is not None}
        port = FIRST_PORT
        for number in range(args.rounds):
            for name, command in servers.items():
                print(f"round {number + 1}/{args.rounds}: {name}", file=sys.stderr)
                port += 1
                try:
                    measure(command, port, rows.setdefault(name, {}), own=name == "gateway", few=name == PICKER)
                except ChildError as error:
                    sys.exit(f"overhead: {error}")
    report(rows)
    if absent := sorted(found.keys() - servers.keys()):
        print(f"not installed: {', '.join(absent)}")


def report(rows: dict[str, dict[str, list[float]]]) -> None:
    middle = {name: {key: statistics.median(values) for key, values in row.items()} for name, row in rows.items()}

    def line(head: str, cells: Iterable[str]) -> None:
        print(f"{head:36}" + "".join(f"{cell:>{WIDTH}}" for cell in cells))

    names = [name.partition(" ") for name in middle]
    line("", (name for name, _, _ in names))
    line("", (policy for _, _, policy in names))
    for key in ROWS:
        line(key, (f"{row[key]:,.1f}" if key in row else "" for row in middle.values()))
    own = middle["gateway"]
    for key in (STREAM, REQUEST, EVENT):
        line(f"gateway / peer, {key}", (f"{own[key] / row[key]:.2f}" for row in middle.values()))


if __name__ == "__main__":
    main()
