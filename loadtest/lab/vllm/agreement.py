"""Agreement of the bench with vLLM's own, `vllm bench serve`: the same requests at the same times to one engine.

The table has the difference of the latencies that both report. `--help` tells more.

Exit status 0: within the bounds; 1: not; 2: bad arguments, there is no vLLM here, or a process did not end well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.lab.vllm.real_vllm import ENVIRONMENT, absent, model, venv
from loadtest.load.prompts import Text
from loadtest.load.trace import BLOCK
from loadtest.processes import QUOTED, Child, ChildError

BOUNDS = {"p50": 0.05, "p99": 0.10}  # shares of what vLLM's bench tells
LATENCIES = {"ttft": "ttft_from_send", "tpot": "tpot", "itl": "itl", "e2el": "e2e_from_send"}  # its name, and ours
PROMPT, ANSWER = (200, 2000), (40, 160)  # tokens, uniform; 1,100 on average, as in conversations
READY = 30.0  # seconds
# Its command line asks for the version of a package `vllm`, which on a CPU is called otherwise. And its traces are of
# tokens, which an engine reads more slowly than the text that we send: here they are of text.
THEIRS = """
import argparse
from vllm.benchmarks.datasets.datasets import TimedTrace
from vllm.benchmarks.serve import add_cli_args, main
TimedTrace._expand_prompt = lambda self, text, length, tokenizer: text
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
SCENARIO = """
version: 1
arrivals: trace
trace: {file: trace.jsonl, format: mooncake}
workload:
  mix: [{kind: completions, prompt: trace, output: trace, ignore_eos: true}]
retries: 0
"""
HELP = f"""\
Sends the same requests to a simulated engine with `vllm bench serve` and with `gateway bench`, in turns: Poisson
arrivals, prompts of {PROMPT[0]} to {PROMPT[1]} tokens, answers of {ANSWER[0]} to {ANSWER[1]}. Prints both clients' \
latencies, each counted
from when its client sent the request, as vLLM's does it. They may differ by {BOUNDS["p50"]:.0%} at p50 and \
{BOUNDS["p99"]:.0%} at p99, the
median over all rounds. "own" is how far the rounds of one client are apart: no difference below it means
anything.

Needs: `make vllm` once, and a machine that is otherwise idle.
"""


class LatencyQuantile(msgspec.Struct, frozen=True):
    """Quantile of a latency, in seconds, of each round."""

    latency: str
    quantile: str
    theirs: tuple[float, ...]
    ours: tuple[float, ...]

    @property
    def difference(self) -> float:
        """As a share of what vLLM's bench tells; above 0: ours is longer."""
        return median(self.ours) / median(self.theirs) - 1.0

    @property
    def own(self) -> float:
        """Distance between the rounds of a client, as a share; of the client where that is more."""
        return max((max(rounds) - min(rounds)) / median(rounds) for rounds in (self.theirs, self.ours))

    @property
    def good(self) -> bool:
        """Whether the difference is within the bound."""
        return abs(self.difference) <= BOUNDS[self.quantile]


def measure(
    folder: Path, *, seconds: float, rate: float, rounds: int, seed: int, console: Console
) -> list[LatencyQuantile]:
    """Run both, `rounds` times each. Raises ChildError where the engine does not come up or a client does not end well,
    TimeoutExpired where it does not end."""
    (folder / "trace.jsonl").write_text("".join(f"{row}\n" for row in trace(seconds, rate, seed)))
    (folder / "scenario.yaml").write_text(SCENARIO)
    engine = [sys.executable, "-m", "loadtest.engine", "--port", "0", "--model", "sim", "--no-enable-prefix-caching"]
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    with Child("engine", engine, folder / "engine.log") as child:
        url = child.line(r"^ready (http://\S+)", READY)
        for number in range(rounds):
            console.print(f"round {number + 1} of {rounds}: twice {seconds:.0f} s ...", highlight=False)
            if number % 2:  # what drifts with time falls on both alike
                ours = _ours(folder, url, seconds)
                found.append((_theirs(folder, url, seconds), ours))
            else:
                found.append((_theirs(folder, url, seconds), _ours(folder, url, seconds)))
    return [
        LatencyQuantile(
            latency, quantile, *(tuple(told[side][f"{latency} {quantile}"] for told in found) for side in (0, 1))
        )
        for latency in LATENCIES
        for quantile in BOUNDS
    ]


def trace(seconds: float, rate: float, seed: int) -> Iterator[str]:
    """Lines that both read, ours as one of Mooncake's, no two prompts alike."""
    rng = random.Random(seed)  # noqa: S311 # a load, no secret
    text, at, block = Text(rng), 0.0, 0
    while at < seconds:
        prompt = rng.randint(*PROMPT)
        blocks = list(range(block, block + -(-prompt // BLOCK)))
        block += len(blocks)
        row = {"timestamp": round(at * 1e3), "input_length": prompt, "output_length": rng.randint(*ANSWER)}
        yield json.dumps(row | {"hash_ids": blocks, "text": text.cut(prompt, rng).decode()})
        at += rng.expovariate(rate)


def _theirs(folder: Path, url: str, seconds: float) -> dict[str, float]:
    """Seconds by latency and quantile, as `vllm bench serve` tells."""
    result = folder / "theirs.json"
    argv = [
        str(venv() / "bin" / "python"), "-c", THEIRS,
        "--backend", "vllm", "--base-url", url, "--model", "sim", "--tokenizer", str(model()),
        "--dataset-name", "timed_trace", "--dataset-path", str(folder / "trace.jsonl"),
        "--timed-trace-sec-multiplier", "0.001", "--timed-trace-label-hash-ids", "text",
        "--num-prompts", "1000000", "--percentile-metrics", ",".join(LATENCIES), "--metric-percentiles", "50,99",
        "--save-result", "--result-dir", str(folder), "--result-filename", result.name, "--disable-tqdm",
    ]  # fmt: skip
    _run(folder / "theirs.log", seconds, argv)
    told = json.loads(result.read_text())
    return {f"{name} {quantile}": told[f"{quantile}_{name}_ms"] / 1e3 for name in LATENCIES for quantile in BOUNDS}


def _ours(folder: Path, url: str, seconds: float) -> dict[str, float]:
    """The same as `gateway bench` tells."""
    report = folder / "ours"
    scenario = str(folder / "scenario.yaml")
    argv = [sys.executable, "-m", "loadtest.bench", "--scenario", scenario, "--target", url]
    _run(folder / "ours.log", seconds, [*argv, "--out", str(report), "--force"], late=True)
    total = json.loads((report / "report.json").read_text())["runs"][0]["total"]
    return {f"{name} {quantile}": total[own][quantile] for name, own in LATENCIES.items() for quantile in BOUNDS}


def _run(log: Path, seconds: float, argv: Sequence[str], *, late: bool = False) -> None:
    """Run a client to its end. `late`: 1 is a good status too, a sender that was late: the figures are what they are,
    and vLLM's bench does not tell of its own lag."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | ENVIRONMENT
    with log.open("wb") as output:
        done = subprocess.run(argv, stdout=output, stderr=output, env=environment, timeout=seconds + 120, check=False)
    if done.returncode not in ((0, 1) if late else (0,)):
        said = log.read_text(errors="replace")[-QUOTED:]
        raise ChildError(f"the client {argv[0]} ended with status {done.returncode}; its last output:\n{said}")


def table_of(figures: Sequence[LatencyQuantile]) -> Table:
    """Table with a row for each figure, in milliseconds."""
    table = Table("", "vllm bench serve", "gateway bench", "difference", "own", "bound")
    for figure in figures:
        table.add_row(
            f"{figure.latency} {figure.quantile}",
            f"{median(figure.theirs) * 1e3:.2f} ms",
            f"{median(figure.ours) * 1e3:.2f} ms",
            f"{figure.difference:+.1%}",
            f"{figure.own:.1%}",
            f"{BOUNDS[figure.quantile]:.0%}" + ("" if figure.good else " MISSED"),
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.vllm.agreement",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of load in each round (default: 40)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="of each client (default: 3)")
    parser.add_argument("--seed", type=int, default=1, help="of the trace (default: 1)")
    given = parser.parse_args(argv)
    if given.seconds <= 0 or given.rate <= 0 or given.rounds < 1:
        parser.error("--seconds and --rate must be above 0, --rounds at least 1")
    reason = absent()
    if reason:
        print(f"loadtest.lab.vllm.agreement: {reason}", file=sys.stderr)
        return 2
    console = Console()
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        try:
            figures = measure(Path(folder), **vars(given), console=console)
        except (ChildError, subprocess.TimeoutExpired) as error:
            print(f"loadtest.lab.vllm.agreement: {error}", file=sys.stderr)
            return 2
    console.print(table_of(figures))
    return 0 if all(figure.good for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
