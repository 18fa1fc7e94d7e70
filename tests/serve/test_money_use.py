"""Money that outlasts a gateway: a restart, SIGKILL in the middle of calls, a disk that fails, a day that begins."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gateway.core.admission.quotas import DAY, Calendar, QuotaBook
from gateway.core.money.book import MoneyBook, Spent
from gateway.core.policy.file import decode
from gateway.serve import token_use
from gateway.serve.token_use import NOT_OPEN, TokenUse
from gateway.shared.storage import Storage, StorageError
from loadtest.die_with_parent import tie
from tests.core.money.test_money import call, policy, spend

BUDGET = "[0.3/day, 1/month, 80%/tenant]"
MOST = 240_000  # micro-units that one tenant may spend of it a day


class Purses:
    """Money of one gateway on a storage. `offset`: seconds by which its clock is ahead of the system's."""

    def __init__(self, storage: Storage | None, budget: str = BUDGET) -> None:
        self.calendar, self.said, self.raised = Calendar(), list[str](), 0
        self.money = MoneyBook(policy(budget), self.calendar)
        clock = asyncio.get_running_loop().time
        quotas = QuotaBook(decode(b""), self.calendar)
        self.use = TokenUse(lambda: storage, quotas, self.money, self.calendar, clock, self.said.append, self._raise)
        self.now = clock

    def _raise(self) -> None:
        self.raised += 1

    @property
    def spent(self) -> dict[tuple[str, str], int]:
        return {(tenant, purse.window.span): purse.window.used(self.now()) for _, tenant, purse in self.money.purses()}

    async def may(self) -> bool:
        """Whether a call may go, once its mark has been raised if it can be."""
        if not self.money.may_spend("cloud", call(), self.now()):
            raised = self.raised
            async with asyncio.timeout(60):
                while self.raised == raised and self.money.spent_until("cloud", call(), self.now()) is None:
                    await asyncio.sleep(0)
        return self.money.may_spend("cloud", call(), self.now())


@contextlib.asynccontextmanager
async def opened(folder: Path, budget: str = BUDGET) -> Any:
    storage = Storage(folder)
    made = Purses(storage, budget)
    await storage.open(5.0)
    try:
        await made.use.start()
        yield made
        await made.use.aclose()
    finally:
        await storage.aclose()


def test_a_restart_goes_on_to_the_last_micro_unit_and_a_mark_is_written_before_anything_is_spent(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as made:
            assert await made.may()
            spending = spend(made.money, now=made.now())
            spending.usage = (900, 0, 50)
            spending.end(made.now())
            with contextlib.closing(sqlite3.connect(f"file:{tmp_path}/weir.db?mode=ro", uri=True)) as database:
                kept = database.execute("SELECT micro FROM money_use WHERE model = '' AND span = 'day'").fetchall()
            assert all(micro >= 3000 for (micro,) in kept)
            assert made.raised
        assert not made.money.may_spend("cloud", call(), made.now()), "its storage is another's now"
        async with opened(tmp_path) as made:
            assert set(made.spent.values()) == {0, 1000}, "of the other tenant, nothing"
            found = await made.use.money()
            assert {(each.span, each.micro, each.tokens) for each in found} == {
                ("day", 1000, 950),
                ("month", 1000, 950),
            }
            assert made.said == []

    asyncio.run(scenario())


CHILD = """\
import asyncio, sys
from pathlib import Path
from tests.serve.test_money_use import lives
asyncio.run(lives(Path(sys.argv[1])))
"""


async def lives(folder: Path) -> None:
    """Send calls until the budget is spent, each told on standard output before it may go out; half of them end."""
    tie(os.getppid())
    async with opened(folder) as made:
        numbers = count()
        while await made.may():
            spending = made.money.reserve("cloud", call(), made.now())
            print(spending.reserved, flush=True)
            if next(numbers) % 2:
                spending.usage = (1000, 0, 1000)
                spending.end(made.now())
            await asyncio.sleep(0.001)
        print("spent", flush=True)
        await asyncio.sleep(60)


@pytest.mark.slow
def test_a_gateway_that_is_killed_forgets_no_money_and_those_after_it_spend_no_more_than_the_budget(
    tmp_path: Path,
) -> None:
    """All of its calls may cost what was reserved. A life costs one lead of a mark at most that nobody has spent."""
    sent, lengths = 0, [1, 7, 2, 30, 1, 100]
    for length in lengths:
        child = subprocess.Popen([sys.executable, "-c", CHILD, tmp_path], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        with child:
            for _ in range(length):
                line = child.stdout.readline()
                if line == "spent\n":
                    break
                sent += int(line)
            child.send_signal(signal.SIGKILL)
            sent += sum([int(line) for line in child.stdout if line.strip().isdecimal()])

        async def known() -> int:
            async with opened(tmp_path) as made:
                return made.spent["acme", "day"]

        assert sent <= asyncio.run(known()) <= MOST
    assert sent > MOST / 4, "not all of it was lost to marks"


def test_without_storage_nothing_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        made = Purses(None)
        await made.use.start()
        assert not made.money.may_spend("cloud", call(), made.now())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not made.money.may_spend("cloud", call(), made.now())
        await made.use.aclose()
        assert made.said == [NOT_OPEN]

    monkeypatch.setattr(token_use, "EVERY", 0.0)
    asyncio.run(scenario())


def test_a_disk_that_fails_lets_nothing_out_beyond_the_mark_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as made:
            assert await made.may()

            async def full(_: Storage, __: Any) -> None:
                raise StorageError("the disk is full: free space there")

            monkeypatch.setattr(Storage, "run", full)
            calls = []
            while made.money.may_spend("cloud", call(), made.now()):
                calls.append(spend(made.money, now=made.now()))
            sent = sum([each.reserved for each in calls])
            calls[0].end(made.now())
            marks = {purse.mark for _, tenant, purse in made.money.purses() if purse.window.span == "day"}
            assert 0 < sent <= min(marks)
            async with asyncio.timeout(60):
                while not made.said:
                    await asyncio.sleep(0)
            what = "tokens that tenants use, and money for providers, cannot be kept"
            assert made.said == [f"{what}: the disk is full: free space there"]
            assert not made.money.may_spend("cloud", call(), made.now())
            monkeypatch.undo()
            async with asyncio.timeout(60):
                while not made.money.may_spend("cloud", call(), made.now()):
                    await asyncio.sleep(0)
            with contextlib.closing(sqlite3.connect(f"file:{tmp_path}/weir.db?mode=ro", uri=True)) as database:
                spent = database.execute("SELECT span, micro FROM money_use WHERE model != '' ORDER BY span").fetchall()
            assert spent == [("day", 3000), ("month", 3000)], "what a call cost while the disk took nothing"

    asyncio.run(scenario())


def test_a_day_that_begins_has_its_own_mark_and_its_own_rows(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as made:
            assert await made.may()
            spend(made.money, now=made.now()).end(made.now())
            later = made.now() + DAY
            assert not made.money.may_spend("cloud", call(), later)
            made.money.keep(made.money.states(later))
            assert made.money.may_spend("cloud", call(), later)

    asyncio.run(scenario())


def test_rows_of_long_ago_are_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        storage = Storage(tmp_path)
        try:
            await storage.open()
            rows = [Spent("cloud", "a", "m", "day", DAY * day, 1, 2) for day in range(token_use.DAYS_KEPT + 1)]
            await storage.run(lambda database: token_use._put(database, [], rows[:-1], set()))
            await storage.run(lambda database: token_use._put(database, [], rows[-1:], {("day", rows[-1].start)}))
            assert await storage.run(token_use._read_money) == rows[1:]
        finally:
            await storage.aclose()

    asyncio.run(scenario())
