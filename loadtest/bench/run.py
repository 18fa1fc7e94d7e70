"""Run of the bench: one target and one repeat, in an event loop of its own.

The run samples the target's metrics meanwhile. Ctrl-C ends it.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import resource
import signal
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import uvloop

from loadtest.clients.answer import Answer
from loadtest.clients.calls import ClientCall, WallClock
from loadtest.clients.driver import Driver
from loadtest.clients.retries import Clients
from loadtest.clients.sender import Sockets
from loadtest.clients.target_metrics import page, watch
from loadtest.clients.targets import Server, Servers, Target, models_of
from loadtest.load.workload import Planned
from loadtest.report.number_format import seconds
from loadtest.report.progress import Tell
from loadtest.report.records import NOT_SENT, EngineSample, RequestResult
from loadtest.report.stats import LAG_BOUND

HEADSTART = 0.05  # seconds between the last preparation and a run's start
BURST = 32  # requests sent in one turn of the loop
TELL_EVERY = 0.5  # seconds
SHOWN = 4  # outcomes
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


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one run. `planned`: the requests in order, and no more of them than are to be sent within
    `seconds`; `users`: of a closed loop, 0 for an open one; `drain`: how long answers are waited for after its end."""

    planned: Iterator[Planned]
    seconds: float
    users: int = 0
    drain: float = 30.0
    clients: Clients = Clients(timeout=600.0)


class TargetRun(msgspec.Struct, frozen=True):
    """Run of one target, of which `tell` is told."""

    target: Target
    load: Load
    repeat: int
    tell: Tell


class Recorder:
    """Results of one run, as its calls end."""

    def __init__(self, job: TargetRun, clock: WallClock) -> None:
        self.results: list[RequestResult] = []
        self._outcomes: Counter[str] = Counter()
        self._told = 0.0, 0  # when the run's state was put into words last, and the calls by then
        self._job = job
        self._clock = clock

    def ended(self, client_call: ClientCall) -> None:
        """A call has ended, after its last try."""
        self._add(client_call.result(self._job.target.name, self._job.repeat))

    def missed(self, planned: Planned) -> None:
        """Count a call that was due and is not sent any more: the run is over."""
        self._add(
            RequestResult(
                index=planned.index, target=self._job.target.name, repeat=self._job.repeat, at=planned.at,
                kind=planned.kind, class_name=planned.class_name, tenant=planned.tenant, finished=self._clock.time(),
                outcome=NOT_SENT, reason="overdue when the run ended", tries=0,
            )
        )  # fmt: skip

    def _add(self, result: RequestResult) -> None:
        self.results.append(result)
        self._outcomes[result.outcome] += 1

    def tell(self, driver: Driver) -> None:
        """Tell how far the run is, of its time; of a trace without a duration: 0."""
        at, late = self._clock.time(), driver.late
        driver.late = 0.0
        self._job.tell(max(0.0, min(1.0, at / self._job.load.seconds)), lambda: self._words(driver, at, late))

    def _words(self, driver: Driver, at: float, late: float) -> str:
        """The run's state in one line, with the requests a second since the last one."""
        before, sent = self._told
        self._told = at, driver.calls
        rate = (driver.calls - sent) / (at - before) if at > before else 0.0
        most = sorted(self._outcomes.items(), key=lambda item: (-item[1], item[0]))
        ended = ", ".join(f"{count} {outcome}" for outcome, count in most[:SHOWN]) or "none has ended"
        left = self._job.load.seconds - at
        until = f"{left:.0f} s left" if left > 0.0 else "waiting for the last"
        lag = f"late by {seconds(late)}" if late > LAG_BOUND else ""
        said = f"{rate:.1f}/s", f"{len(driver.open)} in flight", ended, until if math.isfinite(left) else "", lag
        return "  ".join(filter(None, said))

    async def keep_telling(self, driver: Driver) -> None:
        """Tell it again and again, until cancelled."""
        while True:
            await asyncio.sleep(TELL_EVERY)
            self.tell(driver)


def run(job: TargetRun, tls: ssl.SSLContext | None) -> Ran:
    """Send a load to its target. Blocks until that is over. SIGINT, SIGTERM and SIGHUP end it early, and only it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _undisturbed():
        return runner.run(_run(job, tls))


async def _run(job: TargetRun, tls: ssl.SSLContext | None) -> Ran:
    servers, load = Servers(job.target, tls), job.load
    for server in servers.servers:
        try:
            await server.resolve()
        except OSError:
            continue  # every request will say so
    clock = WallClock(time.monotonic() + HEADSTART)
    recorder = Recorder(job, clock)
    driver = Driver(
        Sockets(servers, header_lines(job.target), clock), load.planned, clients=load.clients,
        rng=random.Random(f"retries {job.repeat}"),  # noqa: S311 # clients' whims
        closed=load.users, ended=recorder.ended, missed=recorder.missed, clock=clock, burst=BURST,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, driver.stop)
    before = time.process_time()
    telling = asyncio.ensure_future(recorder.keep_telling(driver))
    try:
        async with _watched(job, tls, clock.begin) as samples:
            await driver.run(load.seconds, load.drain)
    finally:
        telling.cancel()
        servers.close()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    recorder.tell(driver)
    return Ran(
        results=recorder.results,
        samples=sorted(samples, key=lambda sample: sample.at),
        stopped=driver.stopped,
        seconds=max(0.0, clock.time()),
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


def probe(target: Target, tls: ssl.SSLContext | None) -> Probed:
    """Ask the first server of a target for its models. Nothing is raised for what it does."""

    async def ask() -> Probed:
        server = Servers(target, tls).servers[0]
        request = server.address.request(b"GET", b"/v1/models", header_lines(target))
        answer = Answer()
        try:
            body, problem = await page(server, request, patience=PROBE, answer=answer)
        finally:
            server.close()
        if not server.opened and answer.timed_out:
            problem = f"no connection within {PROBE:g} s"
        reached = bool(server.opened) and answer.outcome != "unanswered"
        try:
            models = tuple(model.id for model in models_of(body))
        except ValueError:
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
