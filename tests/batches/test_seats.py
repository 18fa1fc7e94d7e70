"""Seats of lines: slow calls of one tenant, or of one batch, shut nobody out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.batches.site import Seats


class Lines:
    """Tasks that want a seat, and keep it until they are told to go."""

    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self.seated: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def want(self, tenant: str, batch: int, number: int) -> None:
        for each in range(number):
            name = f"{tenant}/{batch}/{each}"
            self.tasks[name] = asyncio.create_task(self._sit(name, tenant, batch))

    async def _sit(self, name: str, tenant: str, batch: int) -> None:
        async with self.seats.seat(tenant, batch):
            self.seated.append(name)
            await asyncio.Event().wait()

    def count(self, prefix: str) -> int:
        return sum(name.startswith(prefix) and not self.tasks[name].done() for name in self.seated)

    async def leave(self, names: list[str]) -> None:
        for name in names:
            self.tasks[name].cancel()
        await asyncio.gather(*(self.tasks[name] for name in names), return_exceptions=True)
        await turns()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(main: Callable[[Lines], Coroutine[Any, Any, None]], seats: int) -> None:
    async def whole() -> None:
        lines = Lines(Seats(seats))
        await main(lines)
        await lines.leave(list(lines.tasks))
        assert lines.seats.taken == 0
        assert (lines.seats._taken, lines.seats._waiting) == ({}, {})

    asyncio.run(whole())


def test_a_tenant_whose_lines_are_slow_shuts_nobody_out() -> None:
    async def main(lines: Lines) -> None:
        lines.want("acme", 1, 100)
        await turns()
        assert lines.count("acme") == 8  # all that there are
        lines.want("globex", 2, 100)
        await turns()
        assert (lines.count("acme"), lines.count("globex")) == (8, 4)  # its part, at once
        await lines.leave([name for name in lines.seated if name.startswith("acme")][:6])
        assert (lines.count("acme"), lines.count("globex")) == (4, 4)  # even parts, once slow lines have ended

    run(main, 8)


def test_a_tenants_own_slow_batch_does_not_shut_out_its_others() -> None:
    async def main(lines: Lines) -> None:
        lines.want("acme", 1, 100)
        lines.want("globex", 3, 100)
        await turns()
        lines.want("acme", 2, 100)
        await turns()
        assert (lines.count("acme/1"), lines.count("acme/2"), lines.count("globex")) == (8, 2, 4)

    run(main, 8)


def test_each_has_one_however_many_there_are() -> None:
    async def main(lines: Lines) -> None:
        for number in range(5):
            lines.want(f"tenant{number}", number, 3)
            await turns()
        assert [lines.count(f"tenant{number}") for number in range(5)] == [2, 1, 1, 1, 1]

    run(main, 2)


def test_a_line_that_is_given_up_while_it_waits_leaves_its_place_to_the_next() -> None:
    async def main(lines: Lines) -> None:
        lines.want("acme", 1, 4)
        await turns()
        lines.tasks["acme/1/1"].cancel()
        lines.tasks["acme/1/0"].cancel()  # whose seat goes to none that was given up
        await turns()
        assert lines.seated == ["acme/1/0", "acme/1/2"]

    run(main, 1)


def test_lines_behind_others_of_their_batch_cost_nothing_until_one_leaves() -> None:
    """Of hundreds of tenants each line would be compared with all of them."""
    looks = 0

    class Counted(Seats):
        def _hand_out(self) -> None:
            nonlocal looks
            looks += 1
            super()._hand_out()

    async def main() -> None:
        lines = Lines(Counted(4))
        for tenant in ("acme", "globex"):
            lines.want(tenant, 1, 100)
            await turns()
        assert looks <= 10
        assert (lines.count("acme"), lines.count("globex")) == (4, 2)
        await lines.leave(list(lines.tasks))

    asyncio.run(main())
