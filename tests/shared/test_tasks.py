"""Tasks that must live begin anew, say that they fail until they are in order, and end when they are cancelled. What is
not done in time is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.shared import tasks
from gateway.shared.tasks import done_within, failing, lasting


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "LATEST", "IN_ORDER"):
        monkeypatch.setattr(tasks, name, 0.01)


def test_a_task_that_must_live_begins_anew_and_says_so_until_it_is_in_order() -> None:
    told: list[dict[str, Any]] = []
    errors = [RuntimeError("gone"), RuntimeError("gone"), ValueError("other")]

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        lives = asyncio.Event()

        async def life() -> None:
            if errors:
                raise errors.pop(0)
            lives.set()
            await asyncio.Event().wait()

        task = lasting("the watch", life)
        async with asyncio.timeout(60):
            await lives.wait()
            (line,) = failing()
            assert line.startswith("the watch, since 2")
            assert line.endswith(": RuntimeError('gone')"), "the first error, with its time"
            while failing():
                await asyncio.sleep(0.001)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(main())
    assert [(each["message"], str(each["exception"])) for each in told] == [
        ("the watch failed, and begins anew", "gone"),
        ("the watch failed, and begins anew", "other"),
    ]


def test_one_that_is_cancelled_while_it_fails_is_named_no_more() -> None:
    async def main() -> None:
        async def life() -> None:
            raise RuntimeError

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        task = lasting("the watch", life)
        async with asyncio.timeout(60):
            while not failing():
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert failing() == []

    asyncio.run(main())


def test_one_that_returns_has_ended() -> None:
    async def main() -> None:
        async def life() -> None:
            return

        await lasting("the watch", life)

    asyncio.run(main())


def test_what_is_not_done_in_time_is_cancelled_and_an_error_is_its_own() -> None:
    cancelled: list[str] = []

    async def work(seconds: float, *, fails: bool = False) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append("late")
            raise
        if fails:
            raise ValueError("its own")

    async def main() -> None:
        assert await done_within(work(0.0), 60.0)
        assert not await done_within(work(60.0), 0.01)
        assert cancelled == ["late"]
        with pytest.raises(ValueError, match="its own"):
            await done_within(work(0.0, fails=True), 60.0)

    asyncio.run(main())
