"""Figures 6 to 10 once more in real time: `python -m loadtest.lab.realtime --help`.

The same rows, engines, traffic and clients as in `loadtest.lab.figures`, whose virtual time this checks, with
processes, sockets and the kernel's clock: simulated engines
and the gateway are child processes, every try is a connection of its own. Two cores are just enough for four engines.
Exit status as that of `loadtest.lab.figures`.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from loadtest.clients.client import Answer, Exchange
from loadtest.lab.figures import command as figures
from loadtest.lab.figures.runs import PROFILE, Measured, Setting, Shape, Testbed
from loadtest.lab.rows import bars, terminal
from loadtest.load.workload import Planned
from loadtest.processes import SAMPLE, Child, Gateway, get
from loadtest.report.stats import quantile
from loadtest.simulate.simulated_client import ClientCall, Try

SWEEP = (208, 240)
PLACES = 256  # of a batch, at size 1
READ_EVERY = 0.5  # seconds
DRAINED_WITHIN = 10.0  # seconds, for an idle gateway to have nothing left
ROWS = {name: figures.ROWS[name] for name in ("6", "7", "8", "9", "10")}
KV = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTED = "vllm:num_preemptions_total"


class Loop(asyncio.SelectorEventLoop):
    """`time()` is real seconds since `begin`."""

    _zero = 0.0

    def time(self) -> float:
        return super().time() - self._zero

    def begin(self) -> None:
        """Let it be 0 now. Only before any timer is set."""
        self._zero += self.time()


class Process:
    """One engine in a process of its own, as its /metrics tell of it every half second."""

    def __init__(self, child: Child) -> None:
        self.url = child.line(r"^ready (http://\S+)", 30.0)
        self.posts = 0
        self.posted_at = -1.0
        self.open = ()  # only the process itself knows
        self.preempted = 0
        self._reading = (0.0, 0, 0)

    def reading(self) -> tuple[float, int, int]:
        return self._reading

    async def watch(self) -> None:
        """Read on until cancelled. An engine too busy to answer keeps its last reading."""
        while True:
            try:
                _, text = await asyncio.to_thread(get, f"{self.url}/metrics")
            except (OSError, http.client.HTTPException):
                continue
            found = {match["name"]: float(match["value"]) for match in SAMPLE.finditer(text.decode())}
            self._reading = found[KV], int(found[RUNNING]), int(found[WAITING])
            self.preempted = int(found[PREEMPTED])
            await asyncio.sleep(READ_EVERY)


class Sockets:
    """Transport over sockets: each of these servers in turn, a connection for every try."""

    def __init__(self, urls: Sequence[str]) -> None:
        parts = [urlsplit(url) for url in urls]
        self._servers = [(part.hostname or "", part.port or 80) for part in parts]
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        server = self._servers[self._next % len(self._servers)]
        self._next += 1
        task = asyncio.get_running_loop().create_task(self._exchange(server, call, client_call, tried))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def leave() -> None:
            task.cancel()

        return leave

    async def _exchange(self, server: tuple[str, int], call: Planned, client_call: ClientCall, tried: Try) -> None:
        loop = asyncio.get_running_loop()
        lines = b"".join(b"%b: %b\r\n" % field for field in call.fields.items())
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n"
        request = head % (server[0].encode(), lines, len(call.body)) + call.body
        over: asyncio.Future[None] = loop.create_future()
        ear, answer = Ear(client_call, tried), Answer()
        exchange = Exchange(request, answer, over, ear)
        try:
            await loop.create_connection(lambda: exchange, *server)
            await over
            ear.over(answer.complete)
        except OSError:
            ear.over(False)
        finally:
            if exchange.transport is not None:
                exchange.transport.abort()


class Ear:
    """Adapter from a socket to a `ClientCall`. It passes the head on with the first bytes of the body, since vLLM sends
    the head before it has a token."""

    def __init__(self, client_call: ClientCall, tried: Try) -> None:
        self._client_call = client_call
        self._tried = tried
        self._status = 0
        self._fields: Mapping[bytes, bytes] = {}

    def head(self, status: int, fields: Mapping[bytes, bytes]) -> None:
        self._status, self._fields = status, fields
        tried = self._tried
        tried.upstream = 1 if b"x-weir-engine" in fields or b"x-weir-reason" not in fields else 0
        tried.queue = int(fields.get(b"x-weir-queue-ms", b"-1000")) / 1000.0

    def body(self, data: bytes) -> None:
        if data:
            self._tell()
            self._client_call.body(data)

    def over(self, whole: bool) -> None:
        self._tell()
        self._client_call.over(whole)

    def _tell(self) -> None:
        if self._status:
            self._client_call.head(self._status, self._fields)
            self._status = 0


class Processes(msgspec.Struct, frozen=True):
    """Runner in real time and in processes, whose output goes to files in `folder`."""

    folder: Path

    def run(self, main: Coroutine[Any, Any, Measured]) -> Measured:
        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(main)

    @asynccontextmanager
    async def stage(self, shape: Shape, policy: bytes, seed: int) -> AsyncIterator[Testbed]:
        async with AsyncExitStack() as stack:
            engines = []
            for number in range(shape.engines):
                options = {
                    "profile": PROFILE,
                    "speed": shape.size,
                    "num-gpu-blocks": shape.blocks * shape.size,
                    "max-num-seqs": PLACES * shape.size,
                    "seed": seed * 100 + number,
                }
                words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
                argv = [sys.executable, "-m", "loadtest.engine", *words, "--enable-prompt-tokens-details"]
                engines.append(
                    Process(stack.enter_context(Child(f"engine-{number}", argv, self.folder / f"engine-{number}")))
                )
            gateway = None
            if shape.gateway:
                words = [word for engine in engines for word in ("--engine", engine.url)]
                if policy:
                    (self.folder / "policy.yaml").write_bytes(policy)
                    words += ["--policy", str(self.folder / "policy.yaml")]
                gateway = stack.enter_context(Gateway(self.folder / "gateway", *words, "--log", "none"))
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Loop)  # noqa: S101 # `within` made it
            loop.begin()
            for watching in [loop.create_task(engine.watch()) for engine in engines]:
                stack.callback(watching.cancel)

            async def left_over() -> list[str]:
                end = loop.time() + DRAINED_WITHIN
                while gateway is not None and not await asyncio.to_thread(gateway.idle):
                    if loop.time() > end:
                        return [f"the gateway still holds something {DRAINED_WITHIN:g} s after its last client left"]
                    await asyncio.sleep(0.1)
                return []

            yield Testbed(engines, Sockets([gateway.url] if gateway else [engine.url for engine in engines]), left_over)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.realtime",
        description="Figures 6 to 10 in real time, with processes and sockets: 15 minutes for all of them. Everything "
        "runs on the same cores; the lag of our own sending to the gateway is printed below the table: above some 50 "
        "ms at p99 the machine was too busy for the figures to count.",
    )
    figures.add_arguments(parser, ROWS, seeded="traffic and engines")
    parser.add_argument("--warm", type=float, default=30.0, help="seconds of each run before it counts (default: 30)")
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds that count (default: 40)")
    return figures.checked(parser, argv, ROWS)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a try is a connection
    options = arguments(sys.argv[1:] if argv is None else argv)
    console = terminal()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, bars(console) as progress:
        setting = Setting(
            engines=options.engines,
            seed=options.seed,
            policy=options.policy,
            warm=options.warm,
            measured=options.seconds,
            progress=progress,
            sweep=SWEEP,
            place=Processes(Path(folder)),
        )
        rows = [row for name in options.rows for row in ROWS[name](setting)]
    # Not of round robin: what it leaves open at ten times the load would keep any sender busy.
    ours = [outcome for what, outcome in setting.known.items() if "capacity" not in what and "round robin" not in what]
    lags = [t.sent - t.intended for outcome in ours for t in outcome.result.tries if t.number == 1]
    late = f"{1000 * quantile(lags, 0.5):.1f} ms (p50), {1000 * quantile(lags, 0.99):.1f} ms (p99)"
    seconds = time.perf_counter() - began
    summary = f"{setting.tries} calls in {seconds:.0f} s of real time; our own sending was late by {late}"
    return figures.told(console, setting, rows, summary, options)


if __name__ == "__main__":
    sys.exit(main())
