"""Value of sessions: coding agents on several engines, with the policy's `sessions` and without, beside a large one.

    python -m loadtest.lab.figures.agentic --help

The whole gateway over simulated engines, in virtual time. The traffic is loadtest/scenarios/agentic.yaml by two tenants
of one weight, of whom one begins three times as many sessions. All prompts are an eighth as long, on engines with an
eighth of the memory and of the reading speed of four H100 with a 70B model and an FP8 KV cache: times are the same,
and bodies are smaller. The columns:

    least TTFT         without `sessions`
    sessions           with them
    oracle             each session stays on one engine, whatever it waits for; whoever places it knows how many calls
                       it will have. No router knows that: it is what the same caches could give
    one large engine   the memory and the speed of all in one

Mean TTFT counts from sending, of all calls answered after the warm-up. Fair share: while both tenants have calls
waiting, each is owed half of what is served, a written token counting twice. The shortfall is the most by which one
fell behind that between any two moments, over the bound for two tenants of one weight: the tokens that fit the engines
at a time, twice (gateway/core/admission/fairness.py). Calls that wait for the sake of their own session count as
waiting.

Seeds from 11 on judge; those below were used to choose load, policy and rules.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, takewhile
from statistics import fmean, stdev

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
from loadtest.simulate.inprocess import GatewayTarget, key_of
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.simulated_client import ClientCall, Try
from loadtest.simulate.simulation import SimulationRun

PROFILE = "h100-70b-tp4"
SCALE = 8
SECONDS = 3600.0
WARM = 1200.0  # of them, not counted
BLOCKS = 57_344 // SCALE
TENANTS = {"many": Tenant(weight=3.0), "few": Tenant(weight=1.0)}
KEYS = {name: key_of(name) for name in TENANTS}
SHARED = b"classes: {default: {weight: 1, deadline: 30m, max_wait: 30m}}\ntenants: {many: {}, few: {}}\n"
SESSIONS = b"sessions: {most_ahead: 5m}\n"
PATIENCE = 1800.0  # seconds
ENGINES = 4
TURN = 25.0  # seconds of a call and the time until the next, about, by which the oracle places sessions
OUTPUT = 2  # what a written token counts beside one that is read
BOUND = OUTPUT * ENGINES * BLOCKS * 16  # tokens of the least shortfall that is unfair


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


class Sent(msgspec.Struct, frozen=True):
    """A call, and whose it is."""

    tenant: str
    tried: Try


def run(policy: bytes, engines: int, size: int, planned: Iterable[Planned], seconds: float, seed: int) -> list[Sent]:
    """One run, to the end of its `seconds`."""
    sent: list[Sent] = []

    async def main() -> None:
        fleet = [an_engine(seed * 100 + number, size) for number in range(engines)]
        target = GatewayTarget(SHARED + policy, fleet, seed=seed, tenants=tuple(TENANTS))
        clients = Clients(retries=0, patience={"default": PATIENCE})
        await SimulationRun(fleet, Noting(target, sent), planned, clients=clients, seed=seed).until(seconds)

    vtime.run(main())
    return sent


class Noting:
    """The gateway, with a note of whose each call is."""

    def __init__(self, target: GatewayTarget, sent: list[Sent]) -> None:
        self._target = target
        self._sent = sent

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        self._sent.append(Sent(call.asked.tenant, tried))
        return self._target.send(call, client_call, tried)


def placed(planned: list[Planned], engines: int) -> list[list[Planned]]:
    """The sessions of each engine: each goes where the least is left of those that began before it."""
    ends: list[list[float]] = [[] for _ in range(engines)]
    found: list[list[Planned]] = [[] for _ in range(engines)]
    numbers = [call.asked.index for call in planned]
    turns = [after - number for number, after in pairwise(numbers)]
    for call, calls in zip(planned, [*turns, round(fmean(turns))], strict=True):
        left = [sum([end - call.at for end in each if end > call.at]) for each in ends]
        engine = left.index(min(left))
        ends[engine].append(call.at + calls * TURN)
        found[engine].append(call)
    return found


def oracle(rate: float, seed: int) -> list[Sent]:
    """The runs of each engine with the sessions that an oracle gave it."""
    parts = placed(list(calls(rate, SECONDS, seed, KEYS)), ENGINES)
    return [each for part in parts for each in run(SESSIONS, 1, 1, part, SECONDS, seed)]


def hits(tries: list[Try]) -> float:
    """Cached over prompt tokens, by the engines' own count."""
    return sum(tried.cached_tokens for tried in tries) / max(1, sum(tried.prompt_tokens for tried in tries))


def shortfall(sent: list[Sent], tenant: str) -> float:
    """Tokens by which the tenant fell behind half of what was served, at most, while all tenants had calls waiting."""
    events: list[tuple[float, int, str, float]] = []  # time, how many more wait, whose, and what is served
    for each in sent:
        tried = each.tried
        if tried.outcome != "ok":
            continue
        granted = tried.sent + tried.queue
        served = float(tried.prompt_tokens + OUTPUT * tried.completion_tokens)
        events += [(tried.sent, 1, each.tenant, 0.0), (granted, -1, each.tenant, served)]
    waiting = dict.fromkeys(TENANTS, 0)
    lead, least, most = 0.0, 0.0, 0.0
    for _, change, who, charge in sorted(events):
        if all(waiting.values()):
            lead += -charge if who == tenant else charge
            least = min(least, lead)
            most = max(most, lead - least)
        else:
            lead, least = 0.0, 0.0
        waiting[who] += change
    return most / 2.0


class AgentRun(msgspec.Struct, frozen=True):
    """Outcome of one run: mean seconds to a first token, the share of prompt tokens that was cached, and by tenant the
    seconds and the shortfall over the bound."""

    ttft: float
    hits: float
    ttfts: dict[str, float]
    short: dict[str, float]


def run_of(sent: list[Sent]) -> AgentRun:
    """Sums over the calls that were sent after the warm-up and answered."""
    done = [each for each in sent if each.tried.outcome == "ok" and each.tried.sent >= WARM]
    return AgentRun(
        ttft_of(done),
        hits([each.tried for each in done]),
        {name: ttft_of([each for each in done if each.tenant == name]) for name in TENANTS},
        {name: shortfall(sent, name) / BOUND for name in TENANTS},
    )


def ttft_of(done: list[Sent]) -> float:
    """Mean seconds to a first token."""
    return fmean(each.tried.first_byte - each.tried.sent for each in done)


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{fmean(values):.3f} +- {stdev(values) if len(values) > 1 else 0.0:.3f}"


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.figures.agentic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each (5)")
    parser.add_argument("--first", type=int, default=11, help="the first of their seeds (11)")
    parser.add_argument("--rate", type=float, default=0.01, help="sessions that begin in a second (0.01)")
    given = parser.parse_args(argv)
    names = ("least TTFT", "sessions", "oracle", "one large engine")
    table = Table("seed", *(f"{name}: TTFT, hits" for name in names), "TTFT", "hits", "CPU")
    rows: list[list[AgentRun]] = []
    for seed in range(given.first, given.first + given.seeds):
        began = time.process_time()
        plain, ours, large = [
            run_of(run(policy, engines, size, calls(given.rate, SECONDS, seed, KEYS), SECONDS, seed))
            for policy, engines, size in ((b"", ENGINES, 1), (SESSIONS, ENGINES, 1), (b"", 1, ENGINES))
        ]
        rows.append([plain, ours, run_of(oracle(given.rate, seed)), large])
        shown = [f"{row.ttft:.2f} s, {row.hits:.3f}" for row in rows[-1]]
        ratios = f"{ours.ttft / plain.ttft:.2f}", f"{ours.hits / large.hits:.3f}"
        table.add_row(str(seed), *shown, *ratios, f"{time.process_time() - began:.0f} s")
    Console(width=max(160, Console().width)).print(table)
    told(rows)
    return 0


def told(rows: list[list[AgentRun]]) -> None:
    """Print what all seeds say together."""
    plain, ours, best, large = [list(column) for column in zip(*rows, strict=True)]
    means = [fmean(row.ttft for row in column) for column in (plain, ours, best)]
    print(f"mean TTFT: {means[1] / means[0]:.2f} of that without sessions, the means over (aim 0.6); by seed", end=" ")
    print(spread([one.ttft / other.ttft for one, other in zip(ours, plain, strict=True)]), end="; ")
    print(f"oracle {means[2] / means[0]:.2f}")
    for name, column in (("prefix hits", ours), ("without sessions", plain), ("oracle", best)):
        found = [one.hits / other.hits for one, other in zip(column, large, strict=True)]
        print(f"{name}: {spread(found)} of one large engine's{' (aim 0.95)' if column is ours else ''}")
    for name in TENANTS:
        times = [fmean(row.ttfts[name] for row in column) for column in (plain, ours)]
        short = [max(row.short[name] for row in column) for column in (plain, ours)]
        print(f"tenant {name}: mean TTFT {times[0]:.2f} s without, {times[1]:.2f} s with;", end=" ")
        print(f"largest shortfall {short[0]:.2f} of the bound without, {short[1]:.2f} with (aim at most 1)")


if __name__ == "__main__":
    sys.exit(main())
