"""Storage of gateways that run: one at a time, over upgrades, and none that cannot be opened."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from gateway.core.admission.quotas import Calendar, QuotaBook
from gateway.core.money.book import MoneyBook
from gateway.core.policy.policy import Policy
from gateway.serve.starting import StartError
from gateway.serve.stored import check, opened, storage_of
from gateway.serve.token_use import TokenUse
from gateway.shared.storage import Storage
from loadtest.processes import until
from tests.serve.test_upgrades import POLICY, children_of, world

STORED = f"{POLICY}storage: kept\n"


def locked(folder: Path) -> bool:
    """Whether a gateway uses the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_upgrades_and_a_killed_decider_pass_it_on(tmp_path: Path, words: tuple[str, ...]) -> None:
    with world(tmp_path, *words, policy=STORED) as made:
        assert locked(tmp_path / "kept")
        for _ in range(2):
            assert made.signalled() is not None, made.output()
            assert until(lambda: locked(tmp_path / "kept"), 60.0) is not None, made.output()
        if words:
            decider = children_of(made.main())[0]
            os.kill(decider, signal.SIGKILL)
            assert until(lambda: not Path(f"/proc/{decider}").exists(), 60.0) is not None, "its lock is gone with it"
            assert until(lambda: locked(tmp_path / "kept"), 60.0) is not None, made.output()
    assert until(lambda: not locked(tmp_path / "kept"), 60.0) is not None


def newer(folder: Path) -> None:
    database = sqlite3.connect(folder / "weir.db")
    database.execute("PRAGMA user_version = 1000")
    database.execute("PRAGMA application_id = 1464158546")
    database.close()


def stored(folder: Path) -> Storage:
    found = storage_of(folder / "policy.yaml", Policy(storage="kept"))
    assert found is not None
    return found


def unused(storage: Storage | None) -> TokenUse:
    """Of a gateway that counts nothing."""
    money = MoneyBook(Policy(), Calendar())
    return TokenUse(lambda: storage, QuotaBook(Policy()), money, Calendar(), float, lambda _: None, lambda: None)


def test_a_file_that_cannot_be_used_keeps_the_gateway_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        first = stored(tmp_path)
        use = unused(first)
        await opened(first, use)
        second = stored(tmp_path)
        await check(second)
        with pytest.raises(StartError, match=r"^storage: .*kept: another gateway uses this storage"):
            await opened(second, unused(second))
        await use.aclose()
        await first.aclose()
        newer(tmp_path / "kept")
        with pytest.raises(StartError, match=r"^storage: .*weir\.db: a newer gateway has written it"):
            await check(second)
        await second.aclose()

    monkeypatch.setattr("gateway.serve.stored.RELEASED_WITHIN", 0.0)
    asyncio.run(scenario())


def test_a_policy_without_one_keeps_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        storage = storage_of(tmp_path / "policy.yaml", Policy())
        assert storage is None
        await check(storage)
        use = unused(storage)
        await opened(storage, use)
        await use.aclose()

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []
