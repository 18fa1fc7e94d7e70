"""Recorded traffic, twenty times faster, through a gateway on four simulated engines: every request ends in a way that
its client and the gateway agree on, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.processes import Gateway, until

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

ROWS = 2000
ROOT = Path(__file__).parents[2]
TRACE = "azure_llm_2023_conv.csv"


@pytest.fixture(scope="module")
def trace() -> Path:
    folder = os.environ.get("WEIR_TRACES")
    path = Path(folder) / TRACE if folder else ROOT.parent / "shared" / "traces" / TRACE
    if not path.is_file():
        pytest.skip(f"no trace at {path}: set WEIR_TRACES to the folder that holds {TRACE}")
    return path


@pytest.mark.timeout(300)
def test_every_request_of_a_trace_is_accounted_for(trace: Path, tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    with Gateway(tmp_path / "log", "--engine", "sim:4", "--log", str(tmp_path / "calls.jsonl")) as gateway:
        (model,) = {name for engine in gateway.fleet()["engines"] for name in engine["models"]}
        sockets = gateway.child.sockets()
        argv = [sys.executable, "-m", "loadtest.replay", "--trace", str(trace), "--rows", str(ROWS), "--speed", "20"]
        argv += ["--target", gateway.url, "--control", gateway.control, "--model", model, "--json", str(report_path)]
        ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        print(ran.stdout)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        report = json.loads(report_path.read_text())
        assert sum(report["outcomes"].values()) == ROWS
        assert report["gateway"] == report["outcomes"]
        assert report["unaccounted"] == []
        assert report["outcomes"]["ok"] > ROWS // 2, "a fleet that refuses most of this proves little"
        assert not report["outcomes"].keys() & {"bug", "truncated", "cut", "unanswered", "timed_out"}
        assert gateway.total("weir_tokens_total", kind="completion") == report["completion_tokens"]
        assert until(gateway.idle, 5.0) is not None
        assert gateway.total("weir_queued_calls") == gateway.total("weir_running_calls") == 0
        assert gateway.total("weir_connections") == 0
        # Beside those that were there before: idle engine connections, until they are closed unused.
        assert until(lambda: gateway.child.sockets() <= sockets, 15.0) is not None
        assert "Traceback" not in gateway.child.output()
    lines = (tmp_path / "calls.jsonl").read_text().splitlines()
    assert len(lines) == ROWS
    assert {json.loads(line)["outcome"] for line in lines} == set(report["outcomes"])
