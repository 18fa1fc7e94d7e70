"""Replay of recorded traffic, twenty times faster, on four simulated engines: client and gateway agree on every
request's end, and nothing is left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from loadtest.processes import Gateway, until
from tests.e2e.children import sockets

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

ROWS = 1000
ROOT = Path(__file__).parents[3]
TRACE = "azure_llm_2023_conv.csv"


@pytest.fixture(scope="module")
def trace() -> Path:
    folder = os.environ.get("WEIR_TRACES")
    path = Path(folder) / TRACE if folder else ROOT.parent / "shared" / "traces" / TRACE
    if not path.is_file():
        pytest.skip(f"no trace at {path}: set WEIR_TRACES to the folder that holds {TRACE}")
    return path


def test_every_request_of_a_trace_is_accounted_for(trace: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.csv"
    with trace.open() as lines:
        first.write_text("".join(islice(lines, 1 + ROWS)))
    with Gateway(tmp_path / "log", "--engine", "sim:4", "--log", str(tmp_path / "calls.jsonl")) as gateway:
        (model,) = {name for engine in gateway.fleet()["engines"] for name in engine["models"]}
        held = sockets(gateway.child.pid)
        argv = [sys.executable, "-m", "gateway.cli", "bench", "--trace", str(first), "--speed", "20", "--retries", "0"]
        argv += ["--target", f"weir={gateway.url}", "--metrics", f"weir={gateway.control}", "--model", model]
        argv += ["--out", str(tmp_path / "out"), "--drain", "2m"]
        ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert ran.returncode in (0, 1), ran.stdout + ran.stderr  # 1: a sender that a busy machine made late
        requests = json.loads((tmp_path / "out" / "report.json").read_text())["runs"][0]["requests"]
        outcomes = Counter(request["outcome"] for request in requests)
        assert outcomes.total() == ROWS
        assert outcomes["ok"] > ROWS // 4, "a fleet that refuses almost all of this proves little"
        broken = outcomes.keys() & {"bug", "truncated", "cut", "unanswered", "timed_out", "unfinished"}
        assert not broken, f"{outcomes}; the gateway says: {wrong(tmp_path / 'calls.jsonl')}"

        def counted() -> dict[str, float]:
            return {name: gateway.total("weir_requests_total", outcome=name) for name in outcomes}

        assert until(lambda: counted() == outcomes, 60.0) is not None, f"{counted()}, clients saw {outcomes}"
        assert gateway.total("weir_requests_total") == ROWS
        tokens = sum(request["completion_tokens"] for request in requests)
        assert gateway.total("weir_tokens_total", kind="completion") == tokens
        assert until(gateway.idle, 60.0) is not None
        assert gateway.total("weir_queued_calls") == gateway.total("weir_running_calls") == 0
        assert gateway.total("weir_connections") == 0
        # Beside those that were there before: idle engine connections, until they are closed unused.
        assert until(lambda: sockets(gateway.child.pid) <= held, 60.0) is not None
        assert "Traceback" not in gateway.child.output()
    lines = (tmp_path / "calls.jsonl").read_text().splitlines()
    assert len(lines) == ROWS
    assert {json.loads(line)["outcome"] for line in lines} == set(outcomes)


def wrong(log: Path) -> Counter[str]:
    """Count the reasons in the log of calls."""
    return Counter(call["reason"] for call in map(json.loads, log.read_text().splitlines()) if call["outcome"] != "ok")
