"""Blocking calls beside a loop: results, exceptions, and bounded waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from gateway.shared.threads import in_thread, to_its_end


def test_what_a_call_returns_or_raises_comes_back() -> None:
    async def scenario() -> None:
        assert await in_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(FileNotFoundError):
            await in_thread(lambda: open("/no/such/file").close())
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0, raises=(OSError, ZeroDivisionError))

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["late", "cancelled"])
def test_nobody_waits_for_a_call_that_hangs(how: str) -> None:
    hangs = threading.Event()

    async def scenario() -> None:
        task = asyncio.ensure_future(in_thread(hangs.wait, within=0.01 if how == "late" else None))
        if how == "cancelled":
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(TimeoutError if how == "late" else asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    left = [thread for thread in threading.enumerate() if thread.name == "blocking-call"]
    assert [thread.daemon for thread in left] == [True]
    hangs.set()
    left[0].join()


def test_a_caller_that_is_cancelled_waits_for_a_call_that_writes() -> None:
    async def main() -> None:
        begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        def write() -> None:
            begun.set()
            assert go_on.wait(60)
            ended.set()
            raise OSError("the disk is full")

        task = asyncio.ensure_future(to_its_end(write))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        done, _ = await asyncio.wait((task,), timeout=0.05)
        assert not done
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(main())


def test_a_bug_is_told_to_whoever_waits_and_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    hook: Callable[[threading.ExceptHookArgs], None] = lambda found: shown.append(found.exc_type)  # noqa: E731
    monkeypatch.setattr(threading, "excepthook", hook)

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0)

    asyncio.run(scenario())
    for thread in threading.enumerate():
        if thread.name == "blocking-call":
            thread.join()
    assert shown == [ZeroDivisionError]
