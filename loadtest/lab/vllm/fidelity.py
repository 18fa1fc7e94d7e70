"""Fidelity of the simulated engine: calibrated on a real one, then compared under another load. `--help` tells.

Exit status 0: within the bounds; 1: not; 2: bad arguments, there is no vLLM here, or a process did not end well.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest.calibrate.command import add_arguments, observe, profile_from
from loadtest.calibrate.fit import Unfit, fit
from loadtest.calibrate.fit_table import table
from loadtest.calibrate.live_engine import CalibrateError
from loadtest.calibrate.observations import EngineLimits, Observed
from loadtest.engine.latency import Profile
from loadtest.lab.rows import parser_of
from loadtest.lab.vllm.fidelity_load import (
    CLOSED,
    OPEN,
    PLACES,
    SATURATED,
    kept_off,
    latencies,
    measured,
    simulated,
    tokens,
)
from loadtest.lab.vllm.real_vllm import Vllm, absent
from loadtest.processes import ChildError, free_port
from loadtest.report.records import RequestResult

# About 20 million parameters in place of the tiny model's 200,000: steps of some milliseconds, as a GPU's are. What is
# in the weights does not matter.
LARGER = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "layer_types": ["full_attention"] * 6,
}  # fmt: skip
# A lap's simulation has no cache: nothing may be found in the engine's.
FLAGS = (
    *("--max-num-seqs", str(PLACES), "--no-enable-prefix-caching", "--uvicorn-log-level", "warning"),
    *("--load-format", "dummy", "--hf-overrides", json.dumps(LARGER)),
)
# Of one lap. Laps are short, as such a machine is half as fast again for some seconds, and then not, whatever runs on
# it: what is calibrated and what is measured must have the same share of both.
BUDGET = 10.0  # seconds of calibration, about
LAP = 30.0  # seconds, with what starting the senders takes
LONGEST = "512"  # tokens of a prompt, about, in the load that is measured
LAPS = 10
LOAD = 0.35  # of what the engine can do: a machine that is twice as slow for a while must not make it a queue
BOUNDS = {"throughput": 0.10, "p50": 0.15, "p99": 0.30}
HELP = f"""\
Starts a real vLLM on this machine's CPU, and then, lap after lap: looks at it as `gateway calibrate` does, for
{BUDGET:.0f} s; sends it as much as it can take, for its throughput; and then {LOAD:.0%} of that, Poisson, for its
latencies. What was seen in all laps is fitted to one profile, and with this both loads are simulated, to which nothing
was fitted: the same requests, as long, at the same times.

May differ: throughput by {BOUNDS["throughput"]:.0%}, TTFT and ITL by {BOUNDS["p50"]:.0%} at p50 and \
{BOUNDS["p99"]:.0%} at p99. "+-" is one standard error of that, by how far the laps differ.

Needs: `make vllm` once, and a machine that is otherwise idle: the engine, its server and who measures share its cores.
"""


class FidelityFigure(msgspec.Struct, frozen=True):
    """Figure of all laps, measured and simulated, latencies in seconds. `ratios`: simulated over measured, in each lap.
    `bound`: largest error allowed, as a share."""

    what: str
    measured: float
    simulated: float
    ratios: tuple[float, ...]
    bound: float

    @property
    def error(self) -> float:
        """Error of the simulated figure, as a share of the measured figure."""
        return self.simulated / self.measured - 1.0

    @property
    def own(self) -> float:
        """The standard error of that."""
        return stdev(map(math.log, self.ratios)) / math.sqrt(len(self.ratios))

    @property
    def good(self) -> bool:
        """Whether the error is within the bound."""
        return abs(self.error) <= self.bound


class Lap(msgspec.Struct, frozen=True):
    """Observations of the engine, and results of the requests of both loads."""

    observed: Observed
    saturated: list[RequestResult]
    open: list[RequestResult]


def measure(folder: Path, url: str, *, laps: int, seed: int, console: Console) -> list[FidelityFigure]:
    """Calibrate and load, `laps` times, at least twice; then simulate. Raises ChildError where a command does not end
    well, CalibrateError and Unfit."""
    done: list[Lap] = []
    rate = 0.0
    for number in range(laps):
        console.print(f"lap {number + 1} of {laps}: {LAP:.0f} s ...", highlight=False)
        observed = observe_in(url, done[0].observed.limits if done else None)
        saturated = measured(folder, url, CLOSED, SATURATED, laps * seed + number)
        rate = rate or LOAD * len(saturated) / max(one.finished for one in saturated)
        opened = measured(folder, url, f"{{poisson: {rate:.2f}/s}}", OPEN, laps * (seed + 1) + number)
        done.append(Lap(observed, saturated, opened))
    observed = pooled([lap.observed for lap in done])
    fitted = fit(observed.rows)
    profile = profile_from(fitted, observed)
    console.print(table(fitted, profile))
    return compared(folder, profile, done)


def observe_in(url: str, limits: EngineLimits | None) -> Observed:
    """Calibrate in one lap, on the cores that the engine's worker does not have. Raises CalibrateError."""
    words = ["--target", url, "--out", "none", "--budget", f"{BUDGET:g}s", "--longest", LONGEST]
    if limits:
        words += ["--max-num-seqs", str(limits.max_num_seqs)]
        words += ["--max-num-batched-tokens", str(limits.max_num_batched_tokens)]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with kept_off():
        _, observed = uvloop.run(observe(parser.parse_args(words), lambda done, what: None))
    return observed


def pooled(laps: Sequence[Observed]) -> Observed:
    """All laps as one."""
    return Observed(
        rows=[row for lap in laps for row in lap.rows], jitter=median(lap.jitter for lap in laps),
        limits=laps[0].limits, bursts=[one for lap in laps for one in lap.bursts],
        traffic=[one for lap in laps for one in lap.traffic], notes=[],
    )  # fmt: skip


def compared(folder: Path, profile: Profile, laps: Sequence[Lap]) -> list[FidelityFigure]:
    """The figures of the laps, and of their simulation."""
    rates, real, ours = [], [], []
    for lap in laps:
        played = simulated(folder, profile, lap.saturated, CLOSED, SATURATED)
        rates.append((tokens(lap.saturated), tokens(played)))
        real.append(lap.open)
        ours.append(simulated(folder, profile, lap.open, "trace", OPEN))
    ratios = tuple(made / seen for seen, made in rates)
    seen, made = (fmean(side) for side in zip(*rates, strict=True))
    figures = [FidelityFigure("throughput", seen, made, ratios, BOUNDS["throughput"])]
    each = [latencies(*pair) for pair in zip(real, ours, strict=True)]
    for name, (seen, made) in latencies(*([one for lap in side for one in lap] for side in (real, ours))).items():
        ratios = tuple(made / seen for seen, made in (lap[name] for lap in each) if seen)  # none: no call in that lap
        figures.append(FidelityFigure(name, seen, made, ratios, BOUNDS[name.split()[-1]]))
    return figures


def table_of(figures: Sequence[FidelityFigure]) -> Table:
    """Table with a row for each figure."""
    made = Table("", "measured", "simulated", "error", "+-", "bound")
    for figure in figures:
        scale, unit = (1.0, " tokens/s") if figure.what == "throughput" else (1e3, " ms")
        made.add_row(
            figure.what,
            *(f"{value * scale:.1f}{unit}" for value in (figure.measured, figure.simulated)),
            f"{figure.error:+.1%}",
            f"{figure.own:.1%}",
            f"{figure.bound:.0%}" + ("" if figure.good else " MISSED"),
        )
    return made


def engine(folder: Path) -> Vllm:
    """The vLLM that is measured. Raises ChildError where it does not come up."""
    return Vllm(folder / "vllm.log", free_port(), *FLAGS, apart=True)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = parser_of("vllm.fidelity", HELP)
    parser.add_argument("--laps", type=int, default=LAPS, help=f"how often everything is done ({LAPS})")
    parser.add_argument("--seed", type=int, default=1, help="of the load (1)")
    given = parser.parse_args(argv)
    reason = absent()
    if given.laps < 2 or reason:
        print(f"loadtest.lab.vllm.fidelity: {reason or '--laps must be at least 2'}", file=sys.stderr)
        return 2
    console = Console(width=120)
    try:
        with tempfile.TemporaryDirectory(prefix="fidelity-") as folder, engine(Path(folder)) as vllm:
            figures = measure(Path(folder), vllm.url, laps=given.laps, seed=given.seed, console=console)
    except (ChildError, CalibrateError, Unfit, subprocess.TimeoutExpired) as error:
        print(f"loadtest.lab.vllm.fidelity: {error}", file=sys.stderr)
        return 2
    console.print(table_of(figures))
    return 0 if all(figure.good for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
