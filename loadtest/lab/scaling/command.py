"""Command `python -m loadtest.lab.scaling`: engine-hours and targets kept, by what decides how many engines there are.

Exit status 0: measured; 1: with `--gate` a target is missed; 2: bad arguments, or no trace.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import msgspec

from loadtest.clients.retries import Clients
from loadtest.engine.engine_config import engine_config
from loadtest.engine.latency import Profile
from loadtest.engine.profile_file import profile_of
from loadtest.lab.figures.runs import in_time
from loadtest.lab.rows import Row, bars, collect_seldom, percent, report, terminal
from loadtest.lab.scaling.pool import Pool, Scaler
from loadtest.lab.scaling.scalers import Oracle, QueueLength, Signal
from loadtest.load.plan import plan
from loadtest.load.trace import Arrival, TraceError, read
from loadtest.load.workload import Kind, Workload
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget, targets_of
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.simulation import SimulationRun

KEPT = 0.99  # of all calls are to be in time
OVER = 1.1  # times the oracle's engine-hours, at most
# That the oracle tries, the highest first.
LEVELS = (1.1, 1.05, 1.0, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
WARM = 120.0  # seconds at the start that are not counted: nobody has learned anything yet
SHIFT = 10.0  # seconds by which copies of a row are shifted at most
MIX = tuple(
    Kind(class_name=name, share=share, prompt="trace", output="trace", ignore_eos=True)
    for name, share in (("interactive", 0.5), ("default", 0.3), ("batch", 0.2))
)
HELP = """\
An autoscaler follows a signal. This replays a recorded hour through the whole gateway, in virtual time, and starts and
stops simulated engines by three of them:

  engines wanted     the gateway's weir_engines_wanted, as it is
  queue length > 5   ceil(waiting calls / 5), at least 1, no fewer than in the last five minutes: KEDA's way
  oracle             knows every call before it comes; the fewest engine-hours that keep the targets

All start with as many engines and decide every 15 s. An engine takes calls --start seconds after it was ordered, and is
paid for from the order to its last call. A call that is refused, or late for a target of its class, is not kept.

The trace is not part of this repository. Azure's of 2023, conversations:
  curl -LO https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_conv.csv
  make scaling SCALING="--trace AzureLLMInferenceTrace_conv.csv"
"""


class Kept(msgspec.Struct, frozen=True):
    """One run: the share of calls in time, engine-hours, most engines at once, what was left behind."""

    share: float
    hours: float
    highest: int
    left_over: list[str]


class ScalingSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs share. `arrivals`: the calls; `most`: engines at most; `start`: seconds until one takes calls."""

    arrivals: list[Arrival]
    profile: Profile
    most: int
    start: float
    policy: bytes
    seed: int


def run(setting: ScalingSetting, first: int, scaler_of: str, oracle: Oracle) -> Kept:
    """One run, with `first` engines at the start."""
    return vtime.run(_run(setting, first, scaler_of, oracle))


async def _run(setting: ScalingSetting, first: int, scaler_of: str, oracle: Oracle) -> Kept:
    engines = [
        MemoryEngine(engine_config(setting.profile, seed=setting.seed * 100 + number), seed=number)
        for number in range(setting.most)
    ]
    target = GatewayTarget(setting.policy, engines, seed=setting.seed)
    dispatch = target.gateway.dispatch
    scalers: dict[str, Scaler] = {"signal": Signal(dispatch, first), "queue": QueueLength(dispatch), "oracle": oracle}
    pool = Pool(target.gateway, scalers[scaler_of], first, setting.start)
    targets = targets_of(setting.policy)
    calls = plan(Workload(mix=MIX), setting.arrivals, setting.seed)
    patience = {name: each.deadline for name, each in targets.items()}
    simulation = SimulationRun(
        engines, target, calls, clients=Clients(retries=0, patience=patience), seed=setting.seed
    )  # fmt: skip
    result = await simulation.until(setting.arrivals[-1].at, grace=600.0)
    counted = [tried for tried in result.tries if tried.intended >= WARM]
    kept = sum(in_time(tried, targets) for tried in counted)
    return Kept(kept / max(1, len(counted)), pool.paid / 3600.0, pool.highest, target.left_over())


def arrivals_of(trace: Path, copies: int, seed: int, minutes: float) -> list[Arrival]:
    """The trace's rows, each `copies` times and a few seconds apart: the same hour of more users. Raises TraceError,
    OSError."""
    rng = random.Random(seed)  # noqa: S311 # a workload
    rows = [row for row in read(trace) if row.at <= minutes * 60.0]
    many = [
        msgspec.structs.replace(row, at=row.at + (rng.uniform(0.0, SHIFT) if copy else 0.0))
        for row in rows
        for copy in range(copies)
    ]
    return sorted(many, key=lambda row: row.at)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.scaling", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="recorded traffic; see above where to get it")
    parser.add_argument("--copies", type=int, default=4, help="times that each of its calls is sent (default: 4)")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the trace (default: 60)")
    parser.add_argument("--profile", default="a100-8b", help="of the engines (default: a100-8b)")
    parser.add_argument("--start", type=float, default=60.0, help="seconds that an engine's start takes (default: 60)")
    parser.add_argument("--policy", type=Path, help="a policy file; left out: the gateway's defaults")
    parser.add_argument("--seed", type=int, default=1, help="of traffic and engines (default: 1)")
    parser.add_argument("--gate", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(argv)
    if options.trace is None or not options.trace.is_file():
        where = "--trace is missing" if options.trace is None else f"--trace {options.trace}: there is no such file"
        parser.error(f"{where}; --help says where the recorded hour can be had")
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    try:
        policy = options.policy.read_bytes() if options.policy else b""
        profile = profile_of(options.profile)
        arrivals = arrivals_of(options.trace, options.copies, options.seed, options.minutes)
        targets_of(policy)
    except (OSError, ValueError, TraceError) as error:
        print(f"python -m loadtest.lab.scaling: {error}", file=sys.stderr)
        return 2
    collect_seldom()
    first = Oracle(arrivals, profile, options.start, 0.85).first
    most = 2 * max(Oracle(arrivals, profile, options.start, LEVELS[-1])(now) for now in range(0, 3600, 15))
    setting = ScalingSetting(
        arrivals=arrivals, profile=profile, most=most, start=options.start, policy=policy, seed=options.seed
    )  # fmt: skip
    console = terminal()
    with bars(console) as progress:
        signal = run(setting, first, "signal", Oracle(arrivals, profile, options.start, 1.0))
        progress("engines wanted", 1.0)
        queue = run(setting, first, "queue", Oracle(arrivals, profile, options.start, 1.0))
        progress("queue length", 1.0)
        for level in LEVELS:
            oracle = run(setting, first, "oracle", Oracle(arrivals, profile, options.start, level))
            progress(f"oracle, {level:.1%}", 1.0)
            if oracle.share >= KEPT:
                break
    best = f"oracle at {level:.1%}: {oracle.hours:.2f} h, {percent(oracle.share)} kept, {oracle.highest} at most"
    rows = [_row("engines wanted", signal, oracle, best), _row("queue length > 5", queue, oracle, best)]
    summary = f"{len(arrivals)} calls in {arrivals[-1].at / 60:.0f} minutes; an engine starts in {options.start:g} s"
    wrong = [left for each in (signal, queue, oracle) for left in each.left_over]
    return report(console, rows, summary, wrong=wrong, details=None, gate=options.gate and _missed(rows[0]))


def _row(name: str, kept: Kept, oracle: Kept, best: str) -> Row:
    over = kept.hours / oracle.hours
    met = kept.share >= KEPT and over <= OVER
    return Row(
        name=name,
        what="calls in time; engine-hours over the oracle's",
        value=f"{percent(kept.share)}; {over:.2f} ({kept.hours:.2f} h, {kept.highest} at most)",
        baseline=best,
        target=f">= {KEPT:.0%}; <= {OVER}",
        milestone=f">= {KEPT:.0%}; <= {OVER}",
        met=met if name == "engines wanted" else None,
    )


def _missed(row: Row) -> bool:
    return row.met is False
