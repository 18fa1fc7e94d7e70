"""Command `gateway simulate`: a policy's effect on a load, in virtual time, and the number of engines it needs.

`options.py` reads the flags, `help_text.py` has their texts, `run.py` makes one run and `jobs.py` several at once;
`findings.py` puts the results into sentences. The report is that of the bench.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from rich.console import Console

from loadtest.load.scenario import Mistake
from loadtest.report.capacity import RULE
from loadtest.report.delivery import INTERRUPTED, Say, deliver, provenance, saying, unhurried
from loadtest.report.number_format import count, seconds
from loadtest.report.progress import Follow, Tell, following
from loadtest.report.records import MONEY, Run
from loadtest.report.report import refusal, table
from loadtest.simulate.findings import answers, bills, kept, speed, transfers
from loadtest.simulate.help_text import DESCRIPTION, EXAMPLES
from loadtest.simulate.jobs import Done, JobError, run_all
from loadtest.simulate.options import Simulation, add_arguments, simulation_of
from loadtest.simulate.rivals.rules import SPILL_ON_LOAD
from loadtest.simulate.run import Progress, Simulated
from loadtest.simulate.simulation import Broken

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "command"]

MISTAKES = (Mistake,)


def command(given: argparse.Namespace) -> int:
    """Do what the flags say and print the report; the exit status. Raises Mistake."""
    simulation = simulation_of(given)
    if simulation.out is not None and (said := refusal(simulation.out, force=simulation.force)):
        raise Mistake(said)
    errors = Console(stderr=True)
    say = saying(errors)
    for note in simulation.notes:
        say(f"gateway: {note}")
    began = time.perf_counter()
    try:
        with following(errors, say) as follow:
            done, stopped = run_all(simulation.jobs, simulation.at_once, _heard(simulation, follow))
    except (JobError, Broken) as error:
        raise Mistake(str(error)) from error
    with unhurried(say):
        return _report(simulation, done, time.perf_counter() - began, say, stopped=stopped)


def _report(simulation: Simulation, done: Sequence[Done], wall: float, say: Say, *, stopped: bool) -> int:
    made = [(one, simulated) for one in done for simulated in one.made]
    runs = [_described(simulation, one, simulated) for one, simulated in made]
    problems = [simulated.problem for _, simulated in made if simulated.problem][:1]
    partial = stopped or bool(problems)

    def show(console: Console) -> None:
        if not runs:
            return
        tell = saying(console)
        console.print(table(runs, partial=partial))
        traced = simulation.scenario.arrivals == "trace"
        for line in () if partial else answers(done, traced=traced):
            tell(line, "bold")
        for line in (*(() if partial else transfers(done)), *bills(done)):
            tell(line)
        if any(one.capacity for one in done):
            tell(f"the rule: {RULE}")
        tell(speed(done, wall))

    problems += [f"{simulated.run.name}: a bug of ours: {what}" for _, simulated in made for what in simulated.left]
    if deliver(runs, simulation.out, partial=partial, problems=problems, show=show, say=say):
        return 2
    if stopped:
        return INTERRUPTED
    return 0 if _all_kept(done) else 1


def _all_kept(done: Sequence[Done]) -> bool:
    """Whether every policy keeps its SLO with one number of engines at least; of baselines and of the same engines with
    roles none is asked."""
    names: dict[str, bool] = {}
    for one in done:
        if one.cell.before == "gateway" and not one.cell.roles:
            name = one.cell.name.partition(", ")[0]
            names[name] = names.get(name, False) or kept(one)
    return all(names.values())


def _described(simulation: Simulation, one: Done, simulated: Simulated) -> Run:
    """The run, with what a reader needs in order to do it again. All but `wall` follows from that."""
    scenario = simulation.scenario
    simulated.run.meta = {
        **provenance(),
        "scenario": simulation.source,
        "what": scenario.what,
        "seed": scenario.seed,
        "policy": re.split("[ ,]", one.cell.name)[0] if one.cell.before in ("gateway", SPILL_ON_LOAD) else "",
        **({} if simulated.money is None else {MONEY: round(simulated.money, 4)}),
        "target": f"{one.cell.engines} x {simulation.profile}, {one.cell.before}, in virtual time",
        "calls": simulated.calls,
        "tries": simulated.tries,
        "virtual seconds": round(simulated.seconds, 3),
        "retries": scenario.retries,
        "timeout": scenario.timeout,
        "problem": simulated.problem,
        "wall": {
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(simulated.wall, 3),
            "cpu": round(simulated.cpu, 3),
            "memory": simulated.memory,
        },
    }
    return simulated.run


# -- while it runs ----------------------------------------------------------------------------------------------------


def _heard(simulation: Simulation, follow: Follow) -> Callable[[Progress], None]:
    """Hear the progress of all runs, each of which begins as it is heard of first."""
    runs: dict[str, tuple[Tell, float]] = {}

    def hear(progress: Progress) -> None:
        if progress.of not in runs:
            runs[progress.of] = follow(progress.of), time.monotonic()
        tell, began = runs[progress.of]
        tell(_share(simulation, progress), lambda: _said(simulation, progress, time.monotonic() - began))

    return hear


def _share(simulation: Simulation, progress: Progress) -> float:
    """Share of a run that is done: of its time, or of a trace's rows."""
    length = simulation.scenario.seconds
    of_time = progress.at / length if math.isfinite(length) else 0.0
    of_rows = progress.sent / simulation.rows if simulation.rows else 0.0
    return min(1.0, max(of_time, of_rows))


def _said(simulation: Simulation, progress: Progress, wall: float) -> str:
    """A run's state in one line."""
    done = _share(simulation, progress)
    left = f"{seconds(max(0.0, wall / done - wall))} left" if done > 0.01 else ""
    said = f"{seconds(progress.at)} simulated", f"{count(progress.sent)} calls", f"{count(progress.open)} open", left
    return "  ".join(part for part in said if part)
