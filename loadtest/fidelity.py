"""How far the simulated engine is from a real one: calibrated on it, and then asked for another load. `--help` tells.

Exit status 0: within the bounds; 1: not; 2: bad arguments, there is no vLLM here, or a process did not end well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.engine.engine import engine_config
from loadtest.engine.latency import Profile
from loadtest.engine.profile_file import profile_of
from loadtest.processes import QUOTED, ChildError
from loadtest.real_vllm import MODEL, Vllm, absent, free_port
from loadtest.records import Result, Run, Window
from loadtest.scenario import decode
from loadtest.simulate_run import Cell, simulate
from loadtest.summary import summarise

PLACES = 32  # sequences in the engine's batch
# About 20 million parameters in place of the tiny model's 200,000: steps of some milliseconds, as a GPU's are. What is
# in the weights does not matter.
LARGER = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "layer_types": ["full_attention"] * 6,
}  # fmt: skip
# Every round sends the same requests, which must not be found in the cache.
FLAGS = (
    *("--max-num-seqs", str(PLACES), "--no-enable-prefix-caching", "--uvicorn-log-level", "warning"),
    *("--load-format", "dummy", "--hf-overrides", json.dumps(LARGER)),
)
BUDGET = 25.0  # seconds of calibration
SATURATED, OPEN = 10.0, 20.0  # seconds of load
WARM = 2.0  # seconds of a run that are not counted
LONGEST = "512"  # tokens of a prompt, about, in the load that is measured
LOAD = 0.35  # of what the engine can do: a machine that is twice as slow for a while must not make it a queue
BOUNDS = {"throughput": 0.10, "p50": 0.15, "p99": 0.30}
WORKLOAD = """\
version: 1
arrivals: %s
duration: %gs
seed: %d
retries: 0
workload:
  model: %s
  mix:
    - {class: interactive, share: 3, kind: completions, prompt: {log_normal: {median: 30, sigma: 0.7}, most: 300},
       output: {uniform: {from: 8, to: 48}}, ignore_eos: true}
    - {class: batch, kind: completions, prompt: {uniform: {from: 60, to: 240}}, output: {empirical: [16, 64, 128]},
       ignore_eos: true}
"""
REPLAYED = """\
version: 1
arrivals: %s
trace: trace.csv
duration: %gs
retries: 0
workload:
  mix: [{kind: completions, prompt: trace, output: trace, ignore_eos: true}]
"""


HELP = f"""\
Starts a real vLLM on this machine's CPU, fits a latency profile to it (gateway calibrate), sends it a load that nothing
was fitted to, and simulates that load with the profile: the same requests, as long, at the same times. First as much as
the engine can take, for its throughput, then {LOAD:.0%} of that, Poisson, for its latencies; all of it in each round.

May differ: throughput by {BOUNDS["throughput"]:.0%}, TTFT and ITL by {BOUNDS["p50"]:.0%} at p50 and \
{BOUNDS["p99"]:.0%} at p99, the median over all rounds. "own" is how far
rounds are apart, of what was measured or of what was simulated: no difference below it means anything.

Needs: `make vllm` once, and a machine that is otherwise idle: the engine, its server and who measures share its cores.
"""


class Figure(msgspec.Struct, frozen=True):
    """One figure of each round, measured and simulated; latencies in seconds. `bound`: what it may be off by."""

    what: str
    measured: tuple[float, ...]
    simulated: tuple[float, ...]
    bound: float

    @property
    def error(self) -> float:
        """Of the simulated, as a share of the measured: the median over rounds."""
        return median(ours / real - 1.0 for real, ours in zip(self.measured, self.simulated, strict=True))

    @property
    def own(self) -> float:
        """How far apart rounds are, as a share: of the same engine, under the same load; of the side where it is more,
        for a calibration measures too."""
        return max((max(rounds) - min(rounds)) / median(rounds) for rounds in (self.measured, self.simulated))

    @property
    def good(self) -> bool:
        """Whether the error is within the bound."""
        return abs(self.error) <= self.bound


def measure(folder: Path, url: str, *, rounds: int, seed: int, console: Console) -> list[Figure]:
    """Calibrate, load and simulate, `rounds` times. Raises ChildError where a command does not end well."""
    found: dict[str, list[tuple[float, float]]] = {}
    rate = 0.0
    for number in range(rounds):
        console.print(f"round {number + 1} of {rounds}: {BUDGET + SATURATED + OPEN:.0f} s ...", highlight=False)
        profile = calibrate(folder, url, console)
        closed = f"{{closed: {2 * PLACES}}}"
        sent = _measured(folder, url, closed, SATURATED, seed)
        rate = rate or LOAD * sum(WARM <= result.finished < SATURATED for result in sent) / (SATURATED - WARM)
        played = _simulated(folder, profile, sent, closed, SATURATED)
        found.setdefault("throughput", []).append((_tokens(sent), _tokens(played)))
        sent = _measured(folder, url, f"{{poisson: {rate:.2f}/s}}", OPEN, seed + 1)
        played = _simulated(folder, profile, sent, "trace", OPEN)
        for name, real, ours in _latencies(sent, played):
            found.setdefault(name, []).append((real, ours))
    return [
        Figure(name, tuple(real for real, _ in pairs), tuple(ours for _, ours in pairs), BOUNDS[name.split()[-1]])
        for name, pairs in found.items()
    ]


def calibrate(folder: Path, url: str, console: Console) -> Profile:
    """The profile that is fitted to the engine there. Raises ChildError."""
    out = folder / "profile.yaml"
    console.print(
        _run(
            "calibrate", "--target", url, "--out", str(out), "--force", "--budget", f"{BUDGET:g}s", "--longest", LONGEST
        )
    )
    return profile_of(str(out))


def _measured(folder: Path, url: str, arrivals: str, seconds: float, seed: int) -> list[Result]:
    (folder / "load.yaml").write_text(WORKLOAD % (arrivals, seconds, seed, MODEL))
    out = folder / "measured"
    _run("bench", "--target", f"vllm={url}", "--scenario", str(folder / "load.yaml"), "--out", str(out), "--force")
    found = json.loads((out / "report.json").read_text())["runs"][0]["requests"]
    results = [Result(**one | {"gaps": tuple(one["gaps"])}) for one in found]
    bad = [result for result in results if result.outcome != "ok"]
    if bad:
        raise ChildError(f"{len(bad)} of {len(results)} requests failed, the first: {bad[0].outcome} {bad[0].reason}")
    return sorted(results, key=lambda result: result.index)


def _simulated(folder: Path, profile: Profile, sent: Sequence[Result], arrivals: str, seconds: float) -> list[Result]:
    """The same requests, at the same times where they had times, as long as the engine's tokenizer counted them."""
    if arrivals != "trace":
        sent = [*sent, *sent]  # one that is faster than the real one gets to more of them
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for number, result in enumerate(sent):
        at = result.at if arrivals == "trace" else 0.001 * number
        stamp = f"2026-01-01 00:{int(at // 60):02d}:{at % 60:09.6f}"
        lines.append(f"{stamp},{result.prompt_tokens},{result.completion_tokens}")
    (folder / "trace.csv").write_text("\n".join(lines) + "\n")
    scenario = decode((REPLAYED % (arrivals, seconds)).encode())
    cell = Cell(
        name="simulated", before="direct", policy=b"", engines=1, config=engine_config(profile), scenario=scenario,
        folder=folder, requests=True,
    )  # fmt: skip
    results = simulate(cell).run.results
    return [msgspec.structs.replace(result, gaps=tuple(result.gaps)) for result in results]


def _tokens(results: Sequence[Result]) -> float:
    """Tokens a second that came after WARM and before the end."""
    times = (at for result in results for at in accumulate(result.gaps, initial=result.first_token))
    events = sum(WARM <= at < SATURATED for at in times)
    all_events = sum(len(result.gaps) + 1 for result in results)
    return events * sum(result.completion_tokens for result in results) / all_events / (SATURATED - WARM)


def _latencies(sent: Sequence[Result], played: Sequence[Result]) -> Iterator[tuple[str, float, float]]:
    window = Window(duration=OPEN, warmup=WARM)
    real, ours = (summarise(Run(name="", rate=0.0, window=window, results=results)).total for results in (sent, played))
    for quantile in ("p50", "p99"):
        yield f"ttft {quantile}", getattr(real.ttft, quantile), getattr(ours.ttft, quantile)
        yield f"itl {quantile}", getattr(real.itl, quantile), getattr(ours.itl, quantile)


def _run(command: str, *words: str) -> str:
    """Run a command of the load test to its end, on the cores that the engine's worker does not have; what it said."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)  # for who is started
    try:
        argv = [sys.executable, "-m", f"loadtest.{command}", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=BUDGET + 120.0, check=False)
    finally:
        os.sched_setaffinity(0, cores)
    if done.returncode not in (0, 1):  # 1: a sender that was late, which the figures have in them
        raise ChildError(f"{command} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-QUOTED:]}")
    return done.stdout


def table_of(figures: Sequence[Figure]) -> Table:
    """One row for each figure."""
    table = Table("", "measured", "simulated", "error", "bound", "own")
    for figure in figures:
        scale, unit = (1.0, " tokens/s") if figure.what == "throughput" else (1e3, " ms")
        table.add_row(
            figure.what,
            *(f"{median(values) * scale:.1f}{unit}" for values in (figure.measured, figure.simulated)),
            f"{figure.error:+.1%}",
            f"{figure.bound:.0%}" + ("" if figure.good else " MISSED"),
            f"{figure.own:.1%}",
        )
    return table


def engine(folder: Path) -> Vllm:
    """The vLLM that is measured. Raises ChildError where it does not come up."""
    return Vllm(folder / "vllm.log", free_port(), *FLAGS, apart=True)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.fidelity", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is done (3)")
    parser.add_argument("--seed", type=int, default=1, help="of the load (1)")
    given = parser.parse_args(argv)
    reason = absent()
    if given.rounds < 1 or reason:
        print(f"loadtest.fidelity: {reason or '--rounds must be at least 1'}", file=sys.stderr)
        return 2
    console = Console(width=120)
    try:
        with tempfile.TemporaryDirectory(prefix="fidelity-") as folder, engine(Path(folder)) as vllm:
            figures = measure(Path(folder), vllm.url, rounds=given.rounds, seed=given.seed, console=console)
    except (ChildError, subprocess.TimeoutExpired) as error:
        print(f"loadtest.fidelity: {error}", file=sys.stderr)
        return 2
    console.print(table_of(figures))
    return 0 if all(figure.good for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
