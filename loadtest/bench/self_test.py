"""Capacity and lag of the bench's own client on one core.

    gateway bench --self-test

The engine costs almost nothing and runs on another core. The test first sends more requests, then more events, than the
client can take. It counts the client's CPU time, which survives a busy machine better than a throughput does. Then it
sends half of what is asked of the client, and measures the lag.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from loadtest.bench.run import Ran, TargetRun, run
from loadtest.clients.driver import Load
from loadtest.clients.stub import INTERVAL, serve_stub
from loadtest.clients.targets import Address, Target
from loadtest.load.arrivals import Arrivals, Closed, Rate
from loadtest.load.lengths import Length
from loadtest.load.scenario import Scenario, planned
from loadtest.load.workload import Kind, Workload
from loadtest.processes import answers, until
from loadtest.report.records import Run, Window
from loadtest.report.stats import OK
from loadtest.report.summary import summarise

PORT = 19_341
READY_WITHIN = 20.0  # seconds
REQUESTS = 3000.0  # a second and core, asked of the client
EVENTS = 30_000.0
LAG = 0.005  # seconds, at p99, at half of these
TOKENS = 60  # of a stream
PROMPT = Length(constant=150)


class SelfTestFigure(msgspec.Struct, frozen=True):
    """Line of the table. `good`: whether the client does what is asked of it."""

    what: str
    value: str
    asked: str
    good: bool


def self_test(seconds: float = 5.0) -> list[SelfTestFigure]:
    """Measure. Raises OSError where the engine cannot be started or this process cannot be bound to a core."""
    with serve_stub(PORT), _one_core():
        address = Address("127.0.0.1", PORT)
        target = Target(name="stub", addresses=(address,))
        if until(lambda: answers(f"http://127.0.0.1:{PORT}/v1/models"), READY_WITHIN) is None:
            raise OSError(f"the engine on port {PORT} did not come up")

        def measured(arrivals: Arrivals, tokens: int) -> Ran:
            return run([TargetRun(target, _load(arrivals, seconds, tokens), 0, lambda state: None)], None)[0]

        plain = measured(Arrivals(closed=Closed(clients=64)), 0)
        busy = measured(Arrivals(closed=Closed(clients=int(1.2 * EVENTS * INTERVAL))), TOKENS)
        slow = measured(Arrivals(poisson=Rate(REQUESTS / 2.0)), 0)
        flow = measured(Arrivals(poisson=Rate(EVENTS / 2.0 / TOKENS)), TOKENS)
    figures = []
    answered = [result for result in plain.results if result.outcome == OK]
    events = sum(len(result.gaps) + 1 for result in busy.results if result.first_token)
    for what, done, ran, asked in (
        ("requests", len(answered), plain, REQUESTS), ("SSE events", events, busy, EVENTS),
    ):  # fmt: skip
        of_core = done / ran.cpu
        achieved = f"{done / ran.seconds:,.0f}/s achieved, {ran.cpu / ran.seconds:.0%} of the core"
        said = f"{of_core:,.0f}/s of core time ({achieved})"
        figures.append(SelfTestFigure(what, said, f">= {asked:,.0f}/s", of_core >= asked))
    for what, ran, asked in (("requests", slow, REQUESTS), ("SSE events", flow, EVENTS)):
        summary = summarise(Run(name=what, rate=0.0, window=Window(duration=seconds), results=ran.results))
        said = f"p99 {summary.lag_p99 * 1e3:.2f} ms, p50 {summary.lag_p50 * 1e3:.2f} ms"
        good = summary.lag_p99 < LAG and summary.total.ok == summary.total.offered
        figures.append(SelfTestFigure(f"lag at {asked / 2:,.0f} {what}/s", said, f"< {LAG * 1e3:g} ms at p99", good))
    return figures


def print_self_test() -> int:
    """Measure and print; 0 where all is as asked."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    figures = self_test()
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before
    for figure in figures:
        print(f"{figure.what:28} {figure.value:70} asked: {figure.asked}{'' if figure.good else '  MISSED'}")
    print(f"the core was taken away {taken:,} times meanwhile: on an idle machine that is rare, and each time is lag")
    return 0 if all(figure.good for figure in figures) else 1


def _load(arrivals: Arrivals, seconds: float, tokens: int) -> Load:
    kind = Kind(prompt=PROMPT, output=Length(constant=tokens or 1), stream=bool(tokens))
    scenario = Scenario(arrivals=arrivals, duration=seconds, workload=Workload(model="m", mix=(kind,)))
    return Load(planned=planned(scenario), seconds=seconds, users=scenario.clients)


@contextmanager
def _one_core() -> Iterator[None]:
    """Pin this process to core 0: the engine is on core 1."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
