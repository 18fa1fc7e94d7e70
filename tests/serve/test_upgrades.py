"""Upgrades under load: another gateway takes over from the one that runs, and no client notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from loadtest.processes import Child, Gateway, free_port, get, total, until
from tests.busy_callers import BusyCallers
from tests.e2e.children import SimEngine
from tests.serve.test_processes import runs, state

pytestmark = pytest.mark.slow

# Room for four calls, where twelve come at once.
POLICY = "fleet: {poll: 100ms, health: 20s}\nbudget: {max_concurrency: 4}\ntimeouts: {drain: 20s}\n"
MESSAGES: list[Any] = [{"role": "user", "content": "Why is the river level?"}]
UPGRADES = 3


class World:
    """A gateway that is taken over again and again, and its engine."""

    def __init__(self, folder: Path, *words: str, policy: str = POLICY) -> None:
        self.engine = SimEngine(folder / "engine.log")
        self.policy = folder / "policy.yaml"
        self.policy.write_text(policy)
        self.words = ("--policy", str(self.policy), "--engine", self.engine.url, "--log", "none", *words)
        self.gateway = Gateway(folder / "gateway.log", *self.words)
        self.url, self.control = self.gateway.url, self.gateway.control

    def main(self) -> int:
        """The process that an operator would signal."""
        found = json.loads(get(f"{self.control}/processes")[1])["processes"]
        return int(found[0]["pid"])

    def signalled(self) -> float | None:
        """Seconds until another gateway has taken over, after SIGUSR2."""
        before = self.main()
        os.kill(before, signal.SIGUSR2)
        return until(lambda: self.main() != before, 60.0)

    def successor(self, child: int = 0) -> tuple[int, int]:
        """The process that SIGUSR2 starts, and one of its children: the first is its decider."""
        before = len(self.output())
        os.kill(self.main(), signal.SIGUSR2)
        found: list[tuple[int, int]] = []

        def there() -> bool:
            started = re.findall(r"process (\d+) was started to take over", self.output()[before:])
            found.extend((pid, born[child]) for pid in map(int, started) if len(born := children_of(pid)) > child)
            return bool(found)

        assert until(there, 60.0, every=0.005) is not None, self.output()
        return found[0]

    def output(self) -> str:
        return self.gateway.child.output()


def children_of(pid: int) -> list[int]:
    """Of a process, in the order of their birth; none, once it has ended."""
    file = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return list(map(int, file.read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return []


@contextlib.contextmanager
def world(folder: Path, *words: str, policy: str = POLICY) -> Iterator[World]:
    made = World(folder, *words, policy=policy)
    try:
        yield made
        assert "Traceback" not in made.output(), made.output()
    finally:
        made.gateway.child.kill()
        made.engine.child.stop()


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_three_upgrades_in_a_row_under_overload_are_noticed_by_nobody(tmp_path: Path, words: tuple[str, ...]) -> None:
    async def main(made: World) -> Counter[str]:
        async with BusyCallers(made.url) as clients:
            await clients.more(20)
            for _ in range(UPGRADES):
                assert await asyncio.to_thread(made.signalled) is not None, made.output()
                await clients.more(20)
        return clients.ended

    with world(tmp_path, *words) as made:
        ended = asyncio.run(main(made))
        assert set(ended) == {"ok"}, ended
        assert until(lambda: _held(made) == 0, 60.0) is not None
        assert until(lambda: total(f"{made.control}/metrics", "weir_requests_total") == ended["ok"], 60.0) is not None


MOMENTS: tuple[Callable[[World, int, str], bool], ...] = (
    lambda made, successor, said: True,  # its decider is there
    lambda made, successor, said: len(children_of(successor)) > 1,  # and a relay
    lambda made, successor, said: len(children_of(successor)) > 2,
    lambda made, successor, said: "is up; serves" in said,  # it may tell the one before to stop
    lambda made, successor, said: "has taken over" in said,
    lambda made, successor, said: made.main() == successor,
)


def test_a_successor_whose_decider_is_killed_in_the_middle_of_it_costs_no_call(tmp_path: Path) -> None:
    """At each of MOMENTS: before it has told the gateway before to stop, after, and once it serves."""

    async def main(made: World) -> Counter[str]:
        async with BusyCallers(made.url) as clients:
            for there in MOMENTS:
                await clients.more(8)
                before = len(made.output())
                successor, decider = await asyncio.to_thread(made.successor)
                reached = lambda now=there, pid=successor, end=before: now(made, pid, made.output()[end:])  # noqa: E731
                assert await asyncio.to_thread(partial(until, reached, 60.0, every=0.005)) is not None, made.output()
                os.kill(decider, signal.SIGKILL)
                over = lambda pid=successor: not Path(f"/proc/{pid}").exists() or made.main() == pid  # noqa: E731
                assert await asyncio.to_thread(until, over, 60.0) is not None, made.output()
            await clients.more(8)
        return clients.ended

    with world(tmp_path, "--workers", "2") as made:
        ended = asyncio.run(main(made))
        assert set(ended) == {"ok"}, ended
        assert until(lambda: _held(made) == 0, 60.0) is not None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_a_successor_whose_relay_dies_before_it_serves_leaves_somebody_who_serves(
    tmp_path: Path, number: signal.Signals
) -> None:
    """It has given up then, and its decider may not have the gateway before stop any more."""

    async def main(made: World) -> None:
        async with openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as client:
            create = client.chat.completions.create
            streams = [await create(model="sim", messages=MESSAGES, max_tokens=400, stream=True) for _ in range(2)]
            successor, relay = await asyncio.to_thread(made.successor, 1)
            os.kill(relay, number)
            over = lambda: not Path(f"/proc/{successor}").exists() or made.main() == successor  # noqa: E731
            assert await asyncio.to_thread(until, over, 60.0) is not None, made.output()
            for each in streams:
                assert [choice.finish_reason async for chunk in each for choice in chunk.choices][-1] is not None
            assert await _some_calls(made) == {"ok": 4}

    with world(tmp_path, "--workers", "2") as made:
        for _ in range(3):
            asyncio.run(main(made))


def test_a_successor_that_is_told_to_end_before_it_serves_leaves_the_one_that_runs(tmp_path: Path) -> None:
    with world(tmp_path, "--workers", "2") as made:
        for _ in range(10):
            before, said = made.main(), len(made.output())
            successor, _ = made.successor()
            os.kill(successor, signal.SIGSTOP)  # from here on nobody tells the one before to stop
            assert until(lambda pid=successor: state(pid) == "T", 60.0) is not None
            if "is up; serves" not in made.output()[said:]:
                break
            os.kill(successor, signal.SIGCONT)
            assert until(lambda pid=successor: made.main() == pid, 60.0) is not None, made.output()
        else:
            pytest.fail("this test was held up ten times")
        os.kill(successor, signal.SIGTERM)
        os.kill(successor, signal.SIGCONT)
        assert until(lambda: not Path(f"/proc/{successor}").exists(), 60.0) is not None, made.output()
        assert made.main() == before
        assert asyncio.run(_some_calls(made)) == {"ok": 4}


def test_a_successor_that_is_stopped_takes_nothing_away_and_takes_over_once_it_goes_on(tmp_path: Path) -> None:
    with world(tmp_path, "--workers", "2") as made:
        before = made.main()
        successor, _ = made.successor()
        os.kill(successor, signal.SIGSTOP)
        assert until(lambda: state(successor) == "T", 60.0) is not None
        assert asyncio.run(_some_calls(made)) == {"ok": 4}
        assert made.main() == before
        os.kill(successor, signal.SIGCONT)
        assert until(lambda: made.main() == successor, 60.0) is not None, made.output()
        assert asyncio.run(_some_calls(made)) == {"ok": 4}


def test_a_gateway_that_is_killed_while_another_starts_to_take_over_is_replaced(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        serve = [sys.executable, "-m", "gateway.cli", "serve", *made.words, "--take-over"]
        serve += ["--listen", made.url.removeprefix("http://"), "--control", made.control.removeprefix("http://")]
        os.kill(made.main(), signal.SIGKILL)
        made.gateway.child.process.wait(60.0)
        second = Child("second", serve, tmp_path / "second.log")
        try:
            second.line(r"^(control port \S+)", 60.0)
            assert asyncio.run(_some_calls(made)) == {"ok": 4}
            assert get(f"{made.control}/readyz")[0] == 200
        finally:
            second.kill()


def _held(made: World) -> int:
    return sum(engine["held_tokens"] for engine in json.loads(get(f"{made.control}/fleet")[1])["engines"])


def test_a_new_one_that_cannot_start_leaves_the_one_that_runs_as_it_is(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        before = made.main()
        made.policy.write_text("classes: 1\n")
        os.kill(before, signal.SIGUSR2)
        made.gateway.child.line(r"^gateway: (\S+policy\.yaml:1: )", 60.0)
        started = int(made.gateway.child.line(r"process (\d+) was started to take over", 60.0))
        assert until(lambda: not runs(started), 60.0) is not None, "it has told its mistake, and ends"
        assert asyncio.run(_some_calls(made)) == {"ok": 4}
        assert made.main() == before
        made.policy.write_text(POLICY)
        assert made.signalled() is not None, "the next is tried again"
        assert asyncio.run(_some_calls(made)) == {"ok": 4}


async def _some_calls(made: World) -> dict[str, int]:
    ended: Counter[str] = Counter()
    asks = openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0, timeout=60.0)
    async with asks as client:
        for _ in range(4):
            await client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=2)
            ended["ok"] += 1
    return dict(ended)


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_a_unix_socket_is_handed_over_with_its_path(tmp_path: Path, words: tuple[str, ...]) -> None:
    path = tmp_path / "data.sock"
    engine = SimEngine(tmp_path / "engine.log")
    free = free_port()
    serve = [sys.executable, "-m", "gateway.cli", "serve", "--engine", engine.url, "--log", "none", *words]
    serve += ["--listen", f"unix:{path}", "--control", f"127.0.0.1:{free}"]
    first = Child("first", serve, tmp_path / "first.log")
    second = third = None
    try:
        first.line(r"^(control port \S+)", 60.0)
        second = Child("second", [*serve, "--take-over"], tmp_path / "second.log")
        second.line(r"^(control port \S+)", 60.0)
        assert first.process.wait(60.0) == 0, first.output()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        third = Child("third", [*serve, "--take-over", str(tmp_path / "nobody")], tmp_path / "third.log")
        assert third.process.wait(60.0) == 2
        assert "no gateway of this user runs" in third.output()
        assert second.stop(60.0) == 0
        assert not path.exists(), "who has it last removes it"
    finally:
        for each in (first, second, third, engine.child):
            if each is not None:
                each.kill()
