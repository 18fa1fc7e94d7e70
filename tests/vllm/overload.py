"""Overload of one real vLLM on CPU that has few places: people and batch work at twice what the engine can do, directly
and through Weir. `python -m pytest -s tests/vllm/test_compare.py` prints the figures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from loadtest.bench.fleet import fronted
from loadtest.lab.rivals.loads import RivalLoad
from loadtest.lab.rivals.runs import DRAIN, WEIR, sent
from loadtest.load.arrivals import Arrivals, Closed
from loadtest.load.lengths import Length
from loadtest.load.scenario import Scenario
from loadtest.load.slo import parse_slo
from loadtest.load.workload import Kind, Workload
from loadtest.processes import free_port, get, until
from loadtest.report.records import Run
from loadtest.report.summary import summarise
from tests.vllm.real_vllm import MODEL, Vllm

SATURATED = 15.0  # seconds in which the capacity is measured
POLICY = Path(__file__).parents[2] / "policies" / "one-engine.yaml"
ENGINE = "http://127.0.0.1:8100"  # the engine in that file; the one that is started has another port
PLACES = 8  # sequences in the batch of that engine
FLAGS = ("--max-num-seqs", str(PLACES), "--no-enable-prefix-caching", "--enable-prompt-tokens-details",
         "--uvicorn-log-level", "warning")  # fmt: skip
LOAD = RivalLoad(  # no two prompts begin alike
    scenario=Scenario(
        retries=0, timeout=90.0, slo=parse_slo("interactive.ttft.p97<1s,batch.e2e.p50<30s"),
        workload=Workload(model=MODEL, mix=(
            Kind(class_name="interactive", prompt=Length(constant=20), output=Length(constant=32), ignore_eos=True),
            Kind(class_name="batch", prompt=Length(constant=500), output=Length(constant=128), ignore_eos=True),
        )),
    ),
    share=2.0,
)  # fmt: skip


def engine(folder: Path) -> Vllm:
    """Start the engine; `with` ends it. Raises ChildError."""
    return Vllm(folder / "vllm.log", free_port(), *FLAGS)


def overload(vllm: Vllm, seconds: float, folder: Path) -> Scenario:
    """Return what is sent to the engine, whose capacity is measured first."""
    closed = Arrivals(closed=Closed(clients=2 * PLACES))
    scenario = msgspec.structs.replace(LOAD.scenario, arrivals=closed, duration=SATURATED, warmup=3.0, slo=())
    run, _ = measure(vllm, "direct", scenario, folder)
    return LOAD.at(summarise(run).total.ok_rate, seconds)


def measure(vllm: Vllm, rival: str, scenario: Scenario, folder: Path) -> tuple[Run, float]:
    """Return the run, and the hits by the engine's own counters. The engine comes to rest before, and forgets what it
    has cached. Raises ChildError."""
    if until(lambda: vllm.running() + vllm.waiting() == 0, DRAIN, every=0.2) is None:
        raise vllm.child.failure("did not come to rest")
    get(f"{vllm.url}/reset_prefix_cache", method="POST", timeout=30.0)
    policy = folder / "policy.yaml"
    policy.write_text(POLICY.read_text().replace(ENGINE, vllm.url))
    before = "gateway" if rival == WEIR else rival
    with fronted([vllm.url], rival, before=before, policy=policy, folder=folder) as target, _ahead():
        return sent(target, scenario, [vllm.url])


@contextmanager
def _ahead() -> Iterator[None]:
    """Run the sender before the servers where that is allowed: it shares their cores, and must keep its times."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)
