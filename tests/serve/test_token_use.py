"""Token counts that outlast a gateway: a restart, SIGKILL, a killed decider, an upgrade, and a disk that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core.admission.quotas import DAY, Calendar, QuotaBook, Used
from gateway.core.money.book import MoneyBook
from gateway.core.money.tariff import MICRO
from gateway.core.policy.file import decode
from gateway.serve import token_use
from gateway.serve.token_use import DAYS_KEPT, MONTHS_KEPT, NOT_OPEN, TokenUse
from gateway.shared.storage import Storage, StorageError
from loadtest.processes import get, until
from tests.plain_http import NOBODY
from tests.serve.test_upgrades import POLICY, World, children_of, world

QUOTA = f"{POLICY}storage: kept\nlimits: {{quota: {{month: 300}}}}\n"


def used(made: World) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(f"{made.control}/usage")[1])["tenants"]["anonymous"]["month"]
    return found


def ask(made: World, tokens: int = 20) -> httpx.Response:
    body = {"model": "sim", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": tokens}
    return httpx.post(f"{made.url}/v1/chat/completions", json=body, timeout=60.0, trust_env=False, verify=NOBODY)


def kept(folder: Path) -> int:
    """Tokens in the file, as another program sees them while the gateway runs."""
    with contextlib.closing(sqlite3.connect(f"file:{folder}/kept/weir.db?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT tokens FROM token_use WHERE span = 'month'").fetchall()
    return sum(tokens for (tokens,) in rows)


def money_kept(folder: Path) -> int:
    """Micro-units of this month in the file, as another program sees them while the gateway runs."""
    with contextlib.closing(sqlite3.connect(f"file:{folder}/kept/weir.db?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT micro FROM money_use WHERE span = 'month' AND model != ''").fetchall()
    return sum(micro for (micro,) in rows)


def spent(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["total_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_what_is_used_is_counted_to_the_token_over_an_upgrade_and_a_kill(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    with world(tmp_path, *words, policy=QUOTA) as made:
        total = sum(spent(ask(made)) for _ in range(3))
        assert until(lambda: used(made)["used"] == total, 60.0) is not None, (used(made), total)
        assert made.signalled() is not None, made.output()
        assert until(lambda: used(made)["used"] == total, 60.0) is not None, (used(made), total)
        if words:
            os.kill(children_of(made.main())[0], signal.SIGKILL)
            assert until(lambda: used(made)["used"] == total, 60.0) is not None, (used(made), total)
        total += spent(ask(made))
        made.policy.write_text(QUOTA.replace("month: 300", f"month: {total + 5}"))
        assert until(lambda: used(made)["quota"] == total + 5, 60.0) is not None
        refused = ask(made)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert 0 < int(refused.headers["retry-after"]) <= 31 * 86_400
        assert until(lambda: kept(tmp_path) == total, 60.0) is not None, "within a second, is promised"
        csv = get(f"{made.control}/usage?format=csv")[1].decode()
        assert any(line.startswith("anonymous,month,") and line.endswith(f",{total},,,") for line in csv.splitlines())
        made.gateway.child.kill()
    with world(tmp_path, *words, policy=QUOTA) as made:
        assert used(made)["used"] == total


PRICE = 3600  # an hour, so one a second
PRICED = f"{POLICY}storage: kept\nengines_price: {PRICE}/hour\n"


def at_home(made: World) -> tuple[float, int]:
    """Money and tokens of this month on own engines."""
    rows = json.loads(get(f"{made.control}/usage")[1])["engines"]["spent"]
    found = [row for row in rows if row["window"] == "month"]
    assert {(row["tenant"], row["model"]) for row in found} <= {("anonymous", "sim")}
    return sum(row["money"] for row in found), sum(row["tokens"] for row in found)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_what_calls_on_own_engines_cost_is_told_and_outlasts_an_upgrade_and_a_kill(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    with world(tmp_path, *words, policy=PRICED) as made:
        began, total = time.monotonic(), 0
        for calls in range(1, 4):  # one after another: each has the engine for itself
            total += spent(ask(made))
            assert until(lambda tokens=total: at_home(made)[1] == tokens, 60.0) is not None, (at_home(made), calls)
        money, busy = at_home(made)[0], time.monotonic() - began
        assert 0.0 < money <= busy, "no more than the time in which it had calls"
        assert made.signalled() is not None, made.output()
        assert until(lambda: at_home(made) == (money, total), 60.0) is not None, (at_home(made), money)
        total += spent(ask(made))
        assert until(lambda: at_home(made)[1] == total, 60.0) is not None, (at_home(made), total)
        more = at_home(made)[0]
        assert more > money
        line = f",{total},own engines,sim,{more:.6f}"

        def listed() -> bool:
            lines = get(f"{made.control}/usage?format=csv")[1].decode().splitlines()
            return any(each.startswith("anonymous,month,") and each.endswith(line) for each in lines)

        assert until(listed, 60.0) is not None, line
        assert until(lambda: money_kept(tmp_path) == round(more * MICRO), 60.0) is not None, "else a kill forgets it"
        made.gateway.child.kill()
    with world(tmp_path, *words, policy=PRICED) as made:
        assert at_home(made) == (more, total)


POLICIES = "tenants: {a: {}}\nstorage: kept\n"


class Books:
    """Counts of one gateway, at a clock that stands still."""

    def __init__(self, storage: Storage | None) -> None:
        policy = decode(POLICIES.encode())
        self.calendar = Calendar()
        self.quotas = QuotaBook(policy, self.calendar)
        self.said: list[str] = []
        money = MoneyBook(policy, self.calendar)
        self.use = TokenUse(
            lambda: storage, self.quotas, money, self.calendar, lambda: 5.0, self.said.append, lambda: None
        )

    def add(self, tokens: int) -> None:
        for window in self.quotas.of("a"):
            window.settle(0, tokens, 5.0)

    @property
    def used(self) -> list[int]:
        return [window.used(5.0) for window in self.quotas]


def test_counts_go_on_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        for start in (0, 7):
            storage = Storage(tmp_path)
            made = Books(storage)
            made.use.set_calendar()
            await storage.open()
            try:
                await made.use.start()
                assert made.used == [start, start]
                made.add(7)
                found = await made.use.history()
                assert [(each.span, each.tokens) for each in found] == [("day", start + 7), ("month", start + 7)]
                await made.use.aclose()
            finally:
                await storage.aclose()
            assert made.said == []

    asyncio.run(scenario())


def kept_after(folder: Path, *written: list[Used]) -> list[tuple[str, int]]:
    """Windows that are left in the file after these writings: span and day."""

    async def scenario() -> list[Used]:
        storage = Storage(folder)
        try:
            await storage.open()
            for rows in written:
                began = {(each.span, each.start) for each in rows}
                await storage.run(partial(token_use._put, changed=rows, spent=[], began=began))
            return await storage.run(token_use._read)
        finally:
            await storage.aclose()

    return [(each.span, each.start // DAY) for each in asyncio.run(scenario())]


def test_windows_of_long_ago_are_forgotten(tmp_path: Path) -> None:
    days = [Used("a", "day", DAY * day, 1) for day in range(DAYS_KEPT + 3)]
    months = [Used("a", "month", DAY * 31 * month, 1) for month in range(MONTHS_KEPT + 2)]
    others = [Used("b", "day", DAY * (DAYS_KEPT + 2), 1)]
    left = kept_after(tmp_path, *([each] for each in days + months), others)
    assert left == [
        *(("day", day) for day in range(3, DAYS_KEPT + 3)),
        *(("month", 31 * month) for month in range(2, MONTHS_KEPT + 2)),
        ("day", DAYS_KEPT + 2),
    ]


def test_a_restart_while_the_clock_is_far_ahead_empties_no_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time()

    async def scenario() -> None:
        for ahead, used in ((0, [0, 0]), (1500, [0, 0]), (0, [7, 7])):
            monkeypatch.setattr(time, "time", lambda: real + DAY * ahead)  # noqa: B023
            storage = Storage(tmp_path)
            made = Books(storage)
            await storage.open()
            try:
                await made.use.start()
                assert made.used == used
                made.add(7)
                await made.use.aclose()
            finally:
                await storage.aclose()

    asyncio.run(scenario())


def test_a_new_window_forgets_the_oldest_in_the_file(tmp_path: Path) -> None:
    days = [Used("a", "day", DAY * day, 1) for day in range(1, DAYS_KEPT + 1)]

    async def scenario() -> None:
        storage = Storage(tmp_path)
        try:
            await storage.open()
            await storage.run(partial(token_use._put, changed=days, spent=[], began=set()))
            made = Books(storage)
            await made.use.start()
            made.add(7)
            await made.use.aclose()
            left = [each.start for each in await storage.run(token_use._read) if each.span == "day"]
            assert (len(left), left[0]) == (DAYS_KEPT, DAY * 2)
        finally:
            await storage.aclose()

    asyncio.run(scenario())


def test_a_clock_that_is_far_behind_deletes_nothing_of_what_it_writes(tmp_path: Path) -> None:
    days = [Used("a", "day", DAY * (1000 + day), 1) for day in range(DAYS_KEPT)]
    assert ("day", 5) in kept_after(tmp_path, days, [Used("a", "day", DAY * 5, 1)])


def test_a_disk_that_fails_is_told_once_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        storage, fails = Storage(tmp_path), True
        made = Books(storage)
        tries = 0

        async def run(work: Any) -> Any:
            nonlocal tries
            tries += 1
            if fails and tries > 1:
                raise StorageError("the disk is full: free space there")
            return await Storage.run(storage, work)

        monkeypatch.setattr(storage, "run", run)
        try:
            await storage.open()
            await made.use.start()
            made.add(7)
            async with asyncio.timeout(60):
                while tries < 4:
                    await asyncio.sleep(0)
            assert made.said == ["tokens that tenants use cannot be kept: the disk is full: free space there"]
            fails = False
            await made.use.aclose()
            assert {each.tokens for each in await storage.run(token_use._read)} == {7}
        finally:
            await storage.aclose()

    monkeypatch.setattr(token_use, "EVERY", 0.0)
    asyncio.run(scenario())


def test_storage_that_came_with_a_reload_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        made = Books(None)
        await made.use.start()
        made.add(7)
        assert [each.tokens for each in await made.use.history()] == [7, 7]
        for _ in range(10):
            await asyncio.sleep(0)
        await made.use.aclose()
        assert made.said == [NOT_OPEN]

    monkeypatch.setattr(token_use, "EVERY", 0.0)
    asyncio.run(scenario())
