"""Tokens that tenants have used and money that providers cost, kept in the storage over restarts: read at the start,
written each second. Marks of money that calls wait for are written at once."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable

import msgspec

from gateway.core.admission.quotas import Calendar, QuotaBook, Span, Used
from gateway.core.money.book import MoneyBook, Spent
from gateway.shared.notice import Notice
from gateway.shared.storage import Storage, StorageError
from gateway.shared.tasks import cancel, done_within, lasting

EVERY = 1.0  # seconds between two writings, and so the most that SIGKILL loses of tokens; of money it loses nothing
PAUSE = 0.05  # seconds after a writing, so that a disk that fails is not asked for each call
DAYS_KEPT = 62  # days with use, not days back from now: a clock that runs far ahead deletes no newer row
MONTHS_KEPT = 36  # likewise
NOT_OPEN = "storage takes effect at a start: tokens are counted, and not kept over a restart, until the next"


class TokenUse(msgspec.Struct, eq=False):
    """The counts of one gateway's quotas and money. `storage`: None: there is none, or it is not open yet. `raised` is
    called when more money may be spent than before."""

    _storage: Callable[[], Storage | None]
    _quotas: QuotaBook
    _money: MoneyBook
    _calendar: Calendar
    _clock: Callable[[], float]
    _say: Callable[[str], None]
    _raised: Callable[[], None]
    _kept: set[Used] = set()  # rows of now that are in the file
    _spent: set[Spent] = set()  # the same of money: those of the last writing
    _windows: set[tuple[Span, int]] = set()  # windows that were written since the start
    _short: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    _said: str = ""
    _task: asyncio.Task[None] | None = None

    def set_calendar(self) -> None:
        """Set the calendar by the system's clock, which may be changed while the gateway runs."""
        self._calendar.offset = time.time() - self._clock()

    async def start(self) -> None:
        """Load the stored counts, and store them from now on. Raises StorageError."""
        storage = self._storage()
        self.set_calendar()
        if storage is not None:
            kept, spent = await storage.run(lambda database: (_read(database), _read_money(database)))
            self._kept = set(kept)
            self._quotas.told(kept, self._clock())
            self._money.restore(spent, self._clock(), kept=not self._money.in_store)
            self._spent = set(spent)
            if self._money:
                await self._write()
        if not self._money.in_store:
            self._money.short = self._short.set
        self._task = lasting("the storing of the tokens that tenants use", self._keep)

    async def history(self) -> list[Used]:
        """All windows that are kept, and those of now as they are, by tenant and time."""
        storage = self._storage()
        kept = [] if storage is None else await storage.run(_read)
        both = {(each.tenant, each.span, each.start): each for each in (*kept, *self._quotas.states())}
        return [both[key] for key in sorted(both)]

    async def money(self) -> list[Spent]:
        """Stored and current money, sorted by provider, tenant, model and time."""
        storage = self._storage()
        kept = [] if storage is None else await storage.run(_read_money)
        rows = [each for each in (*kept, *self._money.states(self._clock())) if each.model]
        both = {(each.provider, each.tenant, each.model, each.span, each.start): each for each in rows}
        return [both[key] for key in sorted(both)]

    async def aclose(self) -> None:
        """Write what has come since the last time; no more money is spent. The storage is not closed."""
        if self._task is not None:
            await cancel(self._task)
            self._task = None
            self._money.known = False
            await self._write(last=True)

    async def _keep(self) -> None:
        while True:
            await done_within(self._short.wait(), EVERY)
            self._short.clear()
            self.set_calendar()
            await self._write()
            await asyncio.sleep(min(EVERY, PAUSE))

    async def _write(self, *, last: bool = False) -> None:
        storage, quotas, money = self._storage(), self._quotas, self._money
        if storage is None:
            self._tell(NOT_OPEN if quotas or money else "")
            return
        taken, money.changed = money.changed, set()  # all lines of 5,000 tenants would take 16 ms
        used, states = quotas.states(), money.states(self._clock(), taken, last=last)
        changed = [each for each in used if each not in self._kept]
        spent = [each for each in states if each not in self._spent]
        rows: list[Used | Spent] = [*changed, *spent]
        if not rows:
            return
        began = {(each.span, each.start) for each in rows} - self._windows
        try:
            await storage.run(lambda database: _put(database, changed, spent, began))
        except StorageError as error:
            what = "tokens that tenants use, and money for providers," if money else "tokens that tenants use"
            self._tell(Notice(f"{what} cannot be kept: {error}", "use_not_kept", "warning"))
        else:
            self._kept, self._spent = set(used), set(states)
            taken.clear()
            self._windows |= began
            self._tell("")
            if spent and not money.in_store and not last:
                money.keep(states)
                self._raised()
        finally:
            money.changed |= taken

    def _tell(self, line: str) -> None:
        """A line that was not the last one."""
        if line and line != self._said:
            self._say(line)
        self._said = line


def _read(database: sqlite3.Connection) -> list[Used]:
    rows = database.execute("SELECT tenant, span, start, tokens FROM token_use ORDER BY tenant, span, start")
    return [Used(*row) for row in rows]


def _read_money(database: sqlite3.Connection) -> list[Spent]:
    rows = database.execute("SELECT provider, tenant, model, span, start, micro, tokens FROM money_use")
    return [Spent(*row) for row in rows]


def _put(
    database: sqlite3.Connection, changed: Iterable[Used], spent: Iterable[Spent], began: set[tuple[Span, int]]
) -> None:
    database.executemany(
        "INSERT INTO token_use (tenant, span, start, tokens) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (tenant, span, start) DO UPDATE SET tokens = excluded.tokens",
        map(msgspec.structs.astuple, changed),
    )
    database.executemany(
        "INSERT INTO money_use (provider, tenant, model, span, start, micro, tokens) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (provider, tenant, model, span, start) DO UPDATE SET micro = excluded.micro, "
        "tokens = excluded.tokens",
        map(msgspec.structs.astuple, spent),
    )
    if began:
        _forget(database, began)


def _forget(database: sqlite3.Connection, began: set[tuple[Span, int]]) -> None:
    """Delete windows older than the newest DAYS_KEPT and MONTHS_KEPT, and than those of `began`, which are new."""
    for span, number in (("day", DAYS_KEPT), ("month", MONTHS_KEPT)):
        starts = [start for each, start in began if each == span]
        for table in ("token_use", "money_use") if starts else ():
            database.execute(
                f"DELETE FROM {table} WHERE span = :span AND start < min(:new, (SELECT min(start) FROM "  # noqa: S608 # constants
                f"(SELECT DISTINCT start FROM {table} WHERE span = :span ORDER BY start DESC LIMIT :kept)))",
                {"span": span, "new": min(starts), "kept": number},
            )
