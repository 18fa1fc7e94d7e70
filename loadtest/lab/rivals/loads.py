"""Loads that Weir and its rivals are compared under, and what Weir is to reach in each.

Rates are shares of the capacity: the most calls a second that the engines of a load answer to closed-loop clients, in
virtual time. Recorded traffic gives lengths, and which prompts begin alike. Without a file, stand-ins of about the same
statistics are sent. Azure's conversations of 2023 have prompts of 1,155 tokens on average, 1,020 at p50 and 2,735 at
p90, and answers of 211, 129 and 424. Mooncake's conversations have prompts of 12,035, 6,909 and 27,367 tokens and
answers of 343, 350 and 597; 37 % of the prompts' blocks were seen before.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec

from loadtest.bench.fleet import Fleet
from loadtest.engine.engine_config import EngineConfig, engine_config
from loadtest.engine.profile_file import profile_of
from loadtest.engine.sequence import BLOCK
from loadtest.load.arrivals import Arrivals, Closed, Rate
from loadtest.load.lengths import Length, LogNormal, Uniform
from loadtest.load.scenario import Scenario, TraceFile, find, load, planned
from loadtest.load.slo import parse_slo
from loadtest.load.workload import Kind, Sessions, Workload
from loadtest.report.summary import summarise
from loadtest.simulate.run import Cell, simulate

ENGINES = 4
CLIENTS = (12, 32, 96)  # an engine, when its capacity is measured
SATURATED = (30.0, 90.0)  # seconds of virtual time: measured from, until
PATIENCE = 300.0  # seconds of a client
BEGINNINGS = 400  # of which the calls of one are counted
HIGHER = ("hits", "in_time", "share", "goodput")  # figures of which more is better
SLO = parse_slo("interactive.ttft.p99<2s,interactive.e2e.p99<60s,default.ttft.p99<10s,default.e2e.p99<300s")


class Goal(msgspec.Struct, frozen=True):
    """Bound of one figure of Weir's: `times` that of the rival `against`, and `more`; at least that of HIGHER, at most
    of the others. `class_name`: of one class alone."""

    figure: str
    times: float
    more: float = 0.0
    class_name: str = ""
    against: str = ""  # the reference of the run where empty


class RivalLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load on ENGINES engines of `profile`. `share`: part of the capacity, None: the scenario's own arrivals. `trace`:
    file of recorded traffic that replaces the lengths of the first kind. `cache`: tokens of an engine's cache,
    `longest`: tokens of a prompt with its answer, None: the profile's. `rivals`: rivals beside the named ones."""

    scenario: Scenario
    goals: tuple[Goal, ...] = ()
    share: float | None = None
    trace: str = ""
    profile: str = "h100-8b"
    cache: int | None = None
    longest: int | None = None
    rivals: tuple[str, ...] = ()

    @property
    def blocks(self) -> int | None:
        """Blocks of an engine's cache; None: the profile's."""
        return None if self.cache is None else self.cache // BLOCK

    @property
    def config(self) -> EngineConfig:
        """Config of an engine in virtual time."""
        return engine_config(profile_of(self.profile), num_gpu_blocks=self.blocks, max_model_len=self.longest)

    @property
    def fleet(self) -> Fleet:
        """Fleet of engine processes."""
        limits = {"--num-gpu-blocks": self.blocks, "--max-model-len": self.longest}
        flags = [word for flag, value in limits.items() if value is not None for word in (flag, str(value))]
        return Fleet(count=ENGINES, profile=self.profile, flags=flags)

    def replayed(self, file: Path, think: float | None = None) -> RivalLoad:
        """With the lengths of recorded traffic, and the prompts' common beginnings where they were recorded. `think`:
        seconds between an answer and its conversation's next turn, on average; None: each request at a time of its
        own."""
        workload = self.scenario.workload
        session = None if think is None else Sessions(think=think)
        kind = msgspec.structs.replace(workload.mix[0], prompt="trace", output="trace", session=session, prefix=None)
        workload = msgspec.structs.replace(workload, mix=(kind, *workload.mix[1:]))
        trace = TraceFile(file=str(file.absolute()))
        return msgspec.structs.replace(
            self, scenario=msgspec.structs.replace(self.scenario, workload=workload, trace=trace)
        )

    def at(self, capacity: float, seconds: float) -> Scenario:
        """Return the scenario to send to engines that can do `capacity` beginnings a second, measured for `seconds`.
        Above the capacity, a warm-up of as many seconds comes first. A load without `share` sends its scenario
        unchanged."""
        if self.share is None:
            return self.scenario
        arrivals = Arrivals(poisson=Rate(round(self.share * capacity, 6)))
        warm = seconds if self.share > 1.0 else 0.0  # until queues have grown
        return msgspec.structs.replace(self.scenario, arrivals=arrivals, warmup=warm, duration=warm + seconds)

    def capacity(self) -> float:
        """Requests, or conversations, a second that the engines do at most, with the best number of clients."""
        warm, ends = SATURATED
        scenario = msgspec.structs.replace(self.scenario, warmup=warm, duration=ends, slo=())
        rates = []
        for clients in CLIENTS:
            arrivals = Arrivals(closed=Closed(clients=clients * ENGINES))
            scenario = msgspec.structs.replace(scenario, arrivals=arrivals)
            cell = Cell(name="", before="least_requests", policy=b"", engines=ENGINES, config=self.config,
                        scenario=scenario, folder=Path())  # fmt: skip
            rates.append(summarise(simulate(cell).run).total.ok_rate)
        calls = list(islice(planned(scenario), BEGINNINGS + 1))
        return max(rates) * BEGINNINGS / calls[-1].index


def _scenario(*mix: Kind, named: bool = False, retries: int = 0) -> Scenario:
    names = {kind.class_name for kind in mix}
    slo = tuple(objective for objective in SLO if objective.class_name in names)
    return Scenario(workload=Workload(mix=mix, named=named), slo=slo, retries=retries, timeout=PATIENCE)


def _offered(kind: Kind, share: float) -> Scenario:
    """Beyond the capacity callers name the class that promises a first token in time, and try twice more."""
    if share <= 1.0:
        return _scenario(kind)
    return _scenario(msgspec.structs.replace(kind, class_name="interactive"), named=True, retries=2)


def _length(median: int, sigma: float, most: int) -> Length:
    return Length(log_normal=LogNormal(median, sigma), least=16, most=most)


def _shipped(name: str) -> Scenario:
    return msgspec.structs.replace(load(find(name)), retries=0, timeout=PATIENCE)


CHATS = Kind(
    class_name="interactive", prompt=_length(770, 0.9, 14_000), output=_length(150, 0.85, 1_000), ignore_eos=True
)  # fmt: skip
SHORT = msgspec.structs.replace(CHATS, prompt=_length(300, 0.6, 4_000), share=8.0)
PROMPTS = Kind(
    prompt=_length(1_800, 1.2, 60_000), output=_length(250, 0.8, 2_000), ignore_eos=True,
    session=Sessions(first=_length(6_000, 1.1, 100_000), turns=Length(geometric=2.5), think=5.0, context=100_000),
)  # fmt: skip
SEARCH = (
    Kind(kind="embeddings", share=2.0, prompt=Length(uniform=Uniform(50, 500)), inputs=Length(constant=8)),
    Kind(kind="rerank", share=1.0, prompt=_length(250, 0.3, 512), inputs=Length(constant=16)),
)
AGENTS, CLAUDE = _shipped("agents"), _shipped("claude-code")
ONE = msgspec.structs.replace(
    _scenario(Kind(prompt=Length(constant=200), output=Length(constant=8), ignore_eos=True)),
    arrivals=Arrivals(closed=Closed(clients=1, rounds=200)),
)

BURST = msgspec.structs.replace(
    _scenario(Kind(prompt=Length(constant=18_000), output=Length(constant=200), ignore_eos=True)),
    arrivals=Arrivals(closed=Closed(clients=100, rounds=1)),
)

AMPLE = tuple(Goal(figure, 1.0) for figure in ("mean", "p90", "p99"))
NO_WORSE = tuple(Goal(figure, 1.0) for figure in ("mean", "p99", "e2e"))
LONG = (Goal("mean", 0.8), Goal("p99", 1.0))
OVER = (Goal("in_time", 2.0), Goal("goodput", 1.0))
BIG = "h100-70b-tp4"  # so few calls a second that the machine can simulate its engines in real time
LOADS = {
    "agents-tight": RivalLoad(
        scenario=AGENTS, cache=32_000,
        goals=(Goal("hits", 0.0, 0.7), Goal("mean", 0.6), Goal("p90", 0.4), Goal("p99", 1.0)),
    ),
    "agents-ample": RivalLoad(scenario=AGENTS, cache=64_000, goals=AMPLE),
    "claude-code": RivalLoad(scenario=CLAUDE, longest=131_072, goals=AMPLE),
    "agents-and-chats": RivalLoad(
        scenario=_scenario(AGENTS.workload.mix[0], SHORT), share=0.7, profile=BIG, cache=128_000,
        goals=(Goal("p99", 0.7, class_name="interactive"), Goal("mean", 0.8, class_name="default")),
    ),
    **{
        f"chats-{share:g}": RivalLoad(
            scenario=_offered(CHATS, share), share=share, trace="chats",
            profile=BIG, goals=OVER if share > 1.0 else NO_WORSE,
        )
        for share in (0.3, 0.6, 0.9, 1.5, 3.0)
    },
    **{
        f"prompts-{share:g}": RivalLoad(
            scenario=_offered(PROMPTS, share), share=share,
            trace="prompts", longest=131_072, goals=OVER if share > 1.0 else LONG,
        )
        for share in (0.5, 0.8, 1.5, 3.0)
    },
    "embeddings": RivalLoad(
        scenario=_scenario(CHATS, *SEARCH), share=0.6, trace="chats", profile=BIG,
        goals=(Goal("p99", 1.0, class_name="interactive"),),
    ),
    "burst": RivalLoad(scenario=BURST, goals=(Goal("refused", 0.0), Goal("mean", 1.05), Goal("p99", 1.05))),
    "idle": RivalLoad(
        scenario=ONE, rivals=("direct",),
        goals=(Goal("p50", 1.0, 0.0005, against="direct"), Goal("p99", 1.0, 0.002, against="direct")),
    ),
}  # fmt: skip
