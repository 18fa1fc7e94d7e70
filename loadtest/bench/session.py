"""Sequence of all runs of one bench, and the data of its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import msgspec

from loadtest.bench.fleet import started
from loadtest.bench.help_text import refused, unreachable
from loadtest.bench.options import Bench, Contender
from loadtest.bench.run import Ran, TargetRun, probe, run
from loadtest.clients.targets import Target
from loadtest.load.scenario import Scenario
from loadtest.report.capacity import RULE, Capacity, Tried, search, verdict
from loadtest.report.delivery import Say, provenance
from loadtest.report.progress import Follow
from loadtest.report.records import NOT_SENT, Run, Window
from loadtest.report.report import check


class Taken(msgspec.Struct, frozen=True):
    """A run that was made, of `contender` under `scenario`. `rate`: for reports; 0.0: unknown."""

    contender: Contender
    scenario: Scenario
    rate: float
    ran: Ran


class BenchSession:
    """All the runs of one bench. `taken`: those that were made, so far; `over`: no more are to be."""

    def __init__(self, bench: Bench, folder: Path, follow: Follow, say: Say) -> None:
        self.bench = bench
        self.taken: list[Taken] = []
        self.capacities: dict[str, Capacity] = {}
        self.problem = ""
        self.stopped = False
        self._folder = folder
        self._follow = follow
        self._say = say
        self._models: dict[str, str] = {}  # named at a target instead of the scenario's
        self._asked: set[str] = set()

    @property
    def over(self) -> bool:
        return self.stopped or bool(self.problem)

    def run(self) -> None:
        """Make them all. Raises ChildError."""
        bench = self.bench
        for contender in bench.contenders:  # before the first has been measured for an hour
            if contender.fixed is not None:
                self._ask(contender.fixed, bench.scenario)
        if bench.find_capacity:
            for contender in bench.contenders:
                if not self.over:
                    self._search(contender)
            return
        for repeat in range(bench.repeat):
            for contender in in_turn(bench.contenders, repeat):
                self._measure(contender, bench.scenario, repeat)

    def runs(self) -> list[Run]:
        """Return the runs to report, in the order of targets, then of rates. A repeat that was broken off is left out
        if there is a whole repeat."""
        found: list[Run] = []
        for contender in self.bench.contenders:
            own = [taken for taken in self.taken if taken.contender == contender]
            for rate in sorted({taken.rate for taken in own}):
                run = run_of(self.bench, [taken for taken in own if taken.rate == rate])
                if contender.name in self.capacities:
                    run.meta = {**run.meta, "capacity": str(self.capacities[contender.name]), "rule": RULE}
                found.append(run)
        return found

    def missed(self, runs: Sequence[Run]) -> list[str]:
        """List the SLOs that runs missed, without baselines; empty for a capacity search."""
        compared = {contender.name for contender in self.bench.contenders if contender.compared}
        asked = [run for run in runs if run.name not in compared and not self.bench.find_capacity]
        return [f"{run.name}: {miss}" for run in asked for miss in check(run.slos, run)]

    def _search(self, contender: Contender) -> None:
        scenario = self.bench.scenario
        first = scenario.rate or 1.0  # of a trace: how many times faster
        if scenario.arrivals == "trace":
            self._say(f"{contender.name}: rates are times the trace's own")

        def attempt(rate: float) -> Tried | None:
            at = scenario.scaled(rate / first)
            self.taken = [one for one in self.taken if (one.contender, one.rate) != (contender, rate)]  # in vain
            before = len(self.taken)
            for repeat in range(self.bench.repeat):
                self._measure(contender, at, repeat, rate)
            if self.over:
                return None
            told = verdict(rate, run_of(self.bench, self.taken[before:]))
            self._say(f"{contender.name} at {rate:.4g}/s: {told.few or '; '.join(told.missed) or 'kept'}")
            return told

        self.capacities[contender.name] = search(first, attempt)

    def _measure(self, contender: Contender, scenario: Scenario, repeat: int, rate: float | None = None) -> None:
        """Run one repeat against a contender. `rate`: the rate of a search."""
        if self.over:
            return
        bench = self.bench
        with self._target(contender, repeat) as target:
            self._ask(target, scenario)
            at = "" if rate is None else f" at {rate:.4g}/s"
            number = f", {repeat + 1} of {bench.repeat}" if bench.repeat > 1 else ""
            load = bench.load(scenario, repeat, self._models.get(target.name))
            ran = run(TargetRun(target, load, repeat, self._follow(f"{target.name}{at}{number}")), bench.tls)
        self.taken.append(Taken(contender, scenario, scenario.rate if rate is None else rate, ran))
        if missed := sum(result.outcome == NOT_SENT for result in ran.results):
            self._say(f"{target.name}{at}: warning: {missed} requests were due and not sent: this machine is too slow")
        self.stopped |= ran.stopped
        self.problem = self.problem or ran.problem

    @contextmanager
    def _target(self, contender: Contender, repeat: int) -> Iterator[Target]:
        bench = self.bench
        if contender.fixed is not None:
            yield contender.fixed
            return
        assert bench.fleet is not None  # noqa: S101 # the options say so
        with started(
            bench.fleet, contender.name, before=contender.before, policy=contender.policy,
            seed=bench.scenario.seed + repeat, folder=self._folder,
        ) as target:  # fmt: skip
            yield target

    def _ask(self, target: Target, scenario: Scenario) -> None:
        """Ask a target for its models, once: nothing is sent where one is not there; and to name the one it has."""
        if target.name in self._asked:
            return
        self._asked.add(target.name)
        told = probe(target, self.bench.tls)
        wanted = {kind.model or scenario.workload.model for kind in scenario.workload.mix}
        missing = sorted(wanted.difference(told.models))
        said = ""
        if not told.reached:
            why = unreachable(target.addresses[0], told.problem)
            self.problem = self.problem or f"{target.name}: {why}"
        elif told.status in (401, 403):
            said = refused(told.problem, by_key=b"authorization" in target.headers)
        elif told.problem:
            said = f"asked for its models: {told.problem}"
        elif missing and not self.bench.named_model and len(told.models) == 1:
            self._models[target.name] = told.models[0]
            said = f"requests name its model, {told.models[0]}"
        elif missing:
            said = f"it has no model {missing[0]}, only {', '.join(told.models[:5]) or 'none'}; --model names another"
        if said:
            self._say(f"{target.name}: {said}")


def in_turn(contenders: Sequence[Contender], repeat: int) -> list[Contender]:
    """The order of a repeat: every other one is turned round, so that all are as early as late on average."""
    return list(reversed(contenders)) if repeat % 2 else list(contenders)


def run_of(bench: Bench, taken: Sequence[Taken]) -> Run:
    """All repeats of one contender at one rate."""
    whole = [one for one in taken if not one.ran.stopped and not one.ran.problem]
    used = whole or list(taken)
    contender, scenario = used[0].contender, used[0].scenario
    window = scenario.window
    if not whole or scenario.clients:  # a closed loop may be over before its time
        window = cut(window, max(one.ran.seconds for one in used))
    return Run(
        name=contender.name,
        rate=used[0].rate,
        window=window,
        slos=scenario.slos,
        results=[result for one in used for result in one.ran.results],
        series=list(chain.from_iterable(one.ran.samples for one in used)),
        meta=_meta(bench, contender, scenario, used),
    )


def cut(window: Window, seconds: float) -> Window:
    """Cut a window at the `seconds` after which the run was broken off. If that was within the warm-up, the warm-up
    counts, because nothing else was measured."""
    if seconds >= window.ends:
        return window
    return Window(duration=seconds, warmup=window.warmup if window.warmup < seconds else 0.0)


def _meta(bench: Bench, contender: Contender, scenario: Scenario, taken: Sequence[Taken]) -> dict[str, object]:
    """Return what a reader needs to repeat the run. Nothing in it is secret, because keys are never on command
    lines."""
    fixed = contender.fixed
    return {
        **provenance(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "scenario": bench.source,
        "what": scenario.what,
        "seed": scenario.seed,
        "repeats": bench.repeat,
        "order": "one after the other, turned round with each repeat",
        "target": fixed.addresses[0].name
        if fixed is not None
        else f"{bench.fleet and bench.fleet.count} x {bench.fleet and bench.fleet.profile}, {contender.before}",
        "policy": str(contender.policy or ""),
        "retries": scenario.retries,
        "timeout": scenario.timeout,
        "connections": sum(one.ran.connections for one in taken),
        "sender's cpu": sum(one.ran.cpu for one in taken) / max(1e-9, sum(one.ran.seconds for one in taken)),
        "problem": next((one.ran.problem for one in taken if one.ran.problem), ""),
    }
