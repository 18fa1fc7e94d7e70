"""Value of predicted lengths: recorded traffic in virtual time, by what was learned and by what an oracle knows.

    python -m loadtest.lab.figures.prediction FILE...

FILE is a recorded trace (Azure's CSV, BurstGPT's CSV, Mooncake's JSONL), and not part of this repository; without one
WEIR_TRACES names the folder whose traces are all run. Azure's of 2023, conversations:

    curl -LO https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_conv.csv

The whole gateway runs before one simulated engine, at a speed of the trace that offers `--load` times the tokens that
the engine carries. The engine gives each answer the length that was recorded. The gateway is told that every call asks
for ASKED tokens. All calls are of one tenant and one class; of a Mooncake trace those whose prompts continue each other
are of one session. The rows:

    class           today's quantile, by model, class and max_tokens; order by deadline
    learned         lengths.learned
    oracle's order  the recorded length of each call orders it; what it books, and its predicted end, are learned
    oracle          the recorded length in place of all that was learned: it also books no token too many
    oracle, noise   the same, with the length of another call in place of 60 % of them

Mean latency counts from the sending to the last token, of all calls after the warm-up; nobody is refused. Goodput is
from a second run with a deadline of DEADLINE seconds and the gateway's predictions: tokens of the calls in time over
all that were offered. Exit status 0: measured; 1: with --gate, a target is missed, or something was left over; 2: bad
arguments, or no trace.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from gateway.core.lengths import LengthForecast, LengthModel
from gateway.core.request.call import Call
from gateway.core.request.cost import CostModel
from loadtest.clients.retries import Clients
from loadtest.lab.figures.runs import an_engine, tokens
from loadtest.lab.rows import Row, collect_seldom, percent, report, terminal
from loadtest.load.plan import plan
from loadtest.load.trace import Arrival, TraceError, read
from loadtest.load.workload import Kind, Planned, Workload
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget
from loadtest.simulate.run_records import RunResult
from loadtest.simulate.simulation import SimulationRun

ASKED = 2048  # tokens
CARRIED = 9250.0  # tokens a second of the engine at its best, prompt and output (docs/figures.md)
DEADLINE = 30.0  # seconds
WARM = 60.0  # seconds
GRACE = 1200.0  # seconds for what is under way at the end
NOISE = 0.6
WORSE = 1.10  # times the mean latency by the oracle's order, at most
KIND = Kind(class_name="default", prompt="trace", output="trace", ignore_eos=True)
MODES = "modes: {tight: {enter: {}, leave: {}}, brownout: {enter: {}, leave: {}}, closed: {enter: {}, leave: {}}}"
PATIENT = "classes: {default: {deadline: 1h, max_queue: 100000}}\ndeadlines: {predict: false, shed_late: false}"
STRICT = f"classes: {{default: {{deadline: {DEADLINE:g}s, max_queue: 100000}}}}"
ARMS = ("class", "learned", "oracle's order", "oracle", "oracle, noise")


class LengthOracle:
    """In the place of a LengthModel: the lengths of calls, by their ids."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}

    def predict(self, call: Call) -> LengthForecast | None:
        length = float(self.lengths[call.request_id])
        return length, length, length

    def learn(self, call: Call, tokens: float) -> None:
        """It knows."""


class Estimates:
    """The gateway's cost model, to which every call asks for ASKED tokens. An arm with an oracle tells it what each
    call will get: itself, or for NOISE of all calls the length of another."""

    def __init__(self, cost: CostModel, arm: str, lengths: list[int]) -> None:
        self._cost = cost
        self._orders = arm == "oracle's order"
        self._oracle = LengthOracle() if arm in ("oracle", "oracle, noise") else None
        self._noise = NOISE if arm == "oracle, noise" else 0.0
        self._lengths = lengths
        self._rng = random.Random(1)  # noqa: S311 # a simulation
        self.estimate_prompt = cost.estimate_prompt
        self.learn = cost.learn
        if self._oracle is not None:
            cost.lengths = cast("LengthModel", self._oracle)

    def estimate_output(self, call: Call, context: int | None) -> None:
        real = call.max_tokens or 1
        if self._oracle is not None:
            noisy = self._rng.random() < self._noise
            self._oracle.lengths[call.request_id] = self._rng.choice(self._lengths) if noisy else real
        call.max_tokens = ASKED
        self._cost.estimate_output(call, context)
        if self._orders:
            call.likely_tokens = real


def run(rows: list[Arrival], arm: str, policy: str, seed: int, left_over: list[str]) -> RunResult:
    """One run of the trace."""

    async def main() -> RunResult:
        engines = [an_engine(seed)]
        learned = f"lengths: {{learned: {'false' if arm == 'class' else 'true'}}}"
        target = GatewayTarget(f"{policy}\n{MODES}\nshaping: []\n{learned}\n".encode(), engines, seed=seed)
        decider = target.gateway.decider
        lengths = [max(1, row.output_tokens) for row in rows]
        decider.cost = cast("CostModel", Estimates(decider.cost, arm, lengths))
        calls = of_sessions(rows, plan(Workload(mix=(KIND,)), rows, seed))
        simulation = SimulationRun(engines, target, calls, clients=Clients(retries=0), seed=seed)
        result = await simulation.until(rows[-1].at, grace=GRACE)
        left_over.extend(target.left_over())
        return result

    return vtime.run(main())


def of_sessions(rows: list[Arrival], calls: object) -> list[Planned]:
    """The calls, with a session's name where a prompt continues an earlier one: its own last block, or that before it,
    was seen."""
    found, seen = [], dict[int, int]()
    for number, (row, call) in enumerate(zip(rows, cast("list[Planned]", calls), strict=True)):
        if row.blocks:
            known = (seen[block] for block in reversed(row.blocks[1:]) if block in seen)
            session = next(known, number)
            seen.update(dict.fromkeys(row.blocks[1:], session))
            call.fields = call.fields | {b"x-weir-session": b"%d" % session}
        found.append(call)
    return found


def rows_of(trace: Path, load: float, seconds: float) -> list[Arrival]:
    """The beginning of the trace, as fast as offers `load` times what the engine carries for `seconds`, without answers
    longer than ASKED. Raises TraceError, OSError."""
    rows, work = [], 0.0
    for row in read(trace):
        if not 0 < row.output_tokens <= ASKED or not 0 < row.prompt_tokens <= 16_384:
            continue
        rows.append(row)
        work += row.prompt_tokens + row.output_tokens
        if work > load * CARRIED * seconds:
            break
    lasts = work / load / CARRIED
    if lasts <= WARM or not rows[-1].at:
        raise TraceError(f"{trace}: its usable rows last {lasts:.0f} s at this load, expected more than {WARM:g} s")
    faster = rows[-1].at / lasts
    return [msgspec.structs.replace(row, at=row.at / faster) for row in rows]


def measured(trace: Path, load: float, seconds: float, seed: int, progress: Callable[[str], None],
             left_over: list[str]) -> list[Row]:  # fmt: skip
    """The rows of one trace."""
    rows = rows_of(trace, load, seconds)
    offered = sum(row.prompt_tokens + row.output_tokens for row in rows if row.at >= WARM)
    latency, goodput = {}, {}
    for arm in ARMS:
        progress(f"{trace.stem}, {arm}")
        tries = [each for each in run(rows, arm, PATIENT, seed, left_over).tries if each.intended >= WARM]
        wrong = [each for each in tries if each.outcome != "ok"]
        left_over += [f"{trace.stem}, {arm}: {len(wrong)} calls were not answered"] if wrong else []
        done = [each.finished - each.sent for each in tries if each.outcome == "ok"]
        latency[arm] = sum(done) / len(done)
        tries = run(rows, arm, STRICT, seed, left_over).tries
        good = [each for each in tries if each.outcome == "ok" and each.finished - each.sent <= DEADLINE]
        goodput[arm] = sum(tokens(each) for each in good if each.intended >= WARM) / offered
    what = f"{len(rows)} calls in {rows[-1].at:.0f} s: mean latency; over the oracle's order, the oracle's; goodput"
    bounds = {"learned": f"<= {WORSE:g} x the oracle's order", "oracle, noise": "goodput >= class"}
    met = {
        "learned": latency["learned"] <= WORSE * latency["oracle's order"],
        "oracle, noise": goodput["oracle, noise"] >= goodput["class"],
    }
    return [
        Row(
            name=f"{trace.stem}: {arm}",
            what=what,
            value=f"{latency[arm]:.2f} s; "
            + ", ".join(f"{latency[arm] / latency[best]:.3f}" for best in ("oracle's order", "oracle"))
            + f"; {percent(goodput[arm])}",
            baseline=f"class: {latency['class']:.2f} s; {percent(goodput['class'])}",
            target=bounds.get(arm, ""),
            milestone=bounds.get(arm, ""),
            met=met.get(arm),
        )
        for arm in ARMS
    ]


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.figures.prediction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="*", type=Path, metavar="FILE", help="recorded traffic; see above")
    parser.add_argument("--load", type=float, default=0.8, help="tokens offered over tokens carried (default: 0.8)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of traffic (default: 600)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, engine and gateway (default: 1)")
    parser.add_argument("--gate", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(argv)
    folder = os.environ.get("WEIR_TRACES", "")
    if not options.traces and folder:
        options.traces = sorted(each for each in Path(folder).iterdir() if each.suffix in (".csv", ".jsonl"))
    if not options.traces:
        parser.error("no trace: name a file, or a folder in WEIR_TRACES; --help says where one can be had")
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    collect_seldom()
    left_over: list[str] = []
    rows: list[Row] = []
    try:
        for trace in options.traces:
            told = measured(trace, options.load, options.seconds, options.seed,
                            lambda what: print(what, file=sys.stderr), left_over)  # fmt: skip
            rows += told
    except (OSError, TraceError) as error:
        print(f"python -m loadtest.lab.figures.prediction: {error}", file=sys.stderr)
        return 2
    summary = f"load {options.load:g}, {options.seconds:g} s, {WARM:g} s of them not counted"
    return report(terminal(), rows, summary, wrong=left_over, details=None, gate=options.gate)


if __name__ == "__main__":
    sys.exit(main())
