"""Overhead of the gateway: CPU per streamed call, request and SSE event, memory idle and per open stream.

    python -m loadtest.lab.cost.overhead [--rounds 3] [--peers nginx,haproxy,vllm-router]

Every server runs alone on core 0; an engine that costs almost nothing and the load share core 1. CPU time is what the
kernel accounts to the server's processes, which survives a noisy machine far better than a throughput does. Rounds are
interleaved, medians are printed, a row for each figure, and the gateway's ratio to each peer. The first row is what a
gateway of LLMs does all day: a streamed call of 200 tokens, its request and the end included. An event is a 200th of
it. Peers are used where they are installed: nginx, HAProxy and vllm-router (on PATH, or named by the environment's
VLLM_ROUTER) by both of its policies.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvloop

from loadtest.clients.stub import LoadResult, StubLoad, serve_stub
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
PLAIN_HAPROXY = """global
    maxconn 4096
    nbthread 1
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
listen clients
    bind 127.0.0.1:{port}
    http-reuse always
    server engine 127.0.0.1:{engine}
"""
TOKENS = 200  # of a streamed call
STREAM, REQUEST, EVENT = f"us/stream of {TOKENS}", "us/request", "us/event"
ROWS = (STREAM, REQUEST, EVENT, "MiB idle", "KiB/stream", "refusals/s/core", "errors")
Command = Callable[[int], list[str]]


def gateway_command(port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "gateway.cli", "serve", "--engine", f"http://127.0.0.1:{ENGINE_PORT}"),
        *("--listen", f"127.0.0.1:{port}", "--control", "127.0.0.1:0", "--log", os.devnull),
    ]


def peers(wanted: set[str], folder: Path) -> dict[str, Command]:
    """Commands of the peers that are installed, by name."""

    def configured(text: str, *argv: str) -> Command:
        """Command of a server whose last argument is a file with this configuration."""

        def command(port: int) -> list[str]:
            config = folder / f"{port}.conf"
            config.write_text(text.format(dir=folder, port=port, engine=ENGINE_PORT))
            return [*argv, str(config)]

        return command

    found: dict[str, Command] = {}
    if nginx := shutil.which("nginx"):
        found["nginx"] = configured(NGINX, nginx, "-c")
    if haproxy := shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin"):
        found["haproxy"] = configured(PLAIN_HAPROXY, haproxy, "-db", "-f")
    if router := os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router"):
        for policy in ("round_robin", "cache_aware"):
            found[f"vllm-router {policy}"] = partial(router_command, router, policy)
    return {name: command for name, command in found.items() if not wanted or name.partition(" ")[0] in wanted}


def router_command(router: str, policy: str, port: int) -> list[str]:
    return [
        *(router, "--host", "127.0.0.1", "--port", str(port), "--policy", policy),
        *("--worker-urls", f"http://127.0.0.1:{ENGINE_PORT}", "--log-level", "error"),
        *("--prometheus-port", str(port + 500)),
    ]


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


def measure(command: Command, port: int, row: dict[str, list[float]], *, own: bool) -> None:
    with under_test(command(port), port) as child:

        def spent(load: StubLoad) -> tuple[LoadResult, float]:
            """The result, and CPU seconds of the server meanwhile."""
            before = cpu_seconds(child.pid)
            return uvloop.run(load.run(port)), cpu_seconds(child.pid) - before

        row.setdefault("MiB idle", []).append(memory(child.pid) / 1024**2)
        spent(StubLoad(requests=500, connections=64))
        plain, cpu = spent(StubLoad(requests=6000, connections=64))
        row.setdefault(REQUEST, []).append(cpu / plain.finished * 1e6)
        stream, cpu = spent(StubLoad(requests=200, connections=100, tokens=TOKENS))
        row.setdefault(STREAM, []).append(cpu / stream.finished * 1e6)
        row.setdefault(EVENT, []).append(cpu / stream.events * 1e6)
        row.setdefault("errors", []).append(plain.errors + stream.errors)
        before = memory(child.pid)
        row.setdefault("KiB/stream", []).append((uvloop.run(with_streams(child.pid, port)) - before) / 1000 / 1024)
        if own:
            refused, cpu = spent(StubLoad(requests=6000, connections=64, model="nobody"))
            row.setdefault("refusals/s/core", []).append(refused.finished / cpu)


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
        servers = {**peers(set(filter(None, args.peers.split(","))), Path(folder)), "gateway": gateway_command}
        port = FIRST_PORT
        for number in range(args.rounds):
            for name, command in servers.items():
                print(f"round {number + 1}/{args.rounds}: {name}", file=sys.stderr)
                port += 1
                try:
                    measure(command, port, rows.setdefault(name, {}), own=name == "gateway")
                except ChildError as error:
                    sys.exit(f"overhead: {error}")
    report(rows)


def report(rows: dict[str, dict[str, list[float]]]) -> None:
    middle = {name: {key: statistics.median(values) for key, values in row.items()} for name, row in rows.items()}
    print(f"{'':26}" + "".join(f"{name:>24}" for name in middle))
    for key in ROWS:
        print(f"{key:26}" + "".join(f"{row[key]:24,.1f}" if key in row else f"{'':24}" for row in middle.values()))
    own = middle["gateway"]
    for key in (STREAM, REQUEST, EVENT):
        ratios = [own[key] / row[key] for row in middle.values()]
        print(f"{'gateway / peer, ' + key:26}" + "".join(f"{ratio:24.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
