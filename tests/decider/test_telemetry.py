"""Telemetry against engines on real sockets: its requests, its results in the fleet, and its speed."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.trouble import REASONS
from gateway.core.policy.policy import Policy
from gateway.decider import telemetry
from gateway.decider.telemetry import Telemetry, Watcher
from gateway.shared.vllm.answers import ModelCard
from loadtest.processes import free_port
from loadtest.simulate import vtime
from tests.running_time import RunningTime

METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",engine="0"} 1.0
"""
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}).encode()
FAST = msgspec.structs.replace(
    Policy(), fleet=msgspec.structs.replace(Policy().fleet, poll=0.02, health=0.05), timeouts=Policy().timeouts
)
WITHIN = 60.0  # seconds any of these tests may wait for an event


class FakeEngine:
    """An HTTP server that answers from `answers` (path -> status, body); a path not in it never gets an answer."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {
            "/health": (200, b""),
            "/v1/models": (200, MODELS),
            "/metrics": (200, METRICS),
        }
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.lines = b""  # more of an answer's head
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def listen(self, path: Path | None = None) -> None:
        if path is not None:
            self._server = await asyncio.start_unix_server(self._answer, path)
        else:
            self.port = self.port or free_port()  # one that nobody else is given where it is closed for a while
            self._server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def close(self) -> None:
        """As if killed: nothing listens and every connection ends."""
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = request.split("\r\n")
                path = first.split()[1]
                pairs = [line.split(": ", 1) for line in lines if line]
                self.asked.append((path, {name.lower(): value for name, value in pairs}))
                if path in self.answers:
                    status, body = self.answers[path]
                    head = b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n" % (status, self.lines, len(body))
                    writer.write(head + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()


class Scene:
    """A fleet, its telemetry, and a way to wait until something is so."""

    def __init__(self, *urls: str, policy: Policy = FAST, keys: dict[str, str] | None = None) -> None:
        self.fleet = Fleet()
        for index, url in enumerate(urls):
            self.fleet.add(Engine(f"e{index}", url, policy))
        self.changes = 0
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.telemetry = Telemetry(self.fleet, self._on_change, loop.time)
        for engine in self.fleet:
            self.telemetry.watch(engine, (keys or {}).get(engine.id))
        self.telemetry.start()

    def __getitem__(self, id: str) -> Engine:
        return self.fleet.engines[id]

    def _on_change(self, _: Engine) -> None:
        self.changes += 1
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """The fleet changes only before `on_change`, so it is looked at only then."""
        async with asyncio.timeout(WITHIN):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


def play(scene: Callable[[FakeEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = FakeEngine()
        await engine.listen()
        try:
            await scene(engine)
        finally:
            await engine.close()

    asyncio.run(main())


def test_first_contact_tells_models_health_and_a_sample() -> None:
    async def scene(engine: FakeEngine) -> None:
        its = Scene(engine.url, keys={"e0": "secret"})
        await its.telemetry.first_contact()
        assert its["e0"].health.up
        assert list(its.fleet.models) == ["m"]
        assert its.fleet.context("m") == 4096
        assert its["e0"].ledger.capacity == 16_000
        assert its["e0"].sample is not None
        assert (its["e0"].sample.running, its["e0"].sample.waiting) == (3, 1)
        # The models come before the health that opens the engine, and the key goes with every question.
        assert [path for path, _ in engine.asked[:3]] == ["/health", "/v1/models", "/metrics"]
        assert {headers["authorization"] for _, headers in engine.asked} == {"Bearer secret"}
        await its.telemetry.aclose()

    play(scene)


def test_samples_and_checks_go_on_and_wake_what_waits() -> None:
    async def scene(engine: FakeEngine) -> None:
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        first = its["e0"].sampled_at
        engine.answers["/metrics"] = (200, METRICS.replace(b" 3.0", b" 7.0"))
        await its.until(lambda: its["e0"].sample is not None and its["e0"].sample.running == 7)
        assert its["e0"].sampled_at > first
        assert its.changes > 2
        # One list of models is enough while the engine stays up.
        assert [path for path, _ in engine.asked].count("/v1/models") == 1
        await its.telemetry.aclose()

    play(scene)


@pytest.mark.parametrize(
    "bad",
    [
        (200, b"garbage\n"),
        (200, METRICS[:-1]),
        (200, b""),
        (500, METRICS),
        (200, b"#" * (9 * 1024 * 1024) + b"\n" + METRICS),
    ],
    ids=["garbage", "cut off", "empty", "500", "huge"],
)
def test_a_bad_scrape_is_no_sample(bad: tuple[int, bytes]) -> None:
    async def scene(engine: FakeEngine) -> None:
        engine.answers["/metrics"] = bad
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        assert its["e0"].health.up
        assert its["e0"].sample is None
        engine.answers["/metrics"] = (200, METRICS)
        await its.until(lambda: its["e0"].sample is not None)
        await its.telemetry.aclose()

    play(scene)


@pytest.mark.slow
def test_an_engine_that_does_not_answer_metrics_still_has_its_health_checked() -> None:
    async def scene(engine: FakeEngine) -> None:
        del engine.answers["/metrics"]
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        assert its["e0"].health.up
        engine.answers["/health"] = (503, b"")
        await its.until(lambda: not its["e0"].health.up)
        await its.telemetry.aclose()

    play(scene)


@pytest.mark.parametrize("state", ["weights_offloaded", "discard_all", "paused"])
def test_an_engine_that_says_it_sleeps_gets_no_calls_until_it_says_that_it_is_awake(state: str) -> None:
    asleep = METRICS + f'vllm:engine_sleep_state{{engine="0",sleep_state="{state}"}} 1.0\n'.encode()

    async def scene(engine: FakeEngine) -> None:
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        assert its["e0"].health.up
        engine.answers["/metrics"] = (200, asleep)
        await its.until(lambda: not its["e0"].health.up)
        trouble = its["e0"].health.trouble
        assert trouble is not None
        assert (trouble.reason, trouble.words) == ("asleep", f"it says that it sleeps ({state})")
        await its.until(lambda: its["e0"].health.misses == 2)  # its /health says 200 all the while
        engine.answers["/metrics"] = (200, METRICS)
        await its.until(lambda: its["e0"].health.up)
        await its.telemetry.aclose()

    play(scene)


def test_an_engine_that_sleeps_at_first_contact_is_not_up() -> None:
    async def scene(engine: FakeEngine) -> None:
        engine.answers["/metrics"] = (200, METRICS + b'vllm:engine_sleep_state{sleep_state="discard_all"} 1.0\n')
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        assert not its["e0"].health.up
        assert list(its.fleet.models) == ["m"]
        await its.telemetry.aclose()

    play(scene)


def test_the_sleep_of_an_engine_that_drains_is_its_sidecars_to_tell() -> None:
    async def scene(engine: FakeEngine) -> None:
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        its["e0"].draining = True
        engine.answers["/metrics"] = (200, METRICS + b'vllm:engine_sleep_state{sleep_state="discard_all"} 1.0\n')
        await its.until(lambda: its["e0"].sample is not None and its["e0"].sample.sleep_state == "discard_all")
        assert its["e0"].health.up
        await its.telemetry.aclose()

    play(scene)


@pytest.mark.parametrize("answer", [None, (503, b""), (200, b"{}"), (200, b'{"data": 1}')])
def test_an_engine_whose_models_are_not_known_is_not_up(answer: tuple[int, bytes] | None) -> None:
    async def scene(engine: FakeEngine) -> None:
        if answer is None:
            await engine.close()  # nothing listens at all
        else:
            engine.answers["/v1/models"] = answer
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        assert not its["e0"].health.up
        if answer is None:
            await engine.listen()
        engine.answers["/v1/models"] = (200, MODELS)
        await its.until(lambda: its["e0"].health.up)
        assert list(its.fleet.models) == ["m"]
        await its.telemetry.aclose()

    play(scene)


def test_three_misses_take_it_out_and_two_hits_bring_it_back_with_its_new_models() -> None:
    async def scene(engine: FakeEngine) -> None:
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        engine.answers["/health"] = (503, b"")
        await its.until(lambda: its["e0"].health.misses == 1)
        assert its["e0"].health.up
        await its.until(lambda: not its["e0"].health.up)
        assert its["e0"].health.misses == 3
        engine.answers["/v1/models"] = (200, MODELS.replace(b'"m"', b'"other"'))
        engine.answers["/health"] = (200, b"")
        await its.until(lambda: its["e0"].health.hits == 1)
        assert not its["e0"].health.up
        await its.until(lambda: its["e0"].health.up)
        assert list(its.fleet.models) == ["other"]
        await its.telemetry.aclose()

    play(scene)


def test_a_killed_engine_goes_out_and_comes_back_and_its_neighbour_does_not_notice() -> None:
    async def scene(engine: FakeEngine) -> None:
        other = FakeEngine()
        await other.listen()
        its = Scene(engine.url, other.url)
        await its.telemetry.first_contact()
        await engine.close()
        await its.until(lambda: not its["e0"].health.up)
        assert its["e1"].health.up
        assert its["e1"].health.misses == 0
        await engine.listen()
        await its.until(lambda: its["e0"].health.up)
        await its.telemetry.aclose()
        await other.close()

    play(scene)


@pytest.mark.slow
def test_with_the_default_intervals_a_hung_engine_is_out_within_five_seconds() -> None:
    async def scene(engine: FakeEngine) -> None:
        clock = RunningTime(asyncio.get_running_loop().time)
        its = Scene(engine.url, policy=Policy())
        await its.telemetry.first_contact()
        engine.answers.clear()  # it accepts, and says nothing more: a stopped process
        ticking = asyncio.create_task(clock.tick())
        began = clock()
        await its.until(lambda: not its["e0"].health.up)
        assert clock() - began < 5.0
        ticking.cancel()
        await its.telemetry.aclose()

    play(scene)


def test_a_check_that_we_were_too_busy_to_follow_counts_for_nothing() -> None:
    async def scene(engine: FakeEngine) -> None:
        times = iter([10.0, 11.0, 20.0, 20.25])
        fleet = Fleet()
        fleet.add(Engine("e0", engine.url, FAST))
        watcher = Watcher(Telemetry(fleet, lambda _: None, lambda: next(times)), fleet.engines["e0"], None)
        engine.answers["/health"] = (503, b"")
        await watcher._check_health()  # by the clock it took 1 s of the 0.25 s allowed
        assert fleet.engines["e0"].health.misses == 0
        times = iter([20.0, 20.25, 20.25])
        await watcher._check_health()
        assert fleet.engines["e0"].health.misses == 1
        await watcher.aclose()

    play(scene)


def test_unix_sockets_base_paths_and_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    async def scene(engine: FakeEngine) -> None:
        on_unix = FakeEngine()
        await on_unix.listen(tmp_path / "e.sock")
        engine.answers = {f"/base{path}": answer for path, answer in engine.answers.items()}
        its = Scene(f"unix://{tmp_path}/e.sock", f"{engine.url}/base/")
        await its.telemetry.first_contact()
        assert its["e0"].health.up
        assert its["e1"].health.up
        await its.telemetry.aclose()
        await on_unix.close()

    play(scene)


def test_an_engines_cookies_are_not_kept() -> None:
    async def scene(engine: FakeEngine) -> None:
        engine.lines = b"set-cookie: a=b\r\nset-cookie: \xff=\xff\r\n"
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        changes = its.changes
        await its.until(lambda: its.changes > changes + 2)  # the watchers go on
        assert its["e0"].health.up
        assert not any("cookie" in fields for _, fields in engine.asked)
        await its.telemetry.aclose()

    play(scene)


def test_garbage_instead_of_http_is_a_miss() -> None:
    async def main() -> None:
        async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\0\xff" * 4000 + b"\n")
            writer.close()

        server = await asyncio.start_server(garbage, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        its = Scene(f"http://127.0.0.1:{port}", f"https://127.0.0.1:{port}")
        await its.telemetry.first_contact()
        await its.until(lambda: all(engine.health.misses for engine in its.fleet))
        assert not any(engine.health.up for engine in its.fleet)
        await its.telemetry.aclose()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "answer", "reason", "words"),
    [
        ("/health", (503, b""), "status", "GET /health was answered 503"),
        ("/health", (404, b""), "status", "answered 404: is this a vLLM, and its URL without a path?"),
        ("/v1/models", (401, b""), "status", "GET /v1/models was answered 401: it wants its key, see api_key_file"),
        ("/v1/models", (200, b"{}"), "models", "GET /v1/models was not answered with a list of models"),
        ("/health", None, "timeout", "GET /health was not answered within 0.25 s"),
        ("/health", (200, b"#" * (64 * 1024 + 1)), "garbage", "the answer is over 65536 bytes"),
        ("", None, "refused", "connection refused"),
    ],
)
def test_a_failed_check_has_a_reason_and_words(
    path: str, answer: tuple[int, bytes] | None, reason: str, words: str
) -> None:
    async def scene(engine: FakeEngine) -> None:
        if not path:
            await engine.close()
        elif answer is None:
            del engine.answers[path]
        else:
            engine.answers[path] = answer
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        trouble = its["e0"].health.trouble
        assert trouble is not None
        assert (trouble.reason, reason in REASONS) == (reason, True)
        assert words in trouble.words
        assert its["e0"].health.checked_at >= trouble.at > 0.0
        before = its["e0"].health.check_failures[reason]
        await its.until(lambda: its["e0"].health.check_failures[reason] > before)
        await its.telemetry.aclose()

    play(scene)


def test_names_that_hang_starve_no_other_engines_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    speak = threading.Event()

    def hangs(host: str, *_: object, **__: object) -> list[object]:
        if host == "good":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
        speak.wait(60.0)
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer about {host}")

    monkeypatch.setattr(socket, "getaddrinfo", hangs)

    async def scene(engine: FakeEngine) -> None:
        its = Scene(*(f"http://hangs-{number}:1" for number in range(20)), engine.url.replace("127.0.0.1", "good"))
        good = its["e20"]
        await its.until(lambda: good.health.up)
        checks = [path for path, _ in engine.asked].count("/health")
        await its.until(lambda: [path for path, _ in engine.asked].count("/health") > checks + 5)
        assert good.health.misses == 0
        await its.until(lambda: all(each.health.trouble for each in its.fleet if each is not good))
        first = its["e0"].health.trouble
        assert first is not None
        assert (first.reason, first.words[:40]) == ("name", "the name hangs-0 does not resolve: no an")
        await its.telemetry.aclose()

    try:
        play(scene)
    finally:
        speak.set()


def test_want_of_descriptors_is_no_fault_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(engine: FakeEngine) -> None:
        fleet = Fleet()
        fleet.add(Engine("e0", engine.url, FAST))
        loop = asyncio.get_running_loop()

        async def none_left(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(loop, "create_connection", none_left)
        watcher = Watcher(Telemetry(fleet, lambda _: None, loop.time), fleet.engines["e0"], None)
        assert not await watcher._check_health()
        assert fleet.engines["e0"].health.misses == 0
        await watcher.aclose()

    play(scene)


def test_who_waits_for_a_first_answer_is_woken_by_it_and_not_for_ever() -> None:
    async def scene(engine: FakeEngine) -> None:
        silent = FakeEngine()
        await silent.listen()
        silent.answers.clear()
        its = Scene(engine.url, silent.url)
        assert its.fleet.unasked == {"e0", "e1"}
        await its.telemetry.asked(lambda: its.fleet.serving("m"), 10.0)
        assert (its["e0"].health.up, its.fleet.unasked >= {"e1"}) == (True, True)
        await its.telemetry.asked(lambda: False, 0.001)
        assert "e1" in its.fleet.unasked
        await its.telemetry.asked(lambda: False, 10.0)
        assert its.fleet.unasked == set()
        await its.telemetry.asked(lambda: False, 10.0)  # nobody is to be waited for
        await its.telemetry.aclose()
        await silent.close()

    play(scene)


def test_an_adapter_that_was_unloaded_is_gone_soon_after_a_404(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "DOUBTED_FOR", 0.1)

    async def scene(engine: FakeEngine) -> None:
        both = [{"id": "m", "max_model_len": 4096}, {"id": "lora", "parent": "m"}]
        engine.answers["/v1/models"] = 200, json.dumps({"object": "list", "data": both}).encode()
        its = Scene(engine.url)
        await its.telemetry.first_contact()
        assert sorted(its.fleet.models) == ["lora", "m"]
        engine.answers["/v1/models"] = 200, MODELS
        its["e0"].health.doubted = True
        await its.until(lambda: list(its.fleet.models) == ["m"])
        assert not its["e0"].health.doubted
        await its.telemetry.aclose()

    play(scene)


@pytest.mark.parametrize(("down", "checks"), [(10, 30), (1000, 210)])
def test_many_engines_that_are_down_share_the_checks_of_a_second(
    down: int, checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def refused(self: telemetry.Questions, within: float) -> None:
        asked.append(self._url)
        raise telemetry.Unanswered("connect", "connection refused")

    async def main() -> None:
        its = Scene(*(f"http://127.0.0.1:{port}" for port in range(1, down + 1)), policy=Policy())
        await its.telemetry.first_contact()
        await asyncio.sleep(30)
        asked.clear()
        await asyncio.sleep(10)
        assert len(its.telemetry.out) == down
        await its.telemetry.aclose()
        assert not its.telemetry.out

    monkeypatch.setattr(telemetry.Questions, "health", refused)
    vtime.run(main())
    assert len(asked) <= 10 * checks
    assert set(asked) == {f"http://127.0.0.1:{port}" for port in range(1, down + 1)}


def test_one_that_hangs_among_a_thousand_that_are_down_is_out_as_soon_as_among_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    well = ["http://127.0.0.1:1"]

    async def health(self: telemetry.Questions, within: float) -> None:
        if self._url not in well:
            await asyncio.sleep(within)
            raise telemetry.Unanswered("timeout", "it hangs")

    async def models(self: telemetry.Questions, within: float) -> list[ModelCard]:
        return [ModelCard(id="m")]

    async def metrics(self: telemetry.Questions, within: float) -> bytes:
        return METRICS

    async def main() -> None:
        its = Scene(*(f"http://127.0.0.1:{port}" for port in range(1, 1001)), policy=Policy())
        await its.telemetry.first_contact()
        await asyncio.sleep(30)
        assert its["e0"].health.up
        well.clear()
        await asyncio.sleep(4.4)
        assert not its["e0"].health.up
        await its.telemetry.aclose()

    for name, fake in (("health", health), ("models", models), ("metrics", metrics)):
        monkeypatch.setattr(telemetry.Questions, name, fake)
    vtime.run(main())


def test_a_watcher_that_dies_is_reported() -> None:
    async def scene(engine: FakeEngine) -> None:
        reported: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.set_result(context))
        fleet = Fleet()
        fleet.add(Engine("e0", engine.url, FAST))

        def broken(_: Engine) -> None:
            raise ZeroDivisionError

        watching = Telemetry(fleet, broken, asyncio.get_running_loop().time)
        watching.watch(fleet.engines["e0"], None)
        watching.start()
        context = await asyncio.wait_for(reported, WITHIN)
        assert isinstance(context["exception"], ZeroDivisionError)
        await watching.aclose()

    play(scene)
