"""The simulation's own books: what retries and limits must have counted, for comparison with what the gateway has."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gateway.assembly import Gateway
from gateway.core.bucket import Kind
from gateway.core.limits import Charge, LimitBook
from gateway.core.outcome import Outcome, Record
from gateway.core.retries import WINDOW, RetryBudget


class Retries:
    """The retry budget, counted once more: `free` moves of calls that lost their engine, and `sends` beyond the first
    of each call, are for its owner to add to."""

    def __init__(self, budget: RetryBudget, wrong: Callable[[str], None]) -> None:
        self.free = self.sends = self.taken = 0
        self._budget = budget
        self._wrong = wrong
        self._calls: defaultdict[int, int] = defaultdict(int)
        self._retries: defaultdict[int, int] = defaultdict(int)

    @property
    def policy(self) -> Any:
        return self._budget.policy

    def backoff(self, attempt: int, rng: random.Random) -> float:
        return self._budget.backoff(attempt, rng)

    def call(self, now: float) -> None:
        self._calls[int(now)] += 1
        self._budget.call(now)

    def take(self, now: float) -> bool:
        taken = self._budget.take(now)
        if taken:
            self.taken += 1
            self._retries[int(now)] += 1
            window = range(int(now) - WINDOW + 1, int(now) + 1)
            calls, retries = sum(self._calls[at] for at in window), sum(self._retries[at] for at in window)
            most = max(self.policy.at_least, self.policy.budget * calls)
            if retries > most:
                self._wrong(f"retry {retries} in {WINDOW} s of {calls} calls, {most:g} are allowed")
        return taken

    def end(self) -> None:
        """Every further send of a call was paid for."""
        if self.sends > self.taken + self.free:
            self._wrong(f"{self.sends} further sends, {self.taken} retries of the budget and {self.free} free moves")


class Charges:
    """Every charge of a book of limits ends, once."""

    def __init__(self, book: LimitBook) -> None:
        self._book = book
        self._made: list[Charge] = []
        vars(book)["charge"] = self.charge

    def charge(self, *given: Any) -> Charge:
        """As `LimitBook.charge`. Raises Refused."""
        charge = type(self._book).charge(self._book, *given)
        self._made.append(charge)
        return charge

    @property
    def left(self) -> int:
        """Charges that have no end yet."""
        return sum([charge._live for charge in self._made])


class Ledger:
    """What the limits must have counted, from the records of calls: requests, and at least and at most tokens."""

    def __init__(self) -> None:
        self.requests = 0
        self.least = self.most = 0

    def count(self, record: Record, asked: int) -> None:
        """A call has ended; it had asked for so many tokens at most."""
        prompt = record.prompt_tokens
        if record.settled:
            least = most = prompt + record.completion_tokens
        elif record.ttft or (record.attempts and not record.reason):  # an error is answered in no time at all
            least, most = prompt, prompt + asked  # cut off: each read was a token at least
        elif record.attempts and record.outcome is Outcome.CLIENT_GONE:
            least = most = prompt  # an engine had it
        else:
            return  # refunded
        self.requests += 1
        self.least += least
        self.most += most

    def compare(self, gateway: Gateway, wrong: Callable[[str], None]) -> None:
        """Against the buckets that bind nobody and drain nothing."""
        buckets = {key: bucket for key, bucket in gateway.limits._buckets.items() if not any(key[1:])}
        kinds: tuple[tuple[Kind, int, int], ...] = (
            ("requests", self.requests, self.requests),
            ("tokens", self.least, self.most),
        )
        for kind, least, most in kinds:
            bucket = buckets.get((kind, "", "", ""))
            level = 0.0 if bucket is None else bucket.level
            if not least - 0.5 <= level <= most + 0.5:
                wrong(f"{level:.1f} {kind} were settled, the records say {least} to {most}")
