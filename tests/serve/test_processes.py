"""`gateway serve --workers 2`: processes are killed, stopped and restarted under load, and clients do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from loadtest.processes import Child, ChildError, Gateway, answers, free_port, get, until
from sidecar.process.process_family import look
from tests.busy_callers import BusyCallers
from tests.e2e.children import Call, SimEngine

pytestmark = pytest.mark.slow

POLICY = "fleet: {poll: 100ms, health: 20s}\nbudget: {max_concurrency: 4}\n"
MESSAGES: list[Any] = [{"role": "user", "content": "Why is the river level?"}]


class Processes:
    """A gateway of several processes over one engine."""

    def __init__(self, folder: Path, *more: str, policy: str = POLICY) -> None:
        self.engine = SimEngine(folder / "engine.log")
        self.policy = folder / "policy.yaml"
        self.policy.write_text(policy)
        words = ("--workers", "2", "--policy", str(self.policy), "--engine", self.engine.url, "--log", "none", *more)
        self.gateway = Gateway(folder / "gateway.log", *words)

    def of(self, role: str) -> list[dict[str, Any]]:
        """The processes of a role, as /processes has them."""
        found = json.loads(get(f"{self.gateway.control}/processes")[1])["processes"]
        return [each for each in found if each["role"] == role]

    def pid(self, role: str) -> int:
        return int(self.of(role)[0]["pid"])

    def all(self) -> list[int]:
        return [each["pid"] for role in ("parent", "decider", "relay") for each in self.of(role)]

    def replaced(self, role: str, pid: int) -> None:
        """Wait until another process has the place of this one."""
        # Whoever asks while there is no decider waits for the next.
        there = until(lambda: self.whole() and pid not in [each["pid"] for each in self.of(role)], 60.0)
        assert there is not None, self.gateway.child.output()

    def whole(self) -> bool:
        return len(self.of("decider")) == 1 and len(self.of("relay")) == 2

    def held(self) -> int:
        return sum(engine["held_tokens"] for engine in self.gateway.fleet()["engines"])


@contextlib.contextmanager
def processes(folder: Path, *more: str, policy: str = POLICY) -> Iterator[Processes]:
    made = Processes(folder, *more, policy=policy)
    try:
        yield made
        assert "Traceback" not in made.gateway.child.output(), made.gateway.child.output()
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.gateway.child.stop()
        made.engine.child.stop()


def under_load(made: Processes, role: str, number: signal.Signals, retries: int) -> Counter[str]:
    """The endings of calls while a process of `role` gets a signal and another takes its place."""

    async def main() -> Counter[str]:
        async with BusyCallers(made.gateway.url, 16, streams=4, fresh=0, retries=retries) as load:
            await load.more(40)
            pid = made.pid(role)
            os.kill(pid, number)
            await asyncio.to_thread(made.replaced, role, pid)
            await load.more(60)
        return load.ended

    return asyncio.run(main())


def counted(made: Processes, calls: int) -> None:
    """Wait until the total says so many calls: a client may have its answer's end before the relay has counted it."""
    total = lambda: made.gateway.total("weir_requests_total")  # noqa: E731
    assert until(lambda: total() == calls, 60.0) is not None, total()


def test_several_processes_serve_as_one(tmp_path: Path) -> None:
    with processes(tmp_path) as made:
        ended, _ = asyncio.run(_plain(made))
        assert set(ended) == {"ok"}
        counted(made, ended["ok"])
        assert len(set(made.all())) == 4
        assert sum(each["calls"] for each in made.of("relay")) == ended["ok"]
        for _ in range(200):  # connections go to whoever is awake first: on busy cores often to the same relay
            if min(each["calls"] for each in made.of("relay")):
                break
            assert Call(made.gateway.url, stream=False).read()[0] == 200
        assert min(each["calls"] for each in made.of("relay")) > 0, "both relays take connections"
        assert until(made.gateway.idle, 60.0) is not None
        before = made.all()
        assert made.gateway.child.stop(60.0) == 0
        assert not [pid for pid in before if Path(f"/proc/{pid}").exists()]


async def _plain(made: Processes) -> tuple[Counter[str], None]:
    async with BusyCallers(made.gateway.url, 16, streams=4, fresh=0) as load:
        await load.more(100)
    return load.ended, None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_client_notices_that_the_decider_dies_or_hangs(tmp_path: Path, number: signal.Signals) -> None:
    with processes(tmp_path) as made:
        ended = under_load(made, "decider", number, retries=0)
        assert set(ended) == {"ok"}, ended
        counted(made, ended["ok"])
        assert until(lambda: made.held() == 0, 60.0) is not None
        tenants = lambda: made.gateway.total("weir_tenant_requests_total", outcome="ok")  # noqa: E731
        assert until(lambda: tenants() == ended["ok"], 60.0) is not None, tenants()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_relay_that_dies_or_hangs_takes_only_its_own_connections_with_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    with processes(tmp_path) as made:
        ended = under_load(made, "relay", number, retries=2)
        streams = {what: calls for what, calls in ended.items() if what != "ok"}
        assert sum(streams.values()) <= 4, "only streams that had begun cannot be retried"
        assert until(lambda: made.held() == 0, 60.0) is not None


def test_counts_of_a_relay_that_has_died_outlive_the_decider_too(tmp_path: Path) -> None:
    with processes(tmp_path) as made:
        ended, _ = asyncio.run(_plain(made))
        counted(made, ended["ok"])  # all is told by now
        for role in ("relay", "decider"):
            pid = made.pid(role)
            os.kill(pid, signal.SIGKILL)
            made.replaced(role, pid)
        counted(made, ended["ok"])  # a relay that does not tell the new decider at once is left out of a look
        assert until(lambda: made.gateway.total("weir_connections") == 0, 60.0) is not None


def test_no_connection_is_refused_while_a_relay_has_a_seat(tmp_path: Path) -> None:
    """The bound on connections is each relay's own. Many come at once: who accepts first could take them all."""
    most = 8
    bound = f"budget: {{max_concurrency: 100}}\nserver: {{max_connections: {most}}}\ntrusted_proxies: [127.0.0.1]\n"
    with processes(tmp_path, policy=POLICY.partition("\n")[0] + "\n" + bound) as made:
        made.engine.faults(hang=True)  # whoever is let in stays
        running = lambda: made.gateway.total("weir_running_calls")  # noqa: E731
        calls = [Call(made.gateway.url, stream=True) for _ in range(2 * most)]
        assert until(lambda: running() == 2 * most, 60.0) is not None, f"{running()} running"
        assert made.gateway.total("weir_wire_refusals_total") == 0
        assert Call(made.gateway.url, stream=True).read()[0] == 503, "all are full"
        for call in calls:
            call.close()


def test_nobody_is_left_behind_by_a_parent_that_is_killed(tmp_path: Path) -> None:
    with processes(tmp_path) as made:
        pids = made.all()
        os.kill(made.pid("relay"), signal.SIGSTOP)
        os.kill(made.pid("parent"), signal.SIGKILL)
        left = lambda: [pid for pid in pids[1:] if runs(pid)]  # noqa: E731
        assert until(lambda: not left(), 60.0) is not None, left()


def state(pid: int) -> str:
    """The kernel's letter for a process: "T" while it is stopped, "Z" once it has ended and its parent has not taken
    note; "" once it is gone."""
    seen = look(pid)
    return "" if seen is None else seen.state


def runs(pid: int) -> bool:
    """Whether a process has not ended; whose zombie it is, once its parent is gone, is the machine's business."""
    seen = look(pid)
    return seen is not None and not seen.ended


@pytest.mark.parametrize("role", ["decider", "relay"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_end_that_comes_to_a_child_alone_takes_nothing_away(
    tmp_path: Path, role: str, number: signal.Signals
) -> None:
    async def main() -> Counter[str]:
        async with BusyCallers(made.gateway.url, 16, streams=4, fresh=0) as load:
            await load.more(20)
            for _ in range(2):
                os.kill(made.pid(role), number)
            await load.more(100)
        return load.ended

    with processes(tmp_path) as made:
        before = made.all()
        assert set(asyncio.run(main())) == {"ok"}
        assert made.all() == before
        assert get(f"{made.gateway.control}/readyz")[0] == 200


@pytest.mark.parametrize("order", [("relay", "decider", "parent"), ("decider", "relay", "parent"), ("parent", "relay")])
def test_a_drain_ends_streams_well_and_refuses_what_comes_later(tmp_path: Path, order: tuple[str, ...]) -> None:
    """Also where all processes are told to end, as service managers may do it, in whatever order they are."""

    async def main(made: Processes) -> None:
        pids = [each["pid"] for role in order for each in made.of(role)]
        async with openai.AsyncOpenAI(base_url=f"{made.gateway.url}/v1", api_key="none", max_retries=0) as client:
            streams = [
                await client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=200, stream=True)
                for _ in range(4)
            ]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # a relay without a stream has ended by another's signal
                    os.kill(pid, signal.SIGTERM)
            ends = [[choice.finish_reason async for chunk in each for choice in chunk.choices][-1] for each in streams]
            assert None not in ends
        assert await asyncio.to_thread(made.gateway.child.process.wait, 30.0) == 0

    with processes(tmp_path) as made:
        asyncio.run(main(made))
        with pytest.raises(ConnectionRefusedError):
            get(f"{made.gateway.url}/health")


def test_where_it_listens_is_told_by_the_next_decider_if_the_first_dies_before(tmp_path: Path) -> None:
    control = f"127.0.0.1:{free_port()}"
    (tmp_path / "policy.yaml").write_text("fleet: {health: 60s}\n")  # 15 s for the first answer
    with socket.create_server(("127.0.0.1", 0)) as silent:
        serve = [sys.executable, "-m", "gateway.cli", "serve", "--workers", "2", "--listen", "127.0.0.1:0"]
        serve += ["--control", control, "--engine", f"http://127.0.0.1:{silent.getsockname()[1]}"]
        serve += ["--policy", str(tmp_path / "policy.yaml"), "--log", "none"]
        with Child("gateway", serve, tmp_path / "log") as child:
            assert until(lambda: answers(f"http://{control}/livez"), 60.0) is not None, child.output()
            found = json.loads(get(f"http://{control}/processes")[1])["processes"]
            os.kill(next(each["pid"] for each in found if each["role"] == "decider"), signal.SIGKILL)
            if "data port" in child.output():
                pytest.skip("this machine took 15 s for what came before: the first decider has told")
            silent.close()
            child.line(rf"^data port \S+\ncontrol port http://({control})$", 60.0)


def test_a_reload_is_for_every_process(tmp_path: Path) -> None:
    keys = "tenants: {acme: {class: interactive}, anonymous: {class: batch}}\n"
    with processes(tmp_path) as made:
        assert _classes(made) == {"default"}
        made.policy.write_text(POLICY + keys)
        made.gateway.child.says("version 2 is active")
        assert until(lambda: _classes(made) == {"batch"}, 60.0) is not None


def _classes(made: Processes) -> set[str]:
    """The classes of calls on many connections, so through both relays."""

    async def main() -> set[str]:
        found = set()
        for _ in range(8):
            async with openai.AsyncOpenAI(base_url=f"{made.gateway.url}/v1", api_key="none") as client:
                raw = await client.chat.completions.with_raw_response.create(
                    model="sim", messages=MESSAGES, max_tokens=2
                )
                found.add(raw.headers["x-weir-class"])
        return found

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--log", "/nowhere/log"), "--log /nowhere/log: No such file or directory"),
        (("--listen", "192.0.2.1:1"), "--listen 192.0.2.1:1: Cannot assign requested address"),
        (("--policy", "absent.yaml"), "absent.yaml"),
    ],
)
def test_several_processes_that_cannot_start_end_with_one_line(
    tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    with pytest.raises(ChildError) as told:
        Gateway(tmp_path / "log", "--workers", "2", "--engine", "http://127.0.0.1:9", *words)
    output = (tmp_path / "log").read_text()
    assert output.count(line) >= 1, output
    assert "Traceback" not in output
    assert "exit 2" in str(told.value)


def test_the_console_is_told_the_calls_of_every_relay(tmp_path: Path) -> None:
    with processes(tmp_path) as made:
        with openai.OpenAI(api_key="x", base_url=f"{made.gateway.url}/v1") as client:
            for _ in range(4):
                client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=4)
        told: list[Any] = []
        with httpx.stream("GET", f"{made.gateway.control}/events?calls=0", trust_env=False, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ["):
                    told += json.loads(line.removeprefix("data: "))
                if len(told) == 4:
                    break
        assert {(call[5], call[7]) for call in told} == {("sim", "ok")}
