"""Overhead of the gateway: CPU per request and per SSE event, memory per open stream, refusals per second.

    python -m loadtest.lab.cost.overhead [--rounds 3] [--peers nginx,haproxy,vllm-router] [--trace]

Every server runs alone on core 0; an engine that costs almost nothing and the load share core 1. CPU time is what the
kernel accounts to the server's processes, which survives a noisy machine far better than a throughput does. Rounds are
interleaved, medians are printed, then ratios to each peer. Peers are used where they are installed: nginx, HAProxy by
itself and with calls that a gateway decides (docs/decide.md; the gateway's part of the CPU is in columns of its own),
and vllm-router (on PATH, or named by the environment's VLLM_ROUTER).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import uvloop

from loadtest.clients.stub import LoadResult, StubLoad, serve_stub
from loadtest.lab.cost import haproxy
from loadtest.processes import Child, ChildError

ENGINE_PORT = 19301
FIRST_PORT = 19310
NGINX = """worker_processes 1; daemon off; pid {dir}/pid; error_log {dir}/error;
events {{ worker_connections 8192; }}
http {{ access_log off;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 1000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; keepalive_requests 1000000;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
                  proxy_buffering off; client_body_buffer_size 128k; }} }} }}
"""
Command = Callable[[int], list[str]]


def gateway_command(port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "gateway.cli", "serve", "--engine", f"http://127.0.0.1:{ENGINE_PORT}"),
        *("--listen", f"127.0.0.1:{port}", "--control", "127.0.0.1:0", "--log", os.devnull),
    ]


def traced_command(share: str, folder: Path) -> Command:
    """A gateway that traces this share of its calls; the engine's stub takes the spans too."""
    policy = folder / f"traces-{share}.yaml"
    policy.write_text(f"version: 1\nlogging: {{traces: {share}}}\n")
    traces = ("--policy", str(policy), "--otlp-traces-endpoint", f"http://127.0.0.1:{ENGINE_PORT}")
    return lambda port: [*gateway_command(port), *traces]


def peers(wanted: set[str], folder: Path) -> dict[str, Command]:
    """Commands of the peers that are installed, by name."""
    found: dict[str, Command] = {}
    nginx = shutil.which("nginx")
    if nginx and (not wanted or "nginx" in wanted):

        def start_nginx(port: int) -> list[str]:
            config = folder / f"nginx-{port}.conf"
            config.write_text(NGINX.format(dir=folder, port=port, engine=ENGINE_PORT))
            return [nginx, "-c", str(config)]

        found["nginx"] = start_nginx
    if not wanted or "haproxy" in wanted:
        found |= haproxy.commands(folder, ENGINE_PORT)
    router = os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")
    if router and (not wanted or "vllm-router" in wanted):
        for policy in ("round_robin", "cache_aware"):

            def start_router(port: int, policy: str = policy) -> list[str]:
                return [
                    *(router, "--host", "127.0.0.1", "--port", str(port), "--policy", policy),
                    *("--worker-urls", f"http://127.0.0.1:{ENGINE_PORT}", "--log-level", "error"),
                    *("--prometheus-port", str(port + 500)),
                ]

            found[f"vllm-router {policy}"] = start_router
    return found


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
    return _seconds(tree(pid))


def _seconds(pids: list[int]) -> float:
    ticks = 0
    for at in pids:
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


class ServerUnderTest:
    """Server under test, alone on core 0. Raises ChildError."""

    def __init__(self, command: list[str], port: int, ready: Callable[[int], bool] = answers_calls) -> None:
        self.port = port
        self.ready = ready
        self.child = Child(command[0], ["taskset", "-c", "0", *command], Path(os.devnull))

    def __enter__(self) -> ServerUnderTest:
        try:
            self.child.wait(lambda: self.ready(self.port), 60.0, f"200 on port {self.port}", every=0.1)
        except BaseException:
            self.child.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop()

    def of_children(self) -> float:
        """CPU seconds of the server's children so far."""
        return _seconds(tree(self.child.pid)[1:])

    def load(self, load: StubLoad) -> tuple[LoadResult, float]:
        """The result, and CPU seconds of the server meanwhile."""
        before = cpu_seconds(self.child.pid)
        result = uvloop.run(load.run(self.port))
        return result, cpu_seconds(self.child.pid) - before


def measure(command: Command, port: int, row: dict[str, list[float]], *, own: bool, decided: bool) -> None:
    with ServerUnderTest(command(port), port) as server:
        server.load(StubLoad(requests=500, connections=64))
        children = server.of_children()
        plain, cpu = server.load(StubLoad(requests=6000, connections=64))
        row.setdefault("us/request", []).append(cpu / plain.finished * 1e6)
        between = server.of_children()
        stream, cpu = server.load(StubLoad(requests=200, connections=100, tokens=60))
        row.setdefault("us/event", []).append(cpu / stream.events * 1e6)
        if decided:
            row.setdefault("decider/request", []).append((between - children) / plain.finished * 1e6)
            row.setdefault("decider/event", []).append((server.of_children() - between) / stream.events * 1e6)
        row.setdefault("errors", []).append(plain.errors + stream.errors)
        if own:
            before = memory(server.child.pid)
            uvloop.run(open_streams(server, row, before))
            refused, cpu = server.load(StubLoad(requests=6000, connections=64, model="nobody"))
            row.setdefault("refusals/s/core", []).append(refused.finished / cpu)


async def open_streams(server: ServerUnderTest, row: dict[str, list[float]], before: int) -> None:
    """Memory while 1,000 streams are open, over memory before, per stream."""
    load = StubLoad(requests=1000, connections=1000, tokens=400)
    running = asyncio.ensure_future(load.run(server.port))
    await load.all_streaming.wait()
    row.setdefault("KiB/stream", []).append((memory(server.child.pid) - before) / 1000 / 1024)
    load.stop()
    await running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="", help="comma-separated; default: all that are installed")
    parser.add_argument("--trace", action="store_true", help="in place of peers: traces off, of 1 %% and of all calls")
    args = parser.parse_args()
    os.sched_setaffinity(0, {1})
    rows: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder, serve_stub(ENGINE_PORT):
        beside = (
            {f"gateway, {share} traced": traced_command(share, Path(folder)) for share in ("1%", "100%")}
            if args.trace
            else peers(set(filter(None, args.peers.split(","))), Path(folder))
        )
        servers = {**beside, "gateway": gateway_command}
        port = FIRST_PORT
        for number in range(args.rounds):
            for name, command in servers.items():
                print(f"round {number + 1}/{args.rounds}: {name}", file=sys.stderr)
                port += 1
                try:
                    measure(
                        command, port, rows.setdefault(name, {}), own=name == "gateway", decided=name == haproxy.DECIDED
                    )
                except ChildError as error:
                    sys.exit(f"overhead: {error}")
    report(rows)


def report(rows: dict[str, dict[str, list[float]]]) -> None:
    columns = ["us/request", "us/event", "decider/request", "decider/event", "KiB/stream", "refusals/s/core", "errors"]
    middle = {name: {key: statistics.median(values) for key, values in row.items()} for name, row in rows.items()}
    print(f"{'':26}" + "".join(f"{column:>17}" for column in columns))
    for name, row in middle.items():
        print(f"{name:26}" + "".join(f"{row[c]:17.1f}" if c in row else f"{'':17}" for c in columns))
    own = middle["gateway"]
    for name, row in middle.items():
        if name != "gateway":
            request, event = own["us/request"] / row["us/request"], own["us/event"] / row["us/event"]
            print(f"gateway / {name:24} {request:6.2f} per request {event:6.2f} per event")


if __name__ == "__main__":
    main()
