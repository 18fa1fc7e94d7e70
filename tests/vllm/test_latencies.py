"""Latencies of the report against vLLM's own benchmark: its formulas on the same requests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from loadtest.report.records import Run, Slo, Window
from loadtest.report.summary import summarise
from tests.loadtest.made_runs import a_run
from tests.vllm import install
from tests.vllm.real_vllm import ENVIRONMENT, venv

pytestmark = pytest.mark.vllm
THEIRS = """
import json, sys
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics
outputs = [RequestFuncOutput(**output) for output in json.load(sys.stdin)]
requests = [None] * len(outputs)
found, _ = calculate_metrics(requests, outputs, 100.0, None, [50.0, 90.0, 99.0], {"ttft": 150.0, "tpot": 20.0})
figures = {name: getattr(found, name) for name in found.__dataclass_fields__ if name.endswith("_ms")}
print(json.dumps(figures | {"completed": found.completed, "goodput": found.request_goodput}, default=float))
"""


def outputs_of(run: Run) -> list[dict[str, object]]:
    """What vLLM's client would have written down."""
    return [
        {
            "success": result.outcome == "ok",
            "start_time": result.sent,
            "ttft": result.first_token - result.sent,
            "itl": list(result.gaps),
            "latency": result.first_token + sum(result.gaps) - result.sent,
            "output_tokens": result.completion_tokens,
            "prompt_len": result.prompt_tokens,
        }
        for result in run.results
    ]


@pytest.fixture(autouse=True)
def installed() -> None:
    reason = install.missing()
    if reason:
        if os.environ.get("WEIR_REQUIRE_VLLM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


def test_the_figures_are_those_of_vllms_own_benchmark(tmp_path: Path) -> None:
    run = a_run("weir", 5.0, refused=0.1)
    theirs = subprocess.run(
        [venv() / "bin" / "python", "-c", THEIRS], input=json.dumps(outputs_of(run)), capture_output=True, text=True,
        timeout=500, check=True, cwd=tmp_path, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    found = json.loads(theirs.stdout.splitlines()[-1])
    run.window = Window(duration=120.0)
    own = summarise(run).total
    assert own.ok == found["completed"]
    pairs = {"ttft": own.ttft_from_send, "tpot": own.tpot, "itl": own.itl, "e2el": own.e2e_from_send}
    for name, distribution in pairs.items():
        percentiles = dict(found[f"percentiles_{name}_ms"])
        ours = [
            distribution.mean,
            distribution.std,
            distribution.p50,
            distribution.p50,
            distribution.p90,
            distribution.p99,
        ]
        expected = [found[f"mean_{name}_ms"], found[f"std_{name}_ms"], found[f"median_{name}_ms"],
                    percentiles[50.0], percentiles[90.0], percentiles[99.0]]  # fmt: skip
        assert [1e3 * value for value in ours] == pytest.approx(expected, rel=1e-9), name

    for result in run.results:  # vLLM's goodput counts from the send time
        result.at = result.sent
    run.slos, run.tallies = [Slo(ttft=0.15, tpot=0.02)], ()
    assert summarise(run).total.met == pytest.approx(found["goodput"] * 100.0)
