"""`gateway bench` as a process: its output, its files, its exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.load import scenario
from loadtest.load.slo import parse_slo
from loadtest.load.trace import REORDER
from loadtest.load.workload import Planned
from loadtest.processes import Child, until
from loadtest.report.capacity import Tried, search
from tests.loadtest.bench_servers import DONE, SSE, USAGE, WORD, always, chunk, plain, served, stream
from tests.serve.test_processes import runs
from tests.serve.test_upgrades import children_of

pytestmark = pytest.mark.slow

GOOD = stream(WORD, WORD, WORD, USAGE, DONE)
SHORT = ("--rate", "50/s", "--duration", "1s", "--warmup", "0s", "--retries", "0")


def bench(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", "bench", *argv], capture_output=True, text=True, timeout=240,
        env=os.environ | (env or {}), check=False,
    )  # fmt: skip


def fine(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether all was well, but for a machine that is too busy to send in time: that is not what is tested here."""
    return done.returncode == 0 or (done.returncode == 1 and "the sender was late" in done.stdout)


def report(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


def test_a_good_server_keeps_its_slo_and_a_bad_one_does_not(tmp_path: Path) -> None:
    with served(always(GOOD)) as good, served(always(plain(500, b"{}"))) as bad:
        targets = ("--target", f"good={good.address.name}", "--target", f"bad={bad.address.name}")
        done = bench(*targets, *SHORT)
        assert (done.returncode, "write http://HOST:PORT" in done.stderr) == (2, True)
        one = bench("--target", f"http://{good.address.name}/v1", *SHORT, "--slo", "ttft.p95<60s")
        assert fine(one), one.stdout + one.stderr
        out = tmp_path / "out"
        targets = ("--target", f"good=http://{good.address.name}", "--target", f"bad=http://{bad.address.name}")
        both = bench(*targets, *SHORT, "--slo", "ttft.p95<60s", "--repeat", "2", "--out", str(out))
        assert both.returncode == 1, both.stdout + both.stderr
        assert "bad: interactive: 0 of" in both.stdout
        assert "good, 2 of 2:" in both.stderr  # lines of progress, since it is no terminal
        found = report(out)
        assert [run["name"] for run in found["runs"]] == ["good", "bad"]
        assert not found["partial"]
        first, second = found["runs"]
        assert first["total"]["goodput"] == 1.0
        assert second["total"]["endings"] == [
            {"outcome": "upstream", "reason": "500", "count": second["total"]["offered"]}
        ]
        assert first["repeats"] == second["repeats"] == 2
        # The same requests, at the same times.
        times = [sorted((one["repeat"], one["index"], one["at"]) for one in run["requests"]) for run in found["runs"]]
        assert times[0] == times[1]
        again = bench(*targets, *SHORT, "--out", str(out))
        assert (again.returncode, "--force" in again.stderr) == (2, True)


def test_the_order_turns_round_with_each_repeat() -> None:
    with served(always(GOOD)) as server:
        names = ("a", "b")
        targets = [word for name in names for word in ("--target", f"{name}=http://{server.address.name}")]
        done = bench(*targets, "--rate", "20/s", "--duration", "0.6s", "--warmup", "0", "--repeat", "2")
    order = re.findall(r"^([ab]), ([12]) of 2: \d", done.stderr, re.MULTILINE)
    assert list(dict.fromkeys(order)) == [("a", "1"), ("b", "1"), ("b", "2"), ("a", "2")]


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_ctrl_c_reports_what_there_is(numbers: list[signal.Signals], tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [sys.executable, "-m", "gateway.cli", "bench", "--rate", "50/s", "--duration", "10m", "--warmup", "0"]
    with served(always(GOOD)) as server:
        argv += ["--target", f"a=http://{server.address.name}", "--target", f"b=http://{server.address.name}"]
        with Child("bench", [*argv, "--out", str(out)], tmp_path / "log") as child:
            # A connection gets another request once the answer before has been read.
            child.wait(lambda: len(server.bodies) - server.connections > 20, 60.0, "some answers")
            for number in numbers:
                os.kill(child.pid, number)
                time.sleep(0.03)  # people are not quicker
            # A second one that comes when all is done and Python ends: to a shell that is 130 too.
            late = -signal.SIGINT if len(numbers) > 1 else 130
            assert child.process.wait(60.0) in (130, late), child.output()
    assert "Traceback" not in child.output()
    assert "partial" in child.output()
    found = report(out)
    assert found["partial"]
    assert [run["name"] for run in found["runs"]] == ["a"]  # the other was not begun
    assert found["runs"][0]["total"]["ok"] > 10
    assert found["runs"][0]["window"]["duration"] < 30.0
    assert "broken off" in (out / "report.html").read_text()


def test_a_signal_while_engines_start_leaves_none_behind(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "gateway.cli", "bench", "--engines", "sim:2", "--rate", "5/s", "--duration", "10m"]
    with Child("bench", argv, tmp_path / "log") as child:
        child.wait(lambda: len(children_of(child.pid)) >= 2, 60.0, "its engines", every=0.002)
        children = children_of(child.pid)
        os.kill(child.pid, signal.SIGTERM)
        assert child.process.wait(60.0) == 130, child.output()
    assert until(lambda: not any(map(runs, children)), 60.0) is not None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_it_leaves_no_engine_behind(number: signal.Signals, status: int, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "gateway.cli", "bench", "--engines", "sim:2", "--rate", "5/s", "--duration", "10m"]
    own = os.environ | {"TMPDIR": str(tmp_path)}  # what is killed removes no folder
    with Child("bench", argv, tmp_path / "log", env=own) as child:
        child.says(" in flight")
        children = children_of(child.pid)
        assert len(children) == 3  # two engines and a gateway
        os.kill(child.pid, number)
        assert child.process.wait(60.0) == status, child.output()
    assert until(lambda: not any(map(runs, children)), 60.0) is not None


def test_the_gateway_on_simulated_engines_with_baselines(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = bench(
        *("--engines", "sim:2:h100-8b", "--compare", "direct,round_robin", "--scenario", "multi-turn", "--rate", "3/s"),
        *("--duration", "4s", "--warmup", "1s", "--slo", "e2e.p50<60s", "--drain", "20s", "--out", str(out)),
    )
    assert fine(done), done.stdout + done.stderr
    runs = {run["name"]: run for run in report(out)["runs"]}
    assert list(runs) == ["weir", "direct", "round_robin"]
    for run in runs.values():
        assert run["total"]["ok"] == run["total"]["offered"] > 0
        assert {sample["engine"] for sample in run["series"]} >= {"engine 0", "engine 1"}
    assert "" in {sample["engine"] for sample in runs["weir"]["series"]}  # the gateway's own queue


def test_it_names_the_only_model_a_target_has() -> None:
    models = plain(200, b'{"object":"list","data":[{"id":"theirs"}]}')

    async def answer(number: int, body: bytes, writer: Any) -> None:
        writer.write(GOOD if body else models)

    with served(answer) as server:
        done = bench("--target", f"a=http://{server.address.name}", *SHORT)
        assert fine(done), done.stdout + done.stderr
        assert "requests name its model, theirs" in done.stderr
        assert sum(b'"model":"theirs"' in body for body in server.bodies) > 20


def test_a_capacity_is_found() -> None:
    """Of a server that answers the first MANY requests of a run, whatever the time: each rate's verdict is known."""
    rate, many, share, seconds = 25.0, 40, 0.95, 1.0
    load = scenario.load(scenario.find("chat"))
    load = msgspec.structs.replace(load, duration=seconds, warmup=0.0, slo=parse_slo(f"goodput>={share}"))

    def at(rate: float) -> Iterator[Planned]:
        return scenario.planned(load.scaled(rate / load.rate))

    good = {planned.body for planned in islice(at(2 * many), many)}  # the same at any rate

    async def answer(number: int, body: bytes, writer: Any) -> None:
        writer.write(GOOD if not body or body in good else plain(500, b"{}"))

    def known(rate: float) -> Tried:
        sent = sum(1 for _ in at(rate))
        return Tried(rate, () if min(many, sent) >= share * sent else ("it cannot",), few="" if sent >= 20 else "few")

    with served(answer) as server:
        done = bench(
            *("--target", f"a=http://{server.address.name}", "--rate", f"{rate}/s", "--duration", f"{seconds}s"),
            *("--warmup", "0", "--retries", "0", "--slo", f"goodput>={share}", "--find-capacity"),
        )
    lines = re.findall(r"^a at ([0-9.]+)/s: (.*)$", done.stderr, re.MULTILINE)
    tried = {float(rate): verdict for rate, verdict in lines}  # the second, of one that was tried again
    capacity = search(rate, known)
    assert 0 < len(tried) <= len(capacity.tried)
    late = [rate for rate, verdict in tried.items() if "the sender was late" in verdict]
    for one in capacity.tried[: len(tried)]:
        verdict = tried[float(f"{one.rate:.4g}")]
        assert "the sender was late" in verdict or (verdict == "kept") is not bool(one.missed), (one, verdict)
    (said,) = re.findall(r"^a: capacity (.*)$", done.stdout, re.MULTILINE)
    if late:  # a machine that is too busy to send in time: then that is what ends the search
        assert said.endswith(f"(the sender cannot do {late[-1]:.3g}/s)")
    else:
        assert said.startswith(f"{capacity.kept:.3g}/s; at {capacity.missed:.3g}/s: ")


def test_a_trace_that_breaks_off_in_the_middle(tmp_path: Path) -> None:
    file, out = tmp_path / "t.csv", tmp_path / "out"
    times = [f"2023-11-16 18:15:{number / 1000:06.3f}" for number in range(REORDER + 100)]
    rows = "".join(f"{time},20,5\n" for time in times)
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}what\n")
    with served(always(GOOD)) as server:
        done = bench("--target", f"a=http://{server.address.name}", "--trace", str(file), "--out", str(out))
    assert done.returncode == 2
    assert f"{file}, line {REORDER + 102}: 1 columns, expected 3" in done.stderr
    found = report(out)
    assert found["partial"]
    assert found["runs"][0]["total"]["offered"] == 100
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n")  # found before anything is sent
    done = bench("--target", "http://127.0.0.1:9", "--trace", str(file))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{file}, line 2: TIMESTAMP is 'yesterday'" in done.stderr


def test_nothing_is_sent_where_one_target_is_not_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with served(always(GOOD)) as server:
        targets = ("--target", f"a=http://{server.address.name}", "--target", "b=http://127.0.0.1:9")
        done = bench(*targets, *SHORT, "--out", str(out))
        assert not any(server.bodies)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("\ngateway: b: nothing can be measured at 127.0.0.1:9: Connection refused\n")
    assert not list(out.iterdir())


def test_a_full_disk_behind_its_outputs_costs_neither_run_nor_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with served(always(GOOD)) as server, open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "gateway.cli", "bench", "--target", f"a=http://{server.address.name}", *SHORT]
        done = subprocess.run([*argv, "--out", str(out)], stdout=full, stderr=full, timeout=240, check=False)
    assert done.returncode == 2
    assert report(out)["runs"][0]["total"]["ok"] > 20


def test_on_a_terminal_there_is_a_bar() -> None:
    ours, theirs = pty.openpty()
    with served(always(GOOD)) as server:
        argv = [sys.executable, "-m", "gateway.cli", "bench", "--target", f"a=http://{server.address.name}", *SHORT]
        with subprocess.Popen(argv, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}) as process:
            os.close(theirs)
            said = b""
            while True:
                try:
                    said += os.read(ours, 65536)
                except OSError:  # its end, on Linux
                    break
            assert process.wait(60.0) in (0, 1), said
    os.close(ours)
    assert b"in flight" in said
    assert b"\x1b[" in said
    assert "goodput" in said.decode()


def test_a_stream_that_stalls_is_reported_as_such() -> None:
    with served(always(SSE + chunk(WORD))) as server:
        done = bench("--target", f"a=http://{server.address.name}", *SHORT, "--timeout", "200ms")
    assert done.returncode == 1
    assert "timed_out" in done.stdout
    assert "stalled within the answer" in " ".join(done.stdout.split())
