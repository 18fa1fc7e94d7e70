"""Value of sessions: coding agents on several engines, with the policy's `sessions` and without, beside a large one.

    python -m loadtest.lab.figures.agentic --help

The whole gateway over simulated engines, in virtual time. The traffic is loadtest/scenarios/agentic.yaml by two tenants
of one weight, of whom one begins three times as many sessions. All prompts are an eighth as long, on engines with an
eighth of the memory and of the reading speed of four H100 with a 70B model and an FP8 KV cache: times are the same,
and bodies are smaller. The large engine has the memory and the speed of all.

Ratios are of the means over the seeds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import takewhile
from statistics import fmean

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.clients.retries import Clients
from loadtest.engine.engine_config import engine_config
from loadtest.engine.profile_file import profile_of
from loadtest.load.arrivals import Arrivals, Rate
from loadtest.load.lengths import Length, LogNormal
from loadtest.load.plan import plan
from loadtest.load.scenario import find, load
from loadtest.load.workload import Kind, Planned, Tenant, Workload
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.run_records import RunResult
from loadtest.simulate.simulated_client import Try
from loadtest.simulate.simulation import SimulationRun

PROFILE = "h100-70b-tp4"
SCALE = 8
SECONDS = 3600.0
WARM = 1200.0  # of them, not counted
BLOCKS = 57_344 // SCALE
TENANTS = {"many": Tenant(weight=3.0), "few": Tenant(weight=1.0)}
SHARED = b"classes: {default: {weight: 1, deadline: 30m, max_wait: 30m}}\ntenants: {many: {}, few: {}}\n"
SESSIONS = b"sessions: {most_ahead: 5m}\n"
PATIENCE = 1800.0  # seconds


def shorter(length: Length) -> Length:
    """A log-normal length, divided by SCALE."""
    assert length.log_normal is not None  # noqa: S101 # the scenario's are
    median = LogNormal(length.log_normal.median // SCALE, length.log_normal.sigma)
    return Length(log_normal=median, least=max(1, length.least // SCALE), most=length.most // SCALE)


def agents() -> Kind:
    """The scenario's agents, their prompts shortened. Answers stay as long: they take the time they take."""
    (kind,) = load(find("agentic")).workload.mix
    assert isinstance(kind.prompt, Length)  # noqa: S101 # the scenario's are
    assert kind.prefix is not None  # noqa: S101 # the same
    assert kind.session is not None  # noqa: S101 # the same
    assert kind.session.context is not None  # noqa: S101 # the same
    return msgspec.structs.replace(
        kind,
        prompt=shorter(kind.prompt),
        prefix=msgspec.structs.replace(kind.prefix, tokens=kind.prefix.tokens // SCALE),
        session=msgspec.structs.replace(kind.session, context=kind.session.context // SCALE),
    )


def an_engine(seed: int, size: int = 1) -> MemoryEngine:
    """One engine, or one with `size` times the memory, the batch and the speed."""
    profile = profile_of(PROFILE)
    slower = {
        "prefill": profile.prefill * SCALE / size,
        "context": profile.context / 2 * SCALE / size,
        "attention": profile.attention * SCALE**2 / size,
        "base": profile.base / size,
        "decode": profile.decode / size,
        "max_num_seqs": profile.max_num_seqs * size,
    }
    config = engine_config(
        msgspec.structs.replace(profile, **slower),
        num_gpu_blocks=BLOCKS * size,
        max_num_batched_tokens=max(profile.max_num_batched_tokens // SCALE, profile.max_num_seqs) * size,
        max_model_len=400_000 // SCALE,
        seed=seed,
    )
    return MemoryEngine(config, seed=seed)


def calls(rate: float, seconds: float, seed: int, keys: dict[str, str]) -> Iterator[Planned]:
    """Sessions that begin at `rate` per second."""
    times = takewhile(lambda at: at < seconds, Arrivals(poisson=Rate(rate)).times(seed))
    return plan(Workload(mix=(agents(),), tenants=TENANTS), times, seed, keys=keys)


def run(policy: bytes, engines: int, size: int, rate: float, seconds: float, seed: int) -> RunResult:
    """One run, to the end of its `seconds`."""

    async def main() -> RunResult:
        fleet = [an_engine(seed * 100 + number, size) for number in range(engines)]
        target = GatewayTarget(SHARED + policy, fleet, seed=seed, tenants=tuple(TENANTS))
        clients = Clients(retries=0, patience={"default": PATIENCE})
        planned = calls(rate, seconds, seed, dict(target.keys))
        return await SimulationRun(fleet, target, planned, clients=clients, seed=seed).until(seconds)

    return vtime.run(main())


def hits(tries: list[Try]) -> float:
    """Cached over prompt tokens, by the engines' own count."""
    return sum(tried.cached_tokens for tried in tries) / max(1, sum(tried.prompt_tokens for tried in tries))


class AgentRun(msgspec.Struct, frozen=True):
    """Outcome of one run: mean seconds to a first token, and the share of prompt tokens that was cached."""

    ttft: float
    hits: float


def run_of(result: RunResult) -> AgentRun:
    """Sums over the calls that were sent after the warm-up and answered."""
    done = [tried for tried in result.tries if tried.outcome == "ok" and tried.sent >= WARM]
    return AgentRun(fmean(tried.first_byte - tried.sent for tried in done), hits(done))


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.figures.agentic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, with the seeds from 1 on (3)")
    parser.add_argument("--rate", type=float, default=0.01, help="sessions that begin in a second (0.01)")
    given = parser.parse_args(argv)
    cells = {"least TTFT": (b"", 4, 1), "sessions": (SESSIONS, 4, 1), "one large engine": (b"", 1, 4)}
    table = Table("seed", *(f"{name}: ttft" for name in cells), *(f"{name}: hits" for name in cells), "CPU")
    rows: dict[str, list[AgentRun]] = {name: [] for name in cells}
    for seed in range(1, given.seeds + 1):
        began = time.process_time()
        for name, (policy, engines, size) in cells.items():
            rows[name].append(run_of(run(policy, engines, size, given.rate, SECONDS, seed)))
        last = [each[-1] for each in rows.values()]
        ttfts, shares = [f"{row.ttft:.2f} s" for row in last], [f"{row.hits:.3f}" for row in last]
        table.add_row(str(seed), *ttfts, *shares, f"{time.process_time() - began:.0f} s")
    Console(width=max(160, Console().width)).print(table)
    base, ours, large = rows.values()
    ratio = fmean(row.ttft for row in ours) / fmean(row.ttft for row in base)
    found = fmean(row.hits for row in ours) / fmean(row.hits for row in large)
    print(f"mean TTFT: {ratio:.2f} of that without sessions (aim 0.6)")
    print(f"prefix hits: {found:.3f} of one large engine's (aim 0.95)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
