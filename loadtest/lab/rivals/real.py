"""Loads of real vLLM on CPU, behind Weir, its rivals or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from loadtest.bench.fleet import fronted
from loadtest.lab.rivals.loads import Goal, RivalLoad
from loadtest.lab.rivals.runs import DRAIN, WEIR, sent
from loadtest.lab.vllm.real_vllm import MODEL, Vllm
from loadtest.load.arrivals import Arrivals, Closed
from loadtest.load.lengths import Length
from loadtest.load.scenario import Scenario
from loadtest.load.slo import parse_slo
from loadtest.load.workload import Kind, Sessions, Workload
from loadtest.processes import free_port, get, until
from loadtest.report.records import Run
from loadtest.report.summary import summarise

STARTS = 600.0  # seconds for an engine to start on a busy machine
FLAGS = ("--enable-prompt-tokens-details", "--uvicorn-log-level", "warning")
SATURATED = 15.0  # seconds in which the capacity is measured
POLICY = Path(__file__).parents[3] / "policies" / "one-engine.yaml"
ENGINE = "http://127.0.0.1:8100"  # the engine in that file; the one that is started has another port
PLACES = 8  # sequences in the batch of that engine


class RealLoad(msgspec.Struct, frozen=True):
    """Load on `engines` vLLM with these flags. `policy`: Weir's, None: none. The share of the load is of the most
    calls a second that `clients` closed-loop clients are answered."""

    load: RivalLoad
    engines: int
    flags: tuple[str, ...]
    policy: Path | None = None
    clients: int = 0

    @contextmanager
    def running(self, folder: Path) -> Iterator[list[Vllm]]:
        """Engines of this load. Raises ChildError."""
        with ExitStack() as stack:
            logs = [folder / f"vllm-{number}.log" for number in range(self.engines)]
            flags = (*self.flags, *FLAGS)
            yield [stack.enter_context(Vllm(log, free_port(), *flags, timeout=STARTS)) for log in logs]

    def scenario(self, engines: Sequence[Vllm], seconds: float, folder: Path) -> Scenario:
        """Return what is sent to these engines, whose capacity is measured if the load is a share of it."""
        if self.load.share is None:
            return self.load.scenario
        closed = Arrivals(closed=Closed(clients=self.clients))
        scenario = msgspec.structs.replace(self.load.scenario, arrivals=closed, duration=SATURATED, warmup=3.0, slo=())
        run, _ = self.measure(engines, "direct", scenario, folder)
        return self.load.at(summarise(run).total.ok_rate, seconds)

    def measure(self, engines: Sequence[Vllm], rival: str, scenario: Scenario, folder: Path) -> tuple[Run, float]:
        """Return the run, and the hits by the engines' own counters. The engines come to rest before, and forget what
        they have cached. Raises ChildError."""
        for engine in engines:
            if until(lambda: engine.running() + engine.waiting() == 0, DRAIN, every=0.2) is None:  # noqa: B023 # at once
                raise engine.child.failure("did not come to rest")
            get(f"{engine.url}/reset_prefix_cache", method="POST", timeout=30.0)
        urls = [engine.url for engine in engines]
        policy = self.policy
        if policy is not None:
            policy = folder / "policy.yaml"
            policy.write_text(POLICY.read_text().replace(ENGINE, urls[0]))
        before = "gateway" if rival == WEIR else rival
        with fronted(urls, rival, before=before, policy=policy, folder=folder) as target, _ahead():
            return sent(target, scenario, urls)


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


# Two engines of MODEL, whose context is 4,096 tokens: the agents' load at a fifth of its length. Their prefix caches
# are too small for all sessions: 250 blocks of 32 tokens, the least on CPU.
AGENTS = RealLoad(
    RivalLoad(scenario=Scenario(
        arrivals=Arrivals(closed=Closed(clients=10, within=2.0, rounds=1)), duration=600.0, retries=0, timeout=300.0,
        workload=Workload(model=MODEL, named=False, mix=(
            Kind(prompt=Length(constant=240), output=Length(constant=40), ignore_eos=True,
                 session=Sessions(first=Length(constant=600), turns=Length(constant=8), think=0.7, spread=0.0)),
        )),
    )),
    2, ("--num-gpu-blocks-override", "250", "--block-size", "32", "--enable-prefix-caching"),
)  # fmt: skip
# People and batch work on one engine with few places, at twice what it can do. No two prompts begin alike.
OVERLOAD = RealLoad(
    RivalLoad(
        scenario=Scenario(
            retries=0, timeout=90.0, slo=parse_slo("interactive.ttft.p97<1s,batch.e2e.p50<30s"),
            workload=Workload(model=MODEL, mix=(
                Kind(class_name="interactive", prompt=Length(constant=20), output=Length(constant=32), ignore_eos=True),
                Kind(class_name="batch", prompt=Length(constant=500), output=Length(constant=128), ignore_eos=True),
            )),
        ),
        share=2.0, rivals=("direct",),
        goals=(
            Goal("share", 0.0, 0.97, class_name="interactive", against="direct"),
            Goal("goodput", 1.0, against="direct"),
        ),
    ),
    1, ("--max-num-seqs", str(PLACES), "--no-enable-prefix-caching"), POLICY, 2 * PLACES,
)  # fmt: skip
REAL = {"real-agents": AGENTS, "real-overload": OVERLOAD}
