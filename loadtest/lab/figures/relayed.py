"""Rows about relays: the figures of a gateway of several processes, beside those of one.

The decider's and the relays' code, and their frames, are those that run; between each relay and the decider is a time
that the loop's clock takes. What processes cost is not simulated. Any difference in time, however small, draws another
run, so a figure is the mean over seeds, each compared with one process of the same seed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Container, Iterator, Sequence
from typing import Any

import msgspec

from gateway.core.admission.queues import Queues, Ticket
from gateway.core.admission.witness import Witnesses
from gateway.core.policy.policy import Policy
from loadtest.clients.retries import Clients
from loadtest.lab.dst.fairness import Fairness
from loadtest.lab.figures import fleet, load
from loadtest.lab.figures.runs import MIX, InMemory, Setting
from loadtest.lab.rows import Row
from loadtest.load.plan import poisson
from loadtest.load.workload import Planned
from loadtest.simulate.inprocess import key_of

WITHIN = 0.01  # of one process's figure, or of all calls
TENANTS = ("small", "large")  # of one weight; the second asks for three times as much
FAIR = b"tenants: {anonymous: {}, small: {}, large: {}}\n"
Figures = dict[str, float]


def rows(setting: Setting, relays: Sequence[int], delays: Sequence[float], seeds: int) -> list[Row]:
    """A row for each figure, number of relays and delay, in seconds. `setting` is of one process and the first of so
    many seeds."""
    settings = [_seeded(setting, setting.seed + number) for number in range(seeds)]
    ones = [figures(each, 0, 0.0) for each in settings]
    found = []
    for count in relays:
        for delay in delays:
            where = f"{count} relays, {1000 * delay:g} ms from the decider"
            several = [figures(each, count, delay) for each in settings]
            for name in ones[0]:
                values, bases = [each[name] for each in several], [each[name] for each in ones]
                found.append(_row(f"{name}; {where}", count, values, bases))
    for each in settings:
        setting.tries += each.tries
        setting.known |= {f"seed {each.seed}: {name}": outcome for name, outcome in each.known.items()}
    return found


def _seeded(setting: Setting, seed: int) -> Setting:
    """The same of another seed, which says so where it tells of its progress."""
    told = setting.progress
    return msgspec.structs.replace(
        setting, seed=seed, known={}, tries=0, progress=lambda run, share: told(f"seed {seed}, {run}", share)
    )


def _row(what: str, count: int, values: list[float], bases: list[float]) -> Row:
    """The mean beside one process's, and how far they are apart, with two standard errors: by seed, since traffic and
    engines of a seed are the same for both."""
    differences = [value - base for value, base in zip(values, bases, strict=True)]
    apart = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return Row(
        name=f"{count}",
        what=what,
        value=f"{statistics.fmean(values):.4f} ({apart:+.4f} ± {2.0 * error:.4f})",
        baseline=f"one process {statistics.fmean(bases):.4f}",
        target="within 0.01",
        milestone="within 0.01",
        met=abs(apart) <= WITHIN,
    )


def figures(setting: Setting, relays: int, delay: float) -> Figures:
    """All figures of a gateway of so many relays; 0: of one process."""
    what = f"{relays} relays, {1000 * delay:g} ms: " if relays else "one process: "

    def of(**changed: Any) -> Setting:
        place = InMemory(relays=relays, delay=delay, **changed)
        return msgspec.structs.replace(
            setting,
            place=place,
            known={},
            tries=0,
            capacity=setting.saturated(),
            progress=lambda run, share: setting.progress(what + run, share),
        )

    own = of()
    overload = own.overload(2.0)
    found = {
        "goodput at 2x": load.goodput(own, overload),
        "admitted but late at 2x": load.late(own, overload),
        "interactive in time at 2x": load.interactive_in_time(own, overload),
        "prefix hits of conversations": fleet.prefix_hits(own, "gateway", gateway=True, big=False),
        "Retry-After kept at 2x": load.came_back(own)[1],
    }
    turns = Turns()
    fair = msgspec.structs.replace(of(tenants=TENANTS, watcher=lambda: turns), policy=FAIR)
    fair.run("two tenants", two_tenants(fair), clients=Clients(retries=0))
    found["served out of turn between two tenants, of all served"] = turns.unfair / max(1, turns.served)
    for each in (own, fair):
        setting.tries += each.tries
        setting.known |= {what + name: outcome for name, outcome in each.known.items()}
    return found


def two_tenants(setting: Setting) -> Iterator[Planned]:
    """Twice the capacity, of which the second tenant asks for three quarters."""
    rng = random.Random(setting.seed)  # noqa: S311 # a simulation
    for planned in poisson(MIX, 2.0 * setting.saturated().calls, setting.ends, setting.seed):
        tenant = TENANTS[rng.random() < 0.75]
        planned.fields = planned.fields | {b"authorization": b"Bearer " + key_of(tenant).encode()}
        yield planned


class Turns:
    """Watcher of who is served while who waits: by the law of `loadtest/lab/dst/fairness.py`."""

    def __init__(self) -> None:
        self.served = self.unfair = 0
        self.witnesses = Witnesses(dispatch=self)
        self._policy = Policy()
        self._laws: dict[str, Fairness] = {}

    def _wrong(self, what: str) -> None:
        self.unfair += 1

    def applying(self, policy: Policy) -> None:
        self._policy = policy

    def pushing(self, queues: Queues, ticket: Ticket, *, front: bool) -> None:
        model = ticket.call.model
        if model not in self._laws:
            self._laws[model] = Fairness(queues, self._policy, self._wrong)
        self._laws[model].pushing(ticket, front=front)

    def popping(self, model: str, queues: Queues, now: float, paused: Container[str]) -> None:
        self._laws[model].popping(now, paused)

    def popped(self, model: str, ticket: Ticket | None) -> None:
        self.served += ticket is not None
        self._laws[model].popped(ticket)

    def correcting(self, ticket: Ticket, prompt_tokens: int, completion_tokens: int) -> None:
        self._laws[ticket.call.model].correcting(ticket, prompt_tokens, completion_tokens)

    def corrected(self, ticket: Ticket) -> None:
        self._laws[ticket.call.model].corrected(ticket)

    def _ignored(self, *_: object, **__: object) -> None:
        """Say nothing of turns."""

    entering = refused = granting = granted = moved_free = retried = sending = failed = heard = say = _ignored
