"""`gateway simulate`: one seed is one report, and memory does not grow with the load."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.cli import main
from loadtest.engine.engine_config import engine_config
from loadtest.engine.profile_file import profiles
from loadtest.load.prompts import body_of, message
from loadtest.load.scenario import Scenario, decode, of_trace
from loadtest.load.trace import REORDER
from loadtest.processes import until
from loadtest.report.sketch import Sketch
from loadtest.report.stats import latency_of
from loadtest.simulate import vtime
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.options import about
from loadtest.simulate.run import Cell, Progress, Simulated, simulate
from loadtest.simulate.step_times import Pace

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

EVERY_KIND = b"""
version: 1
arrivals: {poisson: 20/s}
duration: 3s
workload:
  tenants: {acme: {}, bolt: {}}
  mix:
    - {kind: chat, class: interactive, output: 32, prefix: {tokens: 64, count: 2},
       session: {turns: 3, think: 500ms}}
    - {kind: chat, output: 16, stream: false}
    - {kind: completions, output: 32}
    - {kind: embeddings, class: batch, inputs: 3, prompt: 20}
    - {kind: rerank, inputs: 4, prompt: 20}
"""
POLICY = b"version: 1\ntenants: {acme: {weight: 3}, bolt: {}}\nclasses: {interactive: {}, default: {}, batch: {}}\n"


def cell(scenario: Scenario, *, before: str = "gateway", engines: int = 2, policy: bytes = b"", **more: Any) -> Cell:
    config = engine_config(profiles()["h100-8b"])
    return Cell(
        name="x", before=before, policy=policy, engines=engines, config=config, scenario=scenario, folder=Path(), **more
    )


def trace(folder: Path, rows: int, bad: str = "") -> Path:
    """So many rows of Azure's form, 20 a second."""
    lines = [f"2023-11-16 18:{row // 1200:02}:{row // 20 % 60:02}.{row % 20 * 5:02},{100 + row % 50},{2 + row % 20}\n"
             for row in range(rows)]  # fmt: skip
    file = folder / "week.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines) + bad)
    return file


def report(folder: Path) -> Any:
    return msgspec.json.decode((folder / "report.json").read_bytes())


# -- one run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["gateway", "round_robin", "direct"])
def test_every_kind_of_request_is_answered_and_told_with_its_latencies(before: str) -> None:
    made = simulate(cell(decode(EVERY_KIND), before=before, policy=POLICY, requests=True))
    results = list(made.run.results)
    assert {result.outcome for result in results} == {"ok"}
    assert (made.calls, made.left, made.problem) == (len(results), [], "")
    assert {result.kind for result in results} == {"chat", "completions", "embeddings", "rerank"}
    assert {result.tenant for result in results} == {"acme", "bolt"}
    assert any(result.cached_tokens >= 64 for result in results), "the second turn repeats the first"
    for result in results:
        assert result.prompt_tokens > 0
        streamed = result.first_token > 0.0
        assert len(result.gaps) == max(0, result.completion_tokens - 1) * streamed
        latency = latency_of(result, result.at)
        assert 0.0 < latency.ttft <= latency.e2e
        assert result.at + latency.e2e == pytest.approx(result.finished, abs=1e-9), "the gaps fill the stream"
    assert {result.kind for result in results if result.first_token} == {"chat", "completions"}
    said_of_steps(made)


def test_what_is_preempted_has_the_gap_it_waited() -> None:
    config = engine_config(profiles()["h100-8b"], num_gpu_blocks=130, max_model_len=2048)
    scenario = decode(b"""{version: 1, duration: 2s, arrivals: {constant: 4/s},
        workload: {mix: [{prompt: 256, output: 200, ignore_eos: true}]}}""")
    crowded = msgspec.structs.replace(cell(scenario, before="direct", engines=1, requests=True), config=config)
    made = simulate(crowded)
    results = list(made.run.results)
    assert all(len(result.gaps) == result.completion_tokens - 1 == 199 for result in results)
    assert max(max(result.gaps) for result in results) > 0.1, "one waited for another to end"
    for result in results:
        assert result.first_token + sum(result.gaps) == pytest.approx(result.finished, abs=1e-9)
    said_of_steps(made)


def said_of_steps(made: Simulated) -> None:
    """The latencies that were counted by steps are those of the requests."""
    classes = made.run.tallies[0].classes
    assert any(part.itl for part in classes.values())
    for name, part in classes.items():
        gaps = Sketch(gap for result in made.run.results if result.class_name == name for gap in result.gaps)
        if not gaps:  # nothing of it was streamed
            assert not part.itl
            continue
        assert len(part.itl) == len(gaps)
        assert part.itl.quantiles([0.0, 0.1, 0.5, 0.9, 1.0]) == pytest.approx(gaps.quantiles([0.0, 0.1, 0.5, 0.9, 1.0]))


def test_a_trace_goes_to_its_end_and_a_bad_row_ends_it_there(tmp_path: Path) -> None:
    file = trace(tmp_path, REORDER + 100, bad="yesterday,1,2\n")
    made = simulate(cell(of_trace(str(file), speed=10.0)))
    assert made.problem.startswith(f"{file}, line {REORDER + 102}: ")
    assert made.calls == sum(part.ok for part in made.run.tallies[0].classes.values()) == 100
    whole = simulate(cell(of_trace(str(trace(tmp_path, 100)), speed=2.0)))
    assert (whole.problem, whole.calls) == ("", 100)
    assert whole.run.rate == pytest.approx(40.0, rel=0.02)
    assert about(file) == pytest.approx(100, rel=0.05)


def test_somebody_can_stop_it_and_what_is_open_counts_as_interrupted() -> None:
    scenario = decode(b"{version: 1, duration: 1h, arrivals: {poisson: 20/s}, workload: {mix: [{output: 512}]}}")
    made = simulate(cell(scenario, requests=True), lambda progress: progress.at > 5.0)
    assert made.stopped
    assert 5.0 < made.run.window.duration < 600.0
    assert {"ok", "interrupted"} == {result.outcome for result in made.run.results}


def test_a_long_series_is_thinned_evenly() -> None:
    scenario = decode(b"{version: 1, duration: 1h, arrivals: {constant: 2/min}, workload: {mix: [{output: 2}]}}")
    made = simulate(cell(scenario, before="direct", engines=19))
    moments = sorted({sample.at for sample in made.run.series})
    assert len(made.run.series) <= 20_000
    assert 500 <= len(moments) <= 1000
    assert {round(b - a, 6) for a, b in pairwise(moments)} == {4.0}


class Heard:
    """Who takes an answer, and when."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None:
        self.at.append(asyncio.get_running_loop().time())

    def data(self, data: bytes) -> None:
        self.at.append(asyncio.get_running_loop().time())

    def end(self) -> None:
        """As above."""

    def failed(self, kind: str, message: str) -> None:
        self.at.append(-1.0)


def test_steps_that_are_foreseen_are_those_that_would_be_made() -> None:
    """An engine that makes every step by itself, since it is a trifle slow, and one that looks ahead."""

    async def played(slow: float) -> tuple[list[float], list[tuple[float, int, int]], int]:
        loop, rng = asyncio.get_running_loop(), random.Random(7)
        gaps: list[float] = []
        config = engine_config(profiles()["h100-8b"], num_gpu_blocks=130, max_model_len=2048, seed=3)
        engine = MemoryEngine(config, pace=Pace(lambda taker, found: gaps.extend(found)))
        engine.slow = slow
        takers = [Heard() for _ in range(60)]
        seen: list[tuple[float, int, int]] = []
        for number, taker in enumerate(takers):
            body = body_of(message(b"user", b"word" * rng.randrange(1, 200)), rng.randrange(2, 300), ignore_eos=True)
            leave = functools.partial(engine.post, b"/v1/chat/completions", body, taker)
            at, stays = rng.random() * 20.0, rng.random()
            if number % 4:
                loop.call_at(at, leave)
            else:  # goes away again
                loop.call_at(at, lambda leave=leave, stays=stays: loop.call_later(stays, leave()))
            loop.call_at(rng.random() * 25.0, lambda: seen.append(engine.reading()))
        await asyncio.sleep(120.0)
        assert engine.reading() == (0.0, 0, 0)
        times = [time for taker in takers for time in taker.at]
        return times + gaps, seen, engine.engine.stats.generation_tokens

    times, seen, tokens = vtime.run(played(1.0))
    slow_times, slow_seen, slow_tokens = vtime.run(played(1.0 + 1e-12))
    assert (seen, tokens) == (slow_seen, slow_tokens)
    assert times == pytest.approx(slow_times, abs=1e-8)
    assert len(times) > 1000


# -- the command ------------------------------------------------------------------------------------------------------


def test_mistakes_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("version: 1\nclases: {}\n")
    locked = tmp_path / "locked.yaml"
    locked.write_text("version: 1\ntenants: {acme: {}}\n")
    for flags, expected in {
        ("--policy", str(policy)): f"{policy}:2: found unknown field 'clases'",
        ("--policy", str(locked)): "no tenant in particular",
        ("--policy", "/nowhere.yaml"): "--policy /nowhere.yaml: No such file",
        ("--trace", "/nowhere.csv"): "there is no such file",
        ("--find-capacity", "--scenario", str(tmp_path / "s.yaml")): "neither a file nor",
        ("--max-model-len", "500000"): "the KV cache holds",
        ("--slo", "nobody.ttft.p99<1s"): "slo: the class nobody, expected a class of the mix",
    }.items():
        assert main(["simulate", *flags]) == 2
        said = capsys.readouterr().err
        assert expected in said
        assert said.count("\n") == 1
    for flag, value in (("--engines", "0"), ("--engines", "4,x"), ("--profile", "abacus"), ("--slo", "fast")):
        with pytest.raises(SystemExit) as ended:
            main(["simulate", flag, value])
        assert ended.value.code == 2
        assert flag in capsys.readouterr().err


def test_how_many_engines_are_needed_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["simulate", "--trace", str(trace(tmp_path, 200)), "--jobs", "1", "--speed", "20"]
    assert main([*flags, "--engines", "1,2", "--slo", "e2e.p99<1s"]) == 0
    assert re.search(r"weir: 1 engine is enough for the SLO at 40\d/s", capsys.readouterr().out)
    assert main([*flags, "--slo", "e2e.p99<1ms"]) == 1, "nothing keeps this"
    assert "weir: 4 engines do not keep the SLO" in capsys.readouterr().out


def test_whether_prefill_elsewhere_pays_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a gateway's own log, of streams among which long prompts come: every stall of theirs breaks the SLO."""
    calls = [(at / 10, 200, 300) for at in range(300)] + [(3.0 + 2.0 * at, 18_000, 20) for at in range(12)]
    log, policy = tmp_path / "calls.jsonl", tmp_path / "now.yaml"
    lines = [
        f'{{"event":"call","ts":{1.8e9 + at + 9},"total":9,"prompt_tokens":{prompt},"completion_tokens":{answer}}}\n'
        for at, prompt, answer in calls
    ]
    log.write_text("".join(lines))
    policy.write_text("classes: {default: {tpot: 20ms}}\n")
    flags = ["simulate", "--policy", str(policy), "--trace", str(log), "--profile", "a100-8b", "--jobs", "1"]
    flags += ["--prefill", "1", "--engines"]
    made = tmp_path / "made"
    assert main([*flags, "2", "--slo", "default.tpot.p99<25ms", "--out", str(made)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    found = re.search(r"now prefill 1: reading prompts elsewhere pays: in time ([\d.]+)% of the calls, ([\d.]+)%", out)
    assert found is not None, out
    assert float(found[1]) > float(found[2])
    assert [run["meta"]["policy"] for run in report(made)["runs"]] == ["now", "now"]
    log.write_text("".join(lines[:300]))  # one engine cannot write them all at five times the speed
    assert main([*flags, "2", "--slo", "default.ttft.p99<1s", "--speed", "5"]) == 0, "of the split none is asked"
    assert "now prefill 1: 2 engines do not keep the SLO" in " ".join(capsys.readouterr().out.split())
    assert main([*flags, "1"]) == 2
    assert "expected fewer than the 1 engines" in capsys.readouterr().err


PAID = """
storage: kept
models: {either: {members: [sim], fallback: [outside]}}
providers:
  cloud: {url: https://api.example.com/v1, key_file: cloud.key, models: {outside: small}, prices: 0.15/0.60,
          budget: [1000000/day], tenants: [anonymous], classes: [interactive]}
"""
OVERLOAD = """
version: 1
arrivals: {poisson: 60/s}
duration: 20s
workload: {model: either, mix: [{class: interactive, prompt: 2000, output: 64}]}
slo: [interactive.ttft.p99<2s]
"""


def test_money_is_told_and_drawn_beside_spilling_on_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, scenario, out = tmp_path / "paid.yaml", tmp_path / "s.yaml", tmp_path / "out"
    policy.write_text(PAID)
    scenario.write_text(OVERLOAD)
    flags = ["simulate", "--scenario", str(scenario), "--profile", "a100-8b", "--engines", "1", "--jobs", "1"]
    assert main([*flags, "--compare", "spill_on_load"]) == 2
    assert "no policy has providers" in capsys.readouterr().err
    flags += ["--policy", str(policy), "--compare", "spill_on_load", "--out", str(out)]
    main(flags)
    said = capsys.readouterr().out.replace("\n", " ")
    told = re.findall(r"(paid(?: by load)?): ([0-9.]+) an hour at providers, \S+ tokens in all; ([0-9.]+) % of", said)
    assert [name for name, _, _ in told] == ["paid", "paid by load"]
    late, load = (float(money) for _, money, _ in told)
    assert 0.0 < late < load, "calls that would be in time have left the house"
    assert [run["meta"]["policy"] for run in report(out)["runs"]] == ["paid", "paid"]
    page = (out / "report.html").read_text()
    drawn = page[page.index("<h2>Over money</h2>") :]
    assert "<title>calls that met their SLO</title>" in drawn
    assert re.search(r"<desc>paid: \S+ % at \S+ an hour\. paid by load: \S+ % at \S+ an hour</desc>", drawn)
    scenario.write_text(OVERLOAD.partition("slo:")[0])
    main([*flags, "--force"])
    said = " ".join(capsys.readouterr().out.split())
    assert (said.count(" % of the calls answered"), said.count("in time")) == (2, 0), "there is no SLO"
    assert "Over money" not in (out / "report.html").read_text()


# -- slow -------------------------------------------------------------------------------------------------------------


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "gateway.cli", "simulate", *flags]


def ended(group: int) -> bool:
    """Whether a process group is empty; what multiprocessing keeps its accounts with ends a little later."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_the_same_seed_is_the_same_report_to_the_byte(tmp_path: Path) -> None:
    """In processes with different hash seeds, at once or one after the other."""
    policy = tmp_path / "mine.yaml"
    policy.write_bytes(POLICY)
    load = tmp_path / "load.yaml"
    load.write_bytes(EVERY_KIND)
    seen = []
    for number, jobs in enumerate(("1", "2")):
        out = tmp_path / f"out{number}"
        flags = ("--scenario", str(load), "--policy", str(policy), "--engines", "1,2", "--compare", "round_robin")
        ended = subprocess.run(
            command(*flags, "--rate", "200/s", "--jobs", jobs, "--requests", "--out", str(out)),
            env=os.environ | {"PYTHONHASHSEED": str(number)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        text = (out / "report.json").read_text()
        text = re.sub(r'"wall":\{[^}]*\}', "", text)
        seen.append(re.sub(r'"command":"[^"]*"', "", text))
        made = report(out)
        assert [run["name"] for run in made["runs"]] == [
            "mine, 1 engine", "mine, 2 engines", "round_robin, 1 engine", "round_robin, 2 engines"
        ]  # fmt: skip
        assert all(run["kept"] > 500 for run in made["runs"])
    assert seen[0] == seen[1]


def test_the_highest_rate_that_keeps_the_slo_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    flags = [
        "--duration",
        "20s",
        "--warmup",
        "5s",
        "--engines",
        "1,2",
        "--slo",
        "ttft.p95<60ms",
        "--find-capacity",
        "--rate",
        "20/s",
    ]
    assert main(["simulate", *flags, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    found = [float(rate) for rate in re.findall(r"weir, \d engines?: ([\d.]+)/s; at ", said)]
    assert len(found) == 2
    assert found[1] > 1.5 * found[0], "two engines take about twice as much, or more: queues are shorter"
    assert re.search(r"weir: 20/s needs \d engines?", said)
    assert len({run["rate"] for run in report(out)["runs"]}) > 4


@pytest.mark.parametrize(
    ("engines", "runs"),
    [(["2"], 1), (["2,4"], 2), (["2", "--prefill", "1"], 2)],
    ids=["alone", "at once", "beside a split"],
)
def test_ctrl_c_leaves_a_report_marked_partial_and_no_process(tmp_path: Path, engines: list[str], runs: int) -> None:
    out = tmp_path / "out"
    flags = ("--duration", "10h", "--engines", *engines, "--jobs", "2", "--out", str(out))
    with subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            assert "simulated" in process.stderr.readline()
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: all of them hear it
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "partial: the run was broken off" in said
    assert "elsewhere" not in said, "two runs that ended at different moments are compared"
    made = report(out)
    assert made["partial"] is True
    assert len(made["runs"]) == runs
    assert all(0.0 < run["window"]["duration"] < 36_000.0 for run in made["runs"])
    assert ended(process.pid), "no process of its group is left"


def test_ctrl_c_before_a_simulation_has_begun_is_answered_by_that_simulation_too(tmp_path: Path) -> None:
    """A process that still imports its modules takes the signal afterwards."""
    out = tmp_path / "out"
    flags = ("--duration", "10h", "--engines", "2,4", "--jobs", "2", "--out", str(out))
    with subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:  # fmt: skip
        try:
            assert until(lambda: len(spawned(process.pid)) == 2, 60.0) is not None
            os.killpg(process.pid, signal.SIGINT)
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert len(report(out)["runs"]) == 2, said


def spawned(parent: int) -> list[int]:
    """Ids of the simulations that a process has started."""
    children = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("which", [0, -1])
def test_a_process_that_is_killed_ends_the_others(which: int) -> None:
    with subprocess.Popen(command("--duration", "10h", "--engines", "2,4", "--jobs", "2"), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, start_new_session=True) as process:  # fmt: skip
        try:
            assert until(lambda: len(spawned(process.pid)) == 2, 60.0) is not None
            os.kill(spawned(process.pid)[which], signal.SIGKILL)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 2, errors
    assert "gateway: " in errors.splitlines()[-1]
    assert ended(process.pid), "no process of its group is left"


def test_one_that_is_killed_takes_its_processes_along() -> None:
    with subprocess.Popen(command("--duration", "10h", "--engines", "2,4", "--jobs", "2"), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, start_new_session=True) as process:  # fmt: skip
        assert process.stderr is not None
        assert "simulated" in process.stderr.readline()
        process.kill()
        assert "Traceback" not in process.communicate(timeout=60)[1]
    assert ended(process.pid), "no process of its group is left"


def test_memory_does_not_grow_with_a_trace(tmp_path: Path) -> None:
    """Four times the rows in the memory of the first: sketches and the engines' caches are full by then."""
    pages: list[tuple[int, int]] = []

    def tell(progress: Progress) -> bool:
        pages.append((progress.sent, int(Path("/proc/self/statm").read_text().split()[1])))
        return False

    file = tmp_path / "week.csv"
    with file.open("w") as rows:
        rows.write("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n")
        rows.writelines(f"{row / 1000:.3f},m,40,2,42,c\n" for row in range(36_000))
    small = msgspec.structs.replace(
        cell(of_trace(str(file))), config=engine_config(profiles()["h100-8b"], num_gpu_blocks=1024)
    )
    made: Simulated = simulate(small, tell)
    assert made.calls == 36_000
    early = max(size for sent, size in pages if sent < 9000)
    late = max(size for _, size in pages)
    assert (late - early) * 4096 < 7_200_000, (early, late)
