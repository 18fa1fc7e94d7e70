"""Runs of one load behind one rival, over processes or in virtual time, and their figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.bench.fleet import started
from loadtest.bench.run import Load, TargetRun, run
from loadtest.bench.session import cut
from loadtest.clients.retries import Clients
from loadtest.clients.targets import Target
from loadtest.lab.rivals.loads import ENGINES, HIGHER, Goal, RivalLoad
from loadtest.load.scenario import Scenario, planned
from loadtest.processes import total
from loadtest.report.records import Run
from loadtest.report.stats import latency_of, met, slo_of
from loadtest.report.summary import summarise
from loadtest.simulate.run import Cell, simulate

WEIR = "weir"
NEAR = 1.05  # times a bound: within what Weir may be worse by
DRAIN = 330.0  # seconds: longer than any client's patience
SCRAPED = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")


# Figures of one run, or of one class of it. `hits`: share of prompt tokens that engines had cached; `mean` to `p99`:
# seconds to the first token, of calls that were answered; `e2e`: to the last, on average; `in_time`: calls within their
# targets, and `share` the part of the offered calls that they are; `goodput`: tokens of those, prompt and answer, a
# second; `refused`: calls not answered; `lag`: seconds the sender was late at p99.
RivalRow = Mapping[str, float]


def over_processes(load: RivalLoad, rival: str, scenario: Scenario, folder: Path) -> tuple[Run, float]:
    """The run, and the hits by the engines' own counters. Raises ChildError where one does not come up."""
    before = "gateway" if rival == WEIR else rival
    with started(load.fleet, rival, before=before, policy=None, seed=scenario.seed, folder=folder) as target:
        return sent(target, scenario, [f"http://{address.name}" for name, address in target.sources if name])


def in_virtual_time(load: RivalLoad, rival: str, scenario: Scenario, folder: Path) -> tuple[Run, float]:
    """The run of the whole gateway, or of a rival's rule, in virtual time, and the hits by usage."""
    before = "gateway" if rival == WEIR else rival
    cell = Cell(name=rival, before=before, policy=b"", engines=ENGINES, config=load.config, scenario=scenario,
                folder=folder, requests=True)  # fmt: skip
    found = simulate(cell).run
    return found, summarise(found).total.cached


def sent(target: Target, scenario: Scenario, engines: Sequence[str]) -> tuple[Run, float]:
    """A scenario sent to a target, and the hits by its engines' own counters meanwhile."""
    before = [_counted(engines, name) for name in SCRAPED]
    load = Load(planned=planned(scenario), seconds=scenario.seconds, users=scenario.clients, drain=DRAIN,
                clients=Clients(retries=scenario.retries, timeout=scenario.timeout))  # fmt: skip
    ran = run(TargetRun(target, load, 0, lambda share, words: None), None)
    if ran.stopped:
        raise KeyboardInterrupt
    hits, queries = (_counted(engines, name) - was for name, was in zip(SCRAPED, before, strict=True))
    window = cut(scenario.window, ran.seconds) if scenario.clients else scenario.window
    found = Run(name=target.name, rate=scenario.rate, window=window, slos=scenario.slos, results=ran.results,
                series=ran.samples)  # fmt: skip
    return found, hits / max(queries, 1.0)


def _counted(engines: Sequence[str], name: str) -> float:
    return sum(total(f"{url}/metrics", name) for url in engines)


# -- figures ----------------------------------------------------------------------------------------------------------


def row(run: Run, hits: float, class_name: str = "") -> RivalRow:
    """The figures of a run, or of one class of it."""
    summary = summarise(run)
    part = summary.classes[class_name] if class_name else summary.total
    seconds = summary.seconds / summary.repeats
    tokens = sum(
        result.prompt_tokens + result.completion_tokens
        for result in run.results
        if result.outcome == "ok" and result.at in run.window and class_name in ("", result.class_name)
        and met(slo_of(run.slos, result.class_name), latency_of(result, result.at))
    )  # fmt: skip
    first = {name: getattr(part.ttft, name) for name in ("mean", "p50", "p90", "p99")}
    shares = {"hits": hits, "share": part.met / max(part.offered, 1), "goodput": tokens / max(seconds, 1e-9)}
    counts = {"in_time": part.met, "refused": part.offered - part.ok}
    return {**first, **shares, **counts, "e2e": part.e2e.mean, "lag": summary.lag_p99}


def medians(rows: Sequence[RivalRow]) -> RivalRow:
    """Return the median of each figure over the rounds, and the sum of the refused calls."""
    found = {name: statistics.median(one[name] for one in rows) for name in rows[0]}
    return {**found, "refused": sum(one["refused"] for one in rows)}


def verdict(goal: Goal, own: RivalRow, other: RivalRow) -> tuple[bool, str]:
    """Whether a goal is kept, and in words."""
    value, base = own[goal.figure], other[goal.figure]
    bound, higher = goal.times * base + goal.more, goal.figure in HIGHER
    kept = value >= bound if higher else value <= bound
    parts = [f"{goal.times:g}x" if goal.times else "", f"{goal.more:g}" if goal.more else ""]
    wanted = f"at {'least' if higher else 'most'} {' and '.join(filter(None, parts)) or 0}"
    found = f"{value:.4g} beside {base:.4g}" + (f" ({value / base:.2f}x)" if base else "")
    name = f"{goal.class_name}: {goal.figure}" if goal.class_name else goal.figure
    near = not higher and value <= NEAR * bound
    return (
        kept,
        f"{name} {found}, wanted {wanted}: {'kept' if kept else 'missed by less than 5 %' if near else 'MISSED'}",
    )
