"""Rows about waits: the wait predicted for a call as it came, against its real wait.

Four fleets, since what binds differs: the KV cache; the places of a batch; one small engine, of which every call is a
large part; engines of unlike size and speed. Each is asked for about twice what it can do. Counted are calls that
came after the warm-up and met a queue; the run goes on for twice as long as that part, so that who waits for long is
counted too.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from loadtest.engine.engine_config import engine_config
from loadtest.engine.profile_file import profile_of
from loadtest.lab.figures.runs import BLOCKS, InMemory, Measured, Setting, Shape
from loadtest.lab.rows import Row
from loadtest.load.plan import poisson
from loadtest.report.stats import quantile
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.simulated_client import Try

MET = 0.01  # seconds of wait, real or foretold, from which on a call has met a queue
LASTS = 3.0  # of the measured part: the run after the warm-up
# Of an error at most: this share of the real wait, or so many seconds where that is more.
MEDIAN = (0.2, 0.2)
P95 = (0.5, 1.0)


class Regime(msgspec.Struct, frozen=True):
    """Engines and load of one measurement: a `profile` for each engine with its number of KV blocks (0: the profile's),
    and `rate` requests a second, about twice what they can do."""

    name: str
    each: tuple[tuple[str, int], ...]
    rate: float

    def made(self, number: int, shape: Shape, seed: int) -> MemoryEngine:
        """The engine of that number."""
        profile, blocks = self.each[number]
        return MemoryEngine(engine_config(profile_of(profile), num_gpu_blocks=blocks or None, seed=seed), seed=seed)


REGIMES = (
    Regime("KV binds", (("a100-8b", BLOCKS // 2),) * 4, 90.0),
    Regime("sequences bind", (("a100-8b", 0),) * 4, 140.0),
    Regime("one small engine", (("l4-8b-fp8", 0),), 4.0),
    Regime("mixed fleet", (("a100-8b", 0), ("a100-8b", BLOCKS // 2), ("h100-8b", 0), ("l4-8b-fp8", 0)), 150.0),
)


def waits(setting: Setting) -> list[Row]:
    """The error of the predicted wait in each regime, per class."""
    return [row for regime in REGIMES for row in _of(setting, regime)]


def _of(setting: Setting, regime: Regime) -> list[Row]:
    what = f"waits, {regime.name}"
    ends = setting.warm + LASTS * setting.measured
    own = msgspec.structs.replace(setting, engines=len(regime.each), place=InMemory(made=regime.made))
    outcome = own.run(what, poisson(own.mix, regime.rate, ends, own.seed), ends=ends)
    setting.tries += outcome.sent
    setting.known[what] = outcome
    rows = []
    for name in setting.targets:
        known = foretold(outcome, name, setting.warm, setting.ends)
        if known:
            rows.append(row_of(f"{regime.name}, {name}, {len(known)} calls", known))
    return rows


def foretold(outcome: Measured, class_name: str, since: float, until: float) -> list[Try]:
    """The tries of a class that were sent in this time, met a queue, and were given to an engine."""
    return [
        tried
        for tried in outcome.result.tries
        if tried.class_name == class_name
        and since <= tried.sent < until
        and tried.upstream
        and max(tried.predicted, tried.queue) > MET
    ]


def row_of(what: str, known: list[Try]) -> Row:
    """Median and p95 of the error, in seconds and as a share of the real wait."""
    errors = [abs(tried.predicted - tried.queue) for tried in known]

    def both(of: Callable[[Try], float]) -> str:
        values = list(map(of, known))
        return f"{quantile(values, 0.5):.2f}, {quantile(values, 0.95):.2f} s"

    shares = f"{100 * share_of(known, *MEDIAN, 0.5):.0f}, {100 * share_of(known, *P95, 0.95):.0f} %"
    return Row(
        name="waits",
        what=f"{what}: error p50, p95",
        value=f"{quantile(errors, 0.5):.2f}, {quantile(errors, 0.95):.2f} s ({shares})",
        baseline=f"real {both(lambda tried: tried.queue)}; foretold {both(lambda tried: tried.predicted)}",
        target="p50 20 % or 0.2 s, p95 50 % or 1 s",
        milestone="the same",
        met=share_of(known, *MEDIAN, 0.5) <= MEDIAN[0] and share_of(known, *P95, 0.95) <= P95[0],
    )


def share_of(known: list[Try], share: float, seconds: float, q: float) -> float:
    """Return the `q` quantile of the errors over their real waits. Each wait counts as at least `seconds / share`
    seconds."""
    return quantile([abs(tried.predicted - tried.queue) / max(tried.queue, seconds / share) for tried in known], q)
