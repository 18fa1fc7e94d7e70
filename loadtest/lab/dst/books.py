"""Books of a simulation: retries and charges counted once more, for comparison with the gateway's."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from gateway.core.admission.levels import Kind
from gateway.core.admission.limits import LimitBook
from gateway.core.admission.quotas import SPANS
from gateway.core.admission.retries import AT_LEAST
from gateway.core.admission.witness import LimitCharge
from gateway.core.engines.speed import TPOT_TOKENS
from gateway.core.recent_calls import WINDOW
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record

# How a call ends by its client's doing, or the gateway's; else an engine has failed it, and it is not paid for.
THEIRS = (Outcome.OK, Outcome.CLIENT_GONE, Outcome.SLOW_CLIENT, Outcome.EXPIRED, Outcome.DRAINING)
# Of the tokens written, where their number is estimated: a stream in memory tells nothing between its first and last
# event, and a pace that was seen a few times only is not yet the fastest: an engine's first answers say nothing of it.
SHARE = 0.5
ANSWERS = 4
SLACK = 0.001  # seconds
IN_FLIGHT = 2  # tokens of steps that have begun


class Retries:
    """The retry budget, counted once more: `free` moves of calls that lost their engine, and `sends` beyond the first
    of each call, are for its owner to add to."""

    def __init__(self, wrong: Callable[[str], None]) -> None:
        self.free = self.sends = self.taken = 0
        self._wrong = wrong
        self._loop = asyncio.get_running_loop()
        self._called: set[str] = set()  # ids of calls
        self._calls: defaultdict[int, int] = defaultdict(int)
        self._retries: defaultdict[int, int] = defaultdict(int)

    def granted(self, request_id: str) -> None:
        """A call has an engine: it counts the first time."""
        if request_id not in self._called:
            self._called.add(request_id)
            self._calls[int(self._loop.time())] += 1

    def retried(self, share: float) -> None:
        """A retry was taken, of which this share of calls is allowed."""
        now = int(self._loop.time())
        self.taken += 1
        self._retries[now] += 1
        window = range(now - WINDOW + 1, now + 1)
        calls, retries = sum(self._calls[at] for at in window), sum(self._retries[at] for at in window)
        most = max(AT_LEAST, share * calls) if share else 0
        if retries > most:
            self._wrong(f"retry {retries} in {WINDOW} s of {calls} calls, {most:g} are allowed")

    def end(self) -> None:
        """Every further send of a call was paid for."""
        if self.sends > self.taken + self.free:
            self._wrong(f"{self.sends} further sends, {self.taken} retries of the budget and {self.free} free moves")


class Charges:
    """Every charge of a book of limits ends, once, and a request that came is given back with its charge or not at all.
    `whose` gives the id of the call that is being charged."""

    def __init__(self, whose: Callable[[], str] = str) -> None:
        self.made: dict[str, LimitCharge] = {}  # by call, the last of each
        self._whose = whose
        self._all: list[LimitCharge] = []
        self._arrived: dict[int, LimitCharge] = {}  # by identity: what a request took, or the charge in its place

    def arrived(self, charge: LimitCharge) -> None:
        """A request was counted."""
        self._arrived[id(charge)] = charge
        self._all.append(charge)  # so that no other has its identity

    def charged(self, charge: LimitCharge, arrived: LimitCharge | None) -> None:
        """A call was charged, in place of that."""
        self.made[self._whose()] = charge
        self._arrived[id(arrived)] = charge
        self._all.append(charge)

    @property
    def left(self) -> int:
        """Charges that have no end yet."""
        return sum([charge.live for charge in self.made.values()])

    def compare(self, book: LimitBook, wrong: Callable[[str], None]) -> None:
        """Compare what was settled with the buckets that bind nobody and drain nothing."""
        requests = sum([not charge.refunded for charge in self._arrived.values()])
        settled = sum([charge.settled for charge in self._all if charge.settled is not None])
        kinds: tuple[tuple[Kind, int], ...] = (("requests", requests), ("tokens", settled))
        for kind, counted in kinds:
            level = book.level((kind, "", "", ""))
            if abs(level - counted) > 0.5:
                wrong(f"{level:.1f} {kind} are charged, and it should be {counted}")
        for span in SPANS if book.quotas else ():
            windows = [window for window in book.quotas if window.span == span]
            used, held = sum([each.base + each.since for each in windows]), sum([each.reserved for each in windows])
            if used != settled or held:
                wrong(f"quotas of a {span} have {used} tokens used and {held} held, and {settled} were settled")


class Ledger:
    """Ledger of the tokens that engines wrote, and of the tenants that paid for them. A tenant's bucket is charged at
    least the tokens written for each call, whoever left the call, unless an engine failed it."""

    def __init__(self, charges: Charges, wrong: Callable[[str], None]) -> None:
        self._charges = charges
        self._wrong = wrong
        self._loop = asyncio.get_running_loop()
        self._written: dict[str, int] = {}  # by calls that were left, as of then
        self._answers: Counter[str] = Counter()  # whole ones that teach a pace, by engine
        self._late: dict[str, tuple[float, int]] = {}  # when one was given up, and what was written

    def left(self, taker: Any, tokens: int) -> None:
        """An engine's request was closed by the gateway before its end."""
        self._written[taker.request_id.decode()] = tokens

    def failed(self, request_id: bytes, dead: bool) -> None:
        """Note a call that was given up for the time its engine took; that may be the call's own. What a dead engine
        wrote is charged to nobody."""
        id = request_id.decode()
        written = self._written.pop(id, 0)
        self._late[id] = self._loop.time(), 0 if dead else written

    def count(self, record: Record) -> None:
        """A call has ended."""
        self._answers[record.engine] += record.outcome is Outcome.OK and record.completion_tokens >= TPOT_TOKENS
        charge, written = self._charges.made.get(record.request_id), self._written.get(record.request_id, 0)
        if charge is None:
            return
        paid = charge.settled
        if record.settled and paid != record.prompt_tokens + record.completion_tokens:
            self._wrong(f"call {record.request_id} was told {record!r}, and {paid} tokens were settled")
        late_at, late = self._late.get(record.request_id, (0.0, 0))
        if record.outcome is Outcome.EXPIRED and self._loop.time() - late_at < SLACK:
            written = late  # the time it took was the call's own
        if record.outcome not in THEIRS or written <= 0:
            return
        if paid is None:
            self._wrong(f"call {record.request_id} had {written} tokens written for it, and nothing was charged")
        elif self._answers[record.engine] < ANSWERS and paid >= record.prompt_tokens:
            return
        elif paid < record.prompt_tokens + int(SHARE * (written - IN_FLIGHT)):
            self._wrong(f"call {record.request_id} had {written} tokens written for it: {paid} were charged")
