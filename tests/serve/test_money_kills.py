"""SIGKILL of a gateway's processes while calls are at a provider: no budget is exceeded, over midnight neither."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from loadtest.processes import until
from tests.biller import COST, HIGHEST, Biller, call_until_out, spend
from tests.serve.test_processes import POLICY, Processes

pytestmark = pytest.mark.slow

DAY = 1.0
MOST = int(DAY * 1_000_000 * 0.8)  # micro-units: the share of the one tenant
LEAD = 16 * HIGHEST  # by which a mark may be ahead of what is spent and reserved
OUTSIDE = 6  # calls at the provider as processes die
AHEAD = """\
import os, time
_time = time.time
time.time = lambda: _time() + float(open(os.environ["WEIR_TEST_AHEAD"]).read())
"""


class House:
    """A gateway of several processes and its provider. `start` starts it again on the same files."""

    def __init__(self, folder: Path, biller: Biller) -> None:
        self.folder, self.biller = folder, biller
        self.lives: list[Processes] = []
        self.start()

    def start(self) -> None:
        folder = self.folder / f"life-{len(self.lives)}"
        folder.mkdir()
        policy = POLICY + self.biller.policy(folder, DAY).replace("storage: data", f"storage: {self.folder}/data")
        self.lives.append(Processes(folder, policy=policy))

    @property
    def now(self) -> Processes:
        return self.lives[-1]

    def kill(self, who: str) -> None:
        """Kill them, and wait until a whole gateway is there again."""
        roles = ("parent", "decider", "relay") if who == "all" else (who,)
        pids = [each["pid"] for role in roles for each in self.now.of(role)]
        for pid in pids if who == "all" else pids[:1]:
            with contextlib.suppress(ProcessLookupError):  # it has died with its parent
                os.kill(pid, signal.SIGKILL)
        if "parent" in roles:
            self.now.gateway.child.kill()
            self.start()
        assert until(lambda: self.now.whole() and pids[0] not in self.now.all(), 60.0), self.now.gateway.child.output()

    def spend(self, calls: int = 1000) -> None:
        spend(self.now.gateway.url, calls=calls)

    def leave(self, pool: ThreadPoolExecutor) -> None:
        """Have calls wait at the provider."""
        before = self.biller.billed
        self.biller.free.clear()
        for _ in range(OUTSIDE):
            pool.submit(call_until_out, self.now.gateway.url)
        assert until(lambda: self.biller.billed == before + OUTSIDE * COST, 60.0), self.now.gateway.child.output()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with Biller().running() as biller:
        made = House(tmp_path, biller)
        try:
            yield made
        finally:
            for life in made.lives:
                life.gateway.child.kill()
                life.engine.child.stop()


@pytest.mark.parametrize("who", ["decider", "relay", "parent", "all"])
def test_processes_that_die_with_calls_outside_exceed_no_budget(house: House, who: str) -> None:
    kills = 2
    with ThreadPoolExecutor(OUTSIDE * kills) as pool:
        for _ in range(kills):
            house.spend(calls=8)
            house.leave(pool)
            house.kill(who)
            house.biller.free.set()
        house.spend()
    assert house.biller.billed <= MOST
    assert house.biller.billed >= MOST - kills * (LEAD + OUTSIDE * (HIGHEST - COST)) - HIGHEST, "and no more is lost"


@pytest.mark.parametrize("who", ["decider", "all"])
def test_midnight_between_a_call_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, who: str
) -> None:
    """Each day's calls cost no more than its budget, by the day in which the provider got them."""
    ahead = tmp_path / "ahead"

    def at(hour: Callable[[datetime], datetime]) -> None:
        new = tmp_path / "ahead.new"
        new.write_text(str(hour(datetime.now(UTC)).timestamp() - time.time()))
        new.replace(ahead)  # whole at all times: every process of the gateway reads it

    (tmp_path / "sitecustomize.py").write_text(AHEAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WEIR_TEST_AHEAD", str(ahead))
    at(lambda now: now.replace(day=14, hour=23, minute=30))
    house: House = request.getfixturevalue("house")
    with ThreadPoolExecutor(OUTSIDE) as pool:
        house.spend(calls=40)
        house.leave(pool)
        at(lambda now: now.replace(day=15, hour=0, minute=30))
        house.kill(who)
        assert house.biller.billed <= MOST
        first = house.biller.billed
        house.biller.free.set()
        house.spend()
    second = house.biller.billed - first
    assert MOST - LEAD - OUTSIDE * HIGHEST <= second <= MOST
