"""Three machines under load: the leader is killed, then the next leader; the third serves on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from pathlib import Path

import pytest

from loadtest.processes import until
from tests.busy_callers import BusyCallers
from tests.cluster.site import Machine, Site, site

pytestmark = pytest.mark.slow


def candidates(leader: Machine, others: list[Machine]) -> None:
    """Wait until any of the others could be elected at once."""
    names = {each.member for each in others}  # beside those that are dead, which may come back
    assert until(lambda: names <= set(leader.cluster().get("candidates", ())), 60.0) is not None, leader.output


def test_the_leading_machine_and_its_successor_die_and_no_other_call_is_lost(tmp_path: Path) -> None:
    """Calls are tried once, on kept and on new connections. Twice as many are open as the engine may have."""

    async def main(made: Site) -> None:
        async with contextlib.AsyncExitStack() as stack:
            loads = {each: await stack.enter_async_context(BusyCallers(each.gateway.url, 3)) for each in made.machines}
            living = list(made.machines)
            while len(living) > 1:
                for each in living:
                    await loads[each].more(4)
                leader = await asyncio.to_thread(made.leader)
                epochs.append(leader.cluster()["epoch"])
                living.remove(leader)
                await asyncio.to_thread(candidates, leader, living)
                ended[leader] = loads[leader].stop()
                leader.signal(signal.SIGKILL)
                granting = lambda alive=tuple(living): any(each.grants() for each in alive)  # noqa: E731
                assert await asyncio.to_thread(until, granting, 60.0) is not None, [each.output for each in living]
            await loads[living[0]].more(8)
            ended[living[0]] = loads[living[0]].stop()

    ended: dict[Machine, Counter[str]] = {}
    epochs: list[int] = []
    with site(tmp_path) as made:
        for _ in range(3):
            made.machine()
        asyncio.run(main(made))
        assert [set(each) for each in ended.values()] == [{"ok"}] * 3, ended
        last = list(ended)[-1]
        assert until(last.gateway.idle, 60.0) is not None, last.gateway.fleet()
        epochs.append(last.cluster()["epoch"])
        assert epochs == sorted(set(epochs))
