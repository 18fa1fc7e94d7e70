"""Tokens that tenants have used, kept in the storage over restarts: read at the start, written each second."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable

from gateway.core.admission.quotas import DAY, Calendar, QuotaBook, Used
from gateway.shared.storage import Storage, StorageError
from gateway.shared.tasks import cancel, lasting

EVERY = 1.0  # seconds between two writings, and so the most that SIGKILL loses
DAYS_KEPT = 62
MONTHS_KEPT = 36 * 31  # in days
NOT_OPEN = "storage takes effect at a start: tokens are counted, and not kept over a restart, until the next"


class TokenUse:
    """The counts of one gateway's quotas. `storage`: None: there is none, or it is not open yet."""

    def __init__(
        self,
        storage: Callable[[], Storage | None],
        quotas: QuotaBook,
        calendar: Calendar,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._storage = storage
        self._quotas = quotas
        self._calendar = calendar
        self._clock = clock
        self._say = say
        self._kept: dict[tuple[str, str, int], int] = {}  # what is in the file
        self._said = ""
        self._task: asyncio.Task[None] | None = None

    def set_calendar(self) -> None:
        """Set the calendar by the system's clock, which may be changed while the gateway runs."""
        self._calendar.offset = time.time() - self._clock()

    async def start(self) -> None:
        """Go on from what is kept, and keep it from now on. Raises StorageError."""
        storage = self._storage()
        self.set_calendar()
        if storage is not None:
            kept = await storage.run(_read)
            self._kept = {(each.tenant, each.span, each.start): each.tokens for each in kept}
            self._quotas.told(kept, self._clock())
        self._task = lasting("the storing of the tokens that tenants use", self._keep)

    async def history(self) -> list[Used]:
        """All windows that are kept, and those of now as they are, by tenant and time."""
        storage, now = self._storage(), {_key(each): each for each in self._quotas.states()}
        kept = [] if storage is None else await storage.run(_read)
        both = {_key(each): each for each in kept} | now
        return [both[key] for key in sorted(both)]

    async def aclose(self) -> None:
        """Write what has come since the last time. The storage is not closed."""
        if self._task is not None:
            await cancel(self._task)
            self._task = None
            await self._write()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            self.set_calendar()
            await self._write()

    async def _write(self) -> None:
        storage, quotas = self._storage(), self._quotas
        if storage is None:
            self._tell(NOT_OPEN if quotas else "")
            return
        changed = [each for each in quotas.states() if self._kept.get(_key(each)) != each.tokens]
        if not changed:
            return
        try:
            await storage.run(lambda database: _put(database, changed))
        except StorageError as error:
            self._tell(f"tokens that tenants use cannot be kept: {error}")
        else:
            self._kept.update({_key(each): each.tokens for each in changed})
            self._tell("")

    def _tell(self, line: str) -> None:
        """A line that was not the last one."""
        if line and line != self._said:
            self._say(line)
        self._said = line


def _key(used: Used) -> tuple[str, str, int]:
    return used.tenant, used.span, used.start


def _read(database: sqlite3.Connection) -> list[Used]:
    rows = database.execute("SELECT tenant, span, start, tokens FROM token_use ORDER BY tenant, span, start")
    return [Used(*row) for row in rows]


def _put(database: sqlite3.Connection, changed: Iterable[Used]) -> None:
    database.executemany(
        "INSERT INTO token_use (tenant, span, start, tokens) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (tenant, span, start) DO UPDATE SET tokens = excluded.tokens",
        [(each.tenant, each.span, each.start, each.tokens) for each in changed],
    )
    newest = max(each.start for each in changed)
    for span, days in (("day", DAYS_KEPT), ("month", MONTHS_KEPT)):
        database.execute("DELETE FROM token_use WHERE span = ? AND start < ?", (span, newest - days * DAY))
