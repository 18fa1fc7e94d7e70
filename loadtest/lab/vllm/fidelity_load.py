"""Loads of the fidelity figures: two of them, sent to a real engine, and simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import msgspec

from loadtest.engine.engine_config import engine_config
from loadtest.engine.latency import Profile
from loadtest.lab.vllm.real_vllm import MODEL
from loadtest.load.scenario import decode
from loadtest.processes import QUOTED, ChildError
from loadtest.report.records import RequestResult, Run, Window
from loadtest.report.summary import summarise
from loadtest.simulate.run import Cell, simulate

PLACES = 32  # sequences in the engine's batch
CLOSED = f"{{closed: {2 * PLACES}}}"  # as many as it can take
SATURATED, OPEN = 4.0, 6.0  # seconds of that load, and of the other
WARM = 1.0  # seconds of a run that are not counted
PATIENCE = 60.0  # seconds, for a sender
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


def measured(folder: Path, url: str, arrivals: str, seconds: float, seed: int) -> list[RequestResult]:
    """Send a load's requests and note their ends. Raises ChildError where one fails, or the sender does."""
    (folder / "load.yaml").write_text(WORKLOAD % (arrivals, seconds, seed, MODEL))
    out = folder / "measured"
    _run("bench", "--target", f"vllm={url}", "--scenario", str(folder / "load.yaml"), "--out", str(out), "--force")
    found = json.loads((out / "report.json").read_text())["runs"][0]["requests"]
    results = [RequestResult(**one | {"gaps": tuple(one["gaps"])}) for one in found]
    bad = [result for result in results if result.outcome != "ok"]
    if bad:
        raise ChildError(f"{len(bad)} of {len(results)} requests failed, the first: {bad[0].outcome} {bad[0].reason}")
    return sorted(results, key=lambda result: result.index)


def simulated(
    folder: Path, profile: Profile, sent: Sequence[RequestResult], arrivals: str, seconds: float
) -> list[RequestResult]:
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


def tokens(results: Sequence[RequestResult]) -> float:
    """Tokens a second that came after WARM and before the end."""
    times = (at for result in results for at in accumulate(result.gaps, initial=result.first_token))
    events = sum(WARM <= at < SATURATED for at in times)
    all_events = sum(len(result.gaps) + 1 for result in results)
    return events * sum(result.completion_tokens for result in results) / all_events / (SATURATED - WARM)


def latencies(sent: Sequence[RequestResult], played: Sequence[RequestResult]) -> dict[str, tuple[float, float]]:
    """Return latencies by name, measured and simulated, in seconds."""
    window = Window(duration=OPEN, warmup=WARM)
    real, ours = (summarise(Run(name="", rate=0.0, window=window, results=results)).total for results in (sent, played))
    return {
        f"{what} {quantile}": (getattr(getattr(real, what), quantile), getattr(getattr(ours, what), quantile))
        for quantile in ("p50", "p99")
        for what in ("ttft", "itl")
    }


def _run(command: str, *words: str) -> None:
    argv = [sys.executable, "-m", "gateway.cli", command, *words]
    with kept_off():
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode not in (0, 1):  # 1: a sender that was late, which the figures have in them
        raise ChildError(f"{command} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-QUOTED:]}")


@contextmanager
def kept_off() -> Iterator[None]:
    """Move this process, and who is started, off the core of the engine's worker."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
