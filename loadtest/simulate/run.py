"""Simulated run: a policy (or nothing) before so many engines, a scenario sent to them, in virtual time.

What becomes of a request is counted when it ends and then forgotten, and requests are made one by one, so that a trace
of ten million rows takes the memory of one of ten thousand. `Cell` says what is run, `Simulated` what came of it.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gateway.shared.protocol import Role
from loadtest.clients.calls import ClientCall
from loadtest.clients.retries import LONGEST_ADVICE, Clients
from loadtest.engine.engine_config import EngineConfig
from loadtest.load.scenario import Scenario, planned
from loadtest.report import records
from loadtest.report.records import RequestResult, Window
from loadtest.report.tally import Tally
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget, policy_of
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.rivals.router import Router
from loadtest.simulate.rivals.rules import RULES, SPILL_ON_LOAD
from loadtest.simulate.simulation import Sample, SimulationRun
from loadtest.simulate.step_times import Pace

MOST_SAMPLES = 20_000  # of a run's series, over all engines
LEAST_MOMENTS = 60  # of it, whatever the number of engines
TELL_EVERY = 0.2  # seconds of wall time


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Setting of one simulation. `before`: what stands before the engines, "gateway", SPILL_ON_LOAD or a name of RULES.
    `policy`: YAML, b"" for the defaults. `folder`: folder of the scenario's files. `requests`: keep the result of each
    request too, which takes memory. `roles`: roles of the engines, which then exchange KV caches; empty: they exchange
    none. `find_capacity`: at the rates of a search (`report/capacity.py`), and not at the scenario's own."""

    name: str
    before: str
    policy: bytes
    engines: int
    config: EngineConfig
    scenario: Scenario
    folder: Path
    requests: bool = False
    roles: tuple[Role, ...] = ()
    find_capacity: bool = False


class Progress(msgspec.Struct, frozen=True):
    """Progress of a run: simulated seconds, calls sent, calls that wait or run; `of`: the name of its cell."""

    of: str
    at: float
    sent: int
    open: int


class Simulated(msgspec.Struct, kw_only=True):
    """Outcome of one run. `calls` and `tries`, over `seconds` of virtual time, in `wall` and `cpu` seconds;
    `memory`: bytes its process had at most, until then; `left`: what its gateway left behind, which must be nothing;
    `problem`: what ended the calls before their time; `money`: of providers, an hour, None
    without them; `outside`: their tokens."""

    run: records.Run
    calls: int
    tries: int
    seconds: float
    wall: float
    cpu: float
    memory: int
    stopped: bool
    problem: str
    left: list[str]
    money: float | None
    outside: int


def simulate(cell: Cell, tell: Callable[[Progress], bool] = lambda progress: False) -> Simulated:
    """Run it. `tell` hears how far it is and answers whether to stop. Raises `simulation.Broken`, a bug of ours."""
    began, cpu = time.perf_counter(), time.process_time()
    with _few_collections():
        simulated = vtime.run(_simulate(cell, tell))
    simulated.wall = time.perf_counter() - began
    simulated.cpu = time.process_time() - cpu
    simulated.memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return simulated


async def _simulate(cell: Cell, tell: Callable[[Progress], bool]) -> Simulated:
    scenario = cell.scenario
    mix, tenants = scenario.workload.mix, tuple(scenario.workload.tenants) or ("",)
    asked = dict.fromkeys(kind.model or scenario.workload.model for kind in mix)
    models = served(cell, asked) if cell.before not in RULES else tuple(asked)
    listening = Listening(cell, tell)
    engines: list[MemoryEngine] = []
    target: GatewayTarget | Router
    for number in range(cell.engines):
        config = msgspec.structs.replace(cell.config, seed=scenario.seed * 1000 + number)
        pace = Pace(lambda taker, gaps: target.paced(taker, gaps))  # noqa: PLW0108 # there is none yet
        peers = engines if cell.roles else None
        engines.append(MemoryEngine(config, model=models[0], more=models[1:], seed=number, pace=pace, peers=peers))
    if cell.before not in RULES:
        by_load = cell.before == SPILL_ON_LOAD
        target = GatewayTarget(
            cell.policy, engines, seed=scenario.seed, tenants=tenants, roles=cell.roles, by_load=by_load
        )
        listening.gateway = target
    else:
        target = Router(engines, RULES[cell.before])
    keys = target.keys if isinstance(target, GatewayTarget) else {}
    run = listening.run = SimulationRun(
        engines,
        target,
        planned(scenario, folder=cell.folder, keys=keys),
        clients=Clients(retries=scenario.retries, timeout=scenario.timeout),
        seed=scenario.seed,
        closed=scenario.clients,
        ended=listening.ended,
        sampled=listening.sampled,
    )
    # Every try ends by its client's patience, so waiting for the last costs only virtual time.
    grace = (scenario.timeout + LONGEST_ADVICE) * (scenario.retries + 1)
    await run.until(scenario.seconds, grace=grace)
    seconds = asyncio.get_running_loop().time()
    money, outside = target.spent if isinstance(target, GatewayTarget) else (0.0, 0)
    paid = isinstance(target, GatewayTarget) and target.policy.providers and seconds
    stopped, problem = run.driver.stopped, str(run.driver.failed or "")
    if stopped or problem or (scenario.clients and seconds < scenario.seconds):
        listening.cut(seconds)
    return Simulated(
        run=listening.made(), calls=run.driver.calls, tries=listening.tries, seconds=seconds, wall=0.0, cpu=0.0,
        memory=0, stopped=stopped, problem=problem,
        left=target.left_over() if isinstance(target, GatewayTarget) and not stopped else [],
        money=3600.0 * money / seconds if paid else None, outside=outside,
    )  # fmt: skip


def served(cell: Cell, asked: Iterable[str]) -> tuple[str, ...]:
    """Models that the engines of a policy serve: those that are asked for, and the models of routes, but for
    providers'."""
    policy = policy_of(cell.policy)
    outside = {model for provider in policy.providers.values() for model in provider.models}
    routed = [policy.models[name].models if name in policy.models else (name,) for name in asked]
    found = dict.fromkeys(model for names in routed for model in names if model not in outside)
    return tuple(found) or ("sim",)


class Listening:
    """Counts what ends, and keeps a thinned series of samples."""

    def __init__(self, cell: Cell, tell: Callable[[Progress], bool]) -> None:
        self.gateway: GatewayTarget | None = None
        self.run: SimulationRun | None = None
        self.tries = 0
        self._cell = cell
        self._tell = tell
        self._told = 0.0
        self._ended = 0
        self._tally = Tally(cell.scenario.window, cell.scenario.slos)
        self._results: list[RequestResult] = []
        self._series: list[list[records.EngineSample]] = []  # by moment
        self._every = 1.0  # seconds
        self._most = max(LEAST_MOMENTS, MOST_SAMPLES // (cell.engines + 1))

    def ended(self, client_call: ClientCall) -> None:
        """A call has ended."""
        self._ended += 1
        self.tries += len(client_call.tries)
        result = client_call.result(self._cell.name)
        self._tally.add(result)
        if self._cell.requests:
            result.gaps = tuple(result.gaps)
            self._results.append(result)

    def sampled(self, sample: Sample) -> None:
        """The engines, at a moment. Of a long run every second moment is dropped, again and again."""
        at, readings = sample
        if at >= len(self._series) * self._every - 1e-9:
            moment = [
                records.EngineSample(at, f"engine-{number}", round(kv, 4), running, waiting)
                for number, (kv, running, waiting) in enumerate(readings)
            ]
            if self.gateway is not None:
                moment.append(records.EngineSample(at, "", 0.0, 0, self.gateway.queued))
            self._series.append(moment)
            if len(self._series) > self._most:
                del self._series[1::2]
                self._every *= 2.0
        run, now = self.run, time.perf_counter()
        if run is not None and now - self._told > TELL_EVERY:
            self._told = now
            driver = run.driver
            if self._tell(Progress(self._cell.name, at, driver.calls, driver.calls - self._ended)):
                driver.stop()

    def cut(self, seconds: float) -> None:
        """The run was over after so many seconds: nothing was intended after that."""
        window = self._tally.window
        self._tally.window = Window(duration=min(window.duration, seconds), warmup=min(window.warmup, seconds))

    def made(self) -> records.Run:
        """The run, for the report. A trace has the rate that was offered, on average."""
        cell, tally = self._cell, self._tally
        offered = sum(part.offered for part in tally.classes.values())
        return records.Run(
            name=cell.name,
            rate=cell.scenario.rate
            or (offered / tally.seconds if tally.seconds and not cell.scenario.clients else 0.0),
            window=tally.window,
            slos=cell.scenario.slos,
            results=self._results,
            tallies=[tally],
            series=[sample for moment in self._series for sample in moment],
        )


@contextmanager
def _few_collections() -> Iterator[None]:
    """Full collections find next to nothing here, and are a tenth of the time."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
