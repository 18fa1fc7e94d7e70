"""Run of the bench: one target and one repeat, in an event loop of its own.

The run samples the target's metrics meanwhile. Ctrl-C ends it.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import uvloop

from loadtest.clients.answer import Answer
from loadtest.clients.driver import Driver, Load, LoadProgress
from loadtest.clients.target_metrics import page, watch
from loadtest.clients.targets import Server, Servers, Target
from loadtest.report.records import EngineSample, RequestResult

HEADSTART = 0.05  # seconds between the last preparation and a run's start
PROBE = 5.0  # seconds for /v1/models
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ran(msgspec.Struct, kw_only=True):
    """Outcome of one run. `stopped`: by a signal; `seconds` it took; `problem`: why it ended before its time; `cpu`:
    seconds of processor time of ours."""

    results: list[RequestResult]
    samples: list[EngineSample]
    stopped: bool
    seconds: float
    problem: str
    cpu: float
    connections: int


class TargetRun(msgspec.Struct, frozen=True):
    """Run of one target. `tell` hears how far it is."""

    target: Target
    load: Load
    repeat: int
    tell: Callable[[LoadProgress], None]


def run(job: TargetRun, tls: ssl.SSLContext | None) -> Ran:
    """Send a load to its target. Blocks until that is over. SIGINT, SIGTERM and SIGHUP end it early, and only it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _undisturbed():
        return runner.run(_run(job, tls))


async def _run(job: TargetRun, tls: ssl.SSLContext | None) -> Ran:
    servers = Servers(job.target, tls)
    for server in servers.servers:
        try:
            await server.resolve()
        except OSError:
            continue  # every request will say so
    begin = time.monotonic() + HEADSTART
    driver = Driver(
        servers, job.load, target=job.target.name, repeat=job.repeat, headers=header_lines(job.target), begin=begin,
        tell=job.tell,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, driver.stop)
    before = time.process_time()
    try:
        async with _watched(job, tls, begin) as samples:
            await driver.run()
    finally:
        servers.close()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    return Ran(
        results=driver.sender.results,
        samples=sorted(samples, key=lambda sample: sample.at),
        stopped=driver.stopped,
        seconds=max(0.0, driver.now),
        problem=str(driver.failed or ""),
        cpu=time.process_time() - before,
        connections=sum(server.opened for server in servers.servers),
    )


@asynccontextmanager
async def _watched(job: TargetRun, tls: ssl.SSLContext | None, begin: float) -> AsyncIterator[list[EngineSample]]:
    """Collect a target's metrics as long as this lasts."""
    samples: list[EngineSample] = []
    sources = job.target.sources
    engines = any(name for name, _ in sources)
    servers = [Server(address, tls) for _, address in sources]
    watching = [
        asyncio.ensure_future(watch(server, name, begin, job.repeat, samples, only_queue=engines and not name))
        for server, (name, _) in zip(servers, sources, strict=True)
    ]
    try:
        yield samples
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for server in servers:
            server.close()


def header_lines(target: Target) -> bytes:
    """The headers of a target as they are sent."""
    return b"".join(b"%b: %b\r\n" % field for field in target.headers.items())


class Probed(msgspec.Struct, frozen=True):
    """A target's answer when it was asked for its models: their names, or why there are none. `status`: of its answer;
    0: none came. `reached`: whether there is one at all who answers by HTTP, or may yet."""

    models: tuple[str, ...]
    problem: str
    status: int
    reached: bool


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def probe(target: Target, tls: ssl.SSLContext | None) -> Probed:
    """Ask the first server of a target for its models. Nothing is raised for what it does."""

    async def ask() -> Probed:
        server = Servers(target, tls).servers[0]
        name = server.address.name.encode("ascii", "replace")
        request = b"GET %b/v1/models HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (
            server.address.prefix,
            name,
            header_lines(target),
        )
        answer = Answer()
        try:
            body, problem = await page(server, request, patience=PROBE, answer=answer)
        finally:
            server.close()
        if not server.opened and answer.timed_out:
            problem = f"no connection within {PROBE:g} s"
        reached = bool(server.opened) and answer.outcome != "unanswered"
        try:
            models = tuple(model.id for model in msgspec.json.decode(body, type=_Models).data)
        except msgspec.DecodeError:
            return Probed((), problem or "no list of models", answer.status, reached)
        return Probed(models, "", answer.status, reached)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ask())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Run with the most sockets allowed and without full garbage collections, then restore signal handlers.

    Collecting a large heap is a pause that would count against the server; kept results have no cycles.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    thresholds = gc.get_threshold()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 100, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        for number, handler in handlers.items():  # a loop leaves the default ones behind
            signal.signal(number, handler)
