"""Timing side channel between tenants: guesses at another's prompts by the time to first token, with salts or not.

    python -m loadtest.lab.isolation [--seed N]

The whole gateway over one simulated engine, in virtual time. A tenant sends prompts of WORDS words. Then another one,
who guesses, sends some of the same and as many that nobody has sent, in a random order. The table has his median times,
and how often a prompt that was sent had its first token sooner than one that was not: 100 % tells all, 50 % is chance.
"""

from __future__ import annotations

import argparse
import random
import sys
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.clients.retries import Clients
from loadtest.lab.figures.runs import an_engine
from loadtest.load.prompts import Text
from loadtest.load.workload import Planned
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget, key_of
from loadtest.simulate.run_records import RunResult
from loadtest.simulate.simulation import SimulationRun

WORDS = 2500
PROMPTS = 40  # of each kind
EVERY = 2.0  # seconds between two calls: the engine is idle when one comes
BLOCKS = 32_768  # of KV: nothing is evicted
VICTIM, GUESSER = "acme", "globex"
POLICY = b"routing: {cache_isolation: %b}\ntenants: {acme: {}, globex: {}}\n"


class Guesses(msgspec.Struct, frozen=True):
    """Times to the first token, in seconds, of the guesser's calls."""

    sent: list[float]  # prompts that the other tenant had sent
    unsent: list[float]

    @property
    def told_apart(self) -> float:
        """The share of pairs in which the prompt that was sent is the quicker one; a tie is half of one (the area under
        the ROC curve)."""
        pairs = [(one, other) for one in self.sent for other in self.unsent]
        return sum(1.0 if one < other else 0.5 if one == other else 0.0 for one, other in pairs) / len(pairs)


def run(isolation: str, seed: int) -> Guesses:
    """One guesser's day, with `cache_isolation` `tenant` or `none`."""
    rng = random.Random(seed)  # noqa: S311 # a simulation
    text = Text(rng)
    texts = [text.cut(WORDS + rng.randrange(WORDS // 10), rng) for _ in range(2 * PROMPTS)]
    order = rng.sample(range(2 * PROMPTS), 2 * PROMPTS)  # the first PROMPTS texts were sent before
    calls = [_call(number * EVERY, VICTIM, texts[number]) for number in range(PROMPTS)]
    begins = PROMPTS * EVERY
    calls += [_call(begins + place * EVERY, GUESSER, texts[number]) for place, number in enumerate(order)]

    async def main() -> RunResult:
        engine = an_engine(seed, blocks=BLOCKS)
        target = GatewayTarget(POLICY % isolation.encode(), [engine], seed=seed, tenants=(VICTIM, GUESSER))
        return await SimulationRun([engine], target, calls, clients=Clients(retries=0), seed=seed).until(
            calls[-1].at + 60.0
        )

    tries = vtime.run(main()).tries
    if any(tried.outcome != "ok" for tried in tries):
        raise RuntimeError("a call was not answered")
    times = {round((tried.intended - begins) / EVERY): tried.first_byte - tried.sent for tried in tries}
    sent = [times[place] for place, number in enumerate(order) if number < PROMPTS]
    return Guesses(sent, [times[place] for place, number in enumerate(order) if number >= PROMPTS])


def _call(at: float, tenant: str, text: bytes) -> Planned:
    body = b'{"model":"sim","stream":true,"max_tokens":4,"messages":[{"role":"user","content":"%b"}]}' % text
    fields = {b"content-type": b"application/json", b"authorization": b"Bearer " + key_of(tenant).encode()}
    return Planned(at, "default", body, fields)


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.isolation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="of prompts, engine and gateway (1)")
    given = parser.parse_args(argv)
    table = Table("cache_isolation", "ttft, was sent", "ttft, was not", "sooner if it was sent")
    for isolation in ("none", "tenant"):
        guesses = run(isolation, given.seed)
        cells = [f"{1000.0 * median(times):.1f} ms" for times in (guesses.sent, guesses.unsent)]
        table.add_row(isolation, *cells, f"{guesses.told_apart:.0%}")
    Console(width=max(100, Console().width)).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
