"""Requests of the sidecar to an engine: a simulated one over TCP and a unix socket, stopped and killed midway, and a
server that answers anything. No connection, task or descriptor is left (`play` asserts it).
"""

from __future__ import annotations

import asyncio
import gzip
import inspect
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import pytest

from loadtest.processes import Child, free_port
from sidecar.core.inventory import Size
from sidecar.core.step_times import StepTimes
from sidecar.core.vllm import Completion, steps_from
from sidecar.process.engine_api import ANSWER_LIMIT, ApiError, EngineApi, Kind
from sidecar.residency.sleep_steps import LATE
from tests.sidecar.scripted import Scripted, answer, engine, play, stopped

Ask = Callable[[EngineApi], Awaitable[object]]
ASKED: dict[str, Ask] = {
    "health": lambda api: api.health(),
    "models": lambda api: api.models(),
    "gauges": lambda api: api.gauges(),
    "is_sleeping": lambda api: api.is_sleeping(),
    "alive": lambda api: api.alive(),
    "warm_up": lambda api: api.warm_up("hello", 1),
    "canary": lambda api: api.canary(),
    "sleep": lambda api: api.sleep(1),
    "wake": lambda api: api.wake(1),
    "wake from 2": lambda api: api.wake(2),
}


@pytest.fixture(scope="module", params=["tcp", "unix"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Child, str]]:
    folder = tmp_path_factory.mktemp("engine")
    where = ["--uds", str(folder / "s")] if request.param == "unix" else ["--port", "0"]
    with engine(folder, "--speed", "10", *where) as (child, origin):
        yield child, origin


def test_a_step_may_take_as_long_as_the_sidecar_itself_expects() -> None:
    gib = 1 << 30
    times = StepTimes("deepseek", "deepseek", eager=False, machine={})
    times.seen.disk = 0.1 * gib  # the slowest of published starts
    size = Size(weights=250 * gib, stored=642 * gib)  # a GPU of 288 GB; DeepSeek-R1
    longest = {"sleep": times.sleep_seconds(size, 1, first=True), "wake": max(times.wake_seconds(size))}
    for step, expected in longest.items():
        within = inspect.signature(getattr(EngineApi, step)).parameters["within"].default
        assert expected + LATE < within, step


async def fails(kind: Kind, question: Awaitable[object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await question
    assert caught.value.kind == kind, caught.value
    return caught.value


async def post(api: EngineApi, target: str, body: object = None) -> None:
    await api._ask("POST", target, 5.0, body)


async def busy(api: EngineApi) -> int:
    sample = await api.gauges()
    return sample.running + sample.waiting


# -- an engine that is well -------------------------------------------------------------------------------------------


def test_how_an_engine_is(running: tuple[Child, str]) -> None:
    async def scene() -> None:
        async with aclosing(EngineApi(running[1], "m")) as api:
            await api.health()
            assert await api.models() == {"m": 32_768}
            assert await api.is_sleeping() is False
            await api.alive()
            gauges = await api.gauges()
            assert (gauges.running, gauges.waiting, gauges.kv_usage, gauges.capacity_tokens) == (0, 0, 0.0, 409_600)
            assert gauges.sleep_state == "awake"

    play(scene)


def test_warm_up_and_canary(running: tuple[Child, str]) -> None:
    async def scene() -> None:
        async with aclosing(EngineApi(running[1], "m")) as api:
            before = steps_from(await api._metrics(5.0))
            await api.warm_up("hello", 3)
            assert steps_from(await api._metrics(5.0)) - before >= 3 * 16  # tokens alone
            first = await api.canary()
            assert len(first.text) > 16
            assert await api.canary() == first

    play(scene)


@pytest.mark.parametrize(("level", "state"), [(1, "weights_offloaded"), (2, "discard_all")])
def test_sleep_and_wake(running: tuple[Child, str], level: Literal[1, 2], state: str) -> None:
    async def scene() -> None:
        async with aclosing(EngineApi(running[1], "m")) as api:
            recorded = await api.canary()
            await api.sleep(level)
            await api.health()  # which is why health does not tell
            assert await api.is_sleeping() is True
            assert (await api.gauges()).sleep_state == state
            await api.wake(level)
            assert await api.is_sleeping() is False
            assert await api.canary() == recorded
            await api.wake(level)  # once more does no harm

    play(scene)


def test_the_canary_tells_a_wake_without_its_weights(running: tuple[Child, str]) -> None:
    async def scene() -> None:
        async with aclosing(EngineApi(running[1], "m")) as api:
            recorded = await api.canary()
            await api.sleep(2)
            await post(api, "/wake_up")  # as for level 1
            assert await api.is_sleeping() is False
            await api.alive()
            assert await api.canary() != recorded
            await post(api, "/collective_rpc", {"method": "reload_weights"})
            assert await api.canary() == recorded

    play(scene)


def test_sleep_waits_for_what_runs(running: tuple[Child, str]) -> None:
    """And says `timeout` where that takes too long; the engine goes to sleep all the same."""

    async def scene() -> None:
        async with aclosing(EngineApi(running[1], "m")) as api:
            await post(api, "/_faults", {"hang": True})
            under_way = asyncio.create_task(api.canary())
            while not await busy(api):
                await asyncio.sleep(0.001)
            await fails("timeout", api.sleep(1, within=3.0))  # enough to ask for the version, and for the sleep
            await fails("timeout", api.is_sleeping(within=0.1))
            await post(api, "/_faults", {})
            assert (await under_way).text
            while not await api.is_sleeping():
                await asyncio.sleep(0.001)
            await api.wake(1)

    play(scene)


def test_the_loop_is_free_of_proxies(running: tuple[Child, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def scene() -> None:
        async with aclosing(EngineApi(running[1], "m")) as api:
            await api.health()

    play(scene)


# -- alive ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dev_mode", [True, False])
def test_a_stopped_engine_is_not_alive(running: tuple[Child, str], dev_mode: bool) -> None:
    async def scene() -> None:
        async with aclosing(EngineApi(running[1], "m", dev_mode=dev_mode)) as api:
            with stopped(running[0]):
                began = time.monotonic()
                await fails("timeout", api.alive(0.1))
                assert time.monotonic() - began >= 0.1
            await api.alive()

    play(scene)


def test_without_dev_mode_an_idle_engine_must_make_a_token(running: tuple[Child, str]) -> None:
    async def scene() -> None:
        async with aclosing(EngineApi(running[1], "m", dev_mode=False)) as api:
            before = steps_from(await api._metrics(5.0))
            await api.alive()
            assert steps_from(await api._metrics(5.0)) > before
            await post(api, "/_faults", {"hang": True})
            await api.health()
            assert "/v1/completions" in str(await fails("timeout", api.alive(3.0)))  # it is asked how busy it is first
            await post(api, "/_faults", {})
            await api.alive()

    play(scene)


@pytest.mark.slow
def test_without_dev_mode_a_busy_engine_must_make_steps(running: tuple[Child, str]) -> None:
    async def scene() -> None:
        async with aclosing(EngineApi(running[1], "m", dev_mode=False)) as api:
            long = asyncio.create_task(api._complete("hello", 30_000, 60.0))
            while not await busy(api):
                await asyncio.sleep(0.001)
            await api.alive(60.0)
            assert await busy(api)
            await post(api, "/_faults", {"hang": True})
            # An engine that is held up may leave the last question unanswered, which says nothing of its steps.
            while str(error := await fails("timeout", api.alive(4.0))).startswith("/metrics: "):
                pass
            assert str(error) == "no step in 4 s with 1 running and 0 waiting requests: EngineCore hangs"
            long.cancel()
            await asyncio.wait((long,))
            await post(api, "/_faults", {})

    play(scene)


METRICS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"


@pytest.mark.parametrize(("status", "well"), [(404, True), (400, True), (501, True), (500, False), (503, False)])
def test_a_model_that_generates_nothing_is_not_taken_for_dead(status: int, well: bool) -> None:
    async def scene() -> None:
        targets = {"/metrics": answer(METRICS), "/v1/completions": answer(b"no", status)}
        async with Scripted(**targets) as server, aclosing(EngineApi(server.origin, "m", dev_mode=False)) as api:
            if well:
                await api.alive()
            else:
                assert (await fails("status", api.alive())).status == status

    play(scene)


def test_an_engine_of_the_v0_core_without_lora_is_read_and_alive() -> None:
    """vLLM 0.9 and 0.10: its row of adapters is there always."""
    row = b'vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""} 1.7643e+09\n'

    async def scene() -> None:
        targets = {"/metrics": answer(METRICS + row), "/v1/completions": answer(b"no", 404)}
        async with Scripted(**targets) as server, aclosing(EngineApi(server.origin, "m", dev_mode=False)) as api:
            assert (await api.gauges()).lora is None
            await api.alive()

    play(scene)


# -- what is sent -----------------------------------------------------------------------------------------------------


def test_a_sleep_waits_for_what_runs() -> None:
    """Before vLLM 0.17 there is no mode, and what a query says beyond the level is ignored."""

    async def scene() -> None:
        async with Scripted(answer(b"")) as server, aclosing(EngineApi(server.origin, "m")) as api:
            await api.sleep(2)
            assert server.asked == [("POST", "/sleep?level=2&mode=wait", b"")]

    play(scene)


def test_no_header_is_sent_that_is_not_needed() -> None:
    async def scene() -> None:
        async with Scripted(answer(b"")) as server, aclosing(EngineApi(server.origin, "m")) as api:
            await api.health()
            told = {name: value for name, value in server.headers.items() if name not in ("", "host")}
            assert told == {
                "accept-encoding": "identity",
                "connection": "close",
                "user-agent": "weir-sidecar",
            }

    play(scene)


def test_a_canary_is_greedy_and_shorter_than_a_block() -> None:
    async def scene() -> None:
        body = b'{"choices":[{"text":"x","token_ids":[1,2]}]}'
        async with Scripted(answer(body)) as server, aclosing(EngineApi(server.origin, "m")) as api:
            assert await api.canary() == Completion("x", (1, 2))
            asked = json.loads(server.asked[0][2])
            assert (asked["temperature"], asked["seed"], asked["max_tokens"], asked["model"]) == (0, 0, 16, "m")
            assert len(asked["prompt"].split()) < 16
            assert server.headers["content-type"] == "application/json"

    play(scene)


STEPS = ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache", "/reset_prefix_cache"]


def test_the_steps_of_a_wake() -> None:
    async def scene() -> None:
        async with Scripted(answer(b"")) as server, aclosing(EngineApi(server.origin, "m")) as api:
            await api.wake(2)
            assert [(method, target) for method, target, _ in server.asked] == [("POST", step) for step in STEPS]
            assert [json.loads(body or b"null") for _, _, body in server.asked] == [
                None,
                {"method": "reload_weights"},
                None,
                None,
            ]
            server.asked.clear()
            await api.wake(1)
            assert server.asked == [("POST", "/wake_up", b"")]

    play(scene)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("said", "kind"),
    [(answer(b'{"error":"out of memory"}', 500), "status"), (b"", "lost"), (None, "timeout"), (b"?\n\n", "garbage")],
)
def test_a_wake_ends_at_the_step_that_failed_and_names_it(step: str, said: bytes | None, kind: Kind) -> None:
    async def scene() -> None:
        async with Scripted(answer(b""), **{step: said}) as server, aclosing(EngineApi(server.origin, "m")) as api:
            error = await fails(kind, api.wake(2, within=2.0 if kind == "timeout" else 60.0))
            assert str(error).startswith(step)
            assert [target for _, target, _ in server.asked] == STEPS[: STEPS.index(step) + 1]

    play(scene)


@pytest.mark.parametrize(
    ("ask", "target", "said"),
    [
        ("wake from 2", "/reset_prefix_cache", b'{"success":false}'),
        ("wake from 2", "/wake_up?tags=kv_cache", b'{"status":"sleeping","tags":["kv_cache"]}'),
        ("wake", "/wake_up", b'{"status":"sleeping","tags":null}'),
        ("sleep", "/sleep?level=1&mode=wait", b'{"status":"sleeping","level":2}'),
    ],
)
def test_a_200_that_says_no(ask: str, target: str, said: bytes) -> None:
    async def scene() -> None:
        targets = {target: answer(said)}
        async with Scripted(answer(b""), **targets) as server, aclosing(EngineApi(server.origin, "m")) as api:
            assert str(await fails("status", ASKED[ask](api))).startswith(target.partition("&")[0])

    play(scene)


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["127.0.0.1:8000", "https://127.0.0.1:8000", "unix://relative", "unix:/x", ""])
def test_what_is_no_address(origin: str) -> None:
    with pytest.raises(ValueError, match="no engine's address"):
        EngineApi(origin, "m")


@pytest.mark.parametrize("where", ["port", "no file", "stale file", "long path"])
def test_nobody_there_is_refused(where: str, tmp_path: Path) -> None:
    async def scene() -> None:
        origin = f"http://127.0.0.1:{free_port()}"
        if where != "port":
            path = tmp_path / ("x" * 200 if where == "long path" else "s")
            origin = f"unix://{path}"
            if where == "stale file":
                (await asyncio.start_unix_server(lambda *_: None, path)).close()
                assert path.exists()
        async with aclosing(EngineApi(origin, "m")) as api:
            for ask in ASKED.values():
                assert origin in str(await fails("refused", ask(api)))

    play(scene)


JSON_OF_NOBODY = b'{"data":7,"version":7,"is_sleeping":7,"choices":7,"status":7}'
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWERS: dict[str, tuple[bytes, Kind]] = {
    "nothing": (b"", "lost"),
    "half a head": (b"HTTP/1.1 200 OK\r\ncontent-le", "lost"),
    "half a body": (answer(b'{"data":[]}')[:-3], "lost"),
    "half a chunk": (CHUNKED + b"8\r\n{}", "lost"),
    "no last chunk": (CHUNKED + b"2\r\n{}\r\n", "lost"),
    "not HTTP": (b"\x16\x03\x01 this is not HTTP \xff\xfe\r\n\r\n", "garbage"),
    "no chunk": (CHUNKED + b"nonsense\r\n", "garbage"),
    "two lengths": (answer(b"{}", 200, b"content-length: 7"), "garbage"),
    "no length": (b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n", "garbage"),
    "a huge head": (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 200_000 + b"\r\n\r\n", "garbage"),
    "500": (answer(b'{"error":{"message":"EngineCore died"}}', 500), "status"),
    "401": (answer(b'{"error":"Unauthorized"}', 401), "status"),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", "status"),
    "101": (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n{}", "garbage"),
    "elsewhere": (answer(b"", 302, b"location: http://127.0.0.1:1/"), "status"),
}
UNREADABLE: dict[str, bytes] = {
    "HTML": answer(b"<html>"),
    "wrong types": answer(JSON_OF_NOBODY),
    "a list": answer(b"[]"),
    "too deep": answer(b'{"x":' + b"[" * 100_000),
    "not UTF-8": answer(b'{"version":"\xff","status":"\xff"}'),
    "packed": answer(gzip.compress(b'{"is_sleeping":false}'), 200, b"content-encoding: gzip"),
    "no encoding": answer(b"{", 200, b"content-encoding: nonsense", b"set-cookie: \xff=;;=", b"content-type: \xff"),
}


def scripted(said: bytes | None, kind: Kind, in_message: str = "") -> None:
    async def scene() -> None:
        async with Scripted(said) as server, aclosing(EngineApi(server.origin, "m")) as api:
            for name, ask in ASKED.items():
                if name != "health" or said not in UNREADABLE.values():
                    message = str(await fails(kind, ask(api)))
                    assert in_message in message, name
                    assert len(message) < 600

    play(scene)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_are_none(name: str) -> None:
    scripted(*ANSWERS[name])


@pytest.mark.parametrize("name", UNREADABLE)
def test_answers_that_cannot_be_read(name: str) -> None:
    scripted(UNREADABLE[name], "garbage")


def test_an_error_quotes_the_engine_briefly() -> None:
    scripted(answer(b"EngineCore died" + b"!" * 100_000, 500), "status", "it answered 500: 'EngineCore died!!!")
    scripted(answer(b"", 500), "status", "it answered 500: without a word")


@pytest.mark.parametrize("location", [b"http://[", b"//\xff\xfe", b"http://x:99999999/", b"\\\\"])
def test_a_redirect_to_nowhere_is_an_answer_that_is_none(location: bytes) -> None:
    async def scene() -> None:
        said = answer(b"", 302, b"location: " + location)
        async with Scripted(said) as server, aclosing(EngineApi(server.origin, "m")) as api:
            with pytest.raises(ApiError) as caught:
                await api.health()
            assert caught.value.kind in ("status", "garbage")
            assert len(server.asked) == 1

    play(scene)


@pytest.mark.parametrize("piece", [b"10000\r\n" + b"x" * 0x10000 + b"\r\n", b"1\r\nx\r\n"])
def test_a_body_without_end_is_given_up(piece: bytes) -> None:
    """At the limit where it comes fast, at the time where it comes slowly."""

    async def scene() -> None:
        fast = len(piece) > 100
        async with Scripted(CHUNKED) as server, aclosing(EngineApi(server.origin, "m")) as api:
            server.endless = piece
            error = await fails("garbage" if fast else "timeout", api.models(60.0 if fast else 1.0))
            assert str(error) == (
                f"/v1/models: an answer of more than {ANSWER_LIMIT} bytes"
                if fast
                else "/v1/models: no whole answer within 1.0 s"
            )

    play(scene)


def test_interim_answers_do_not_extend_the_time() -> None:
    async def scene() -> None:
        async with Scripted(b"HTTP/1.1 100 Continue\r\n\r\n") as server, aclosing(EngineApi(server.origin, "m")) as api:
            server.endless = server.rest or b""
            await fails("timeout", api.health(0.1))

    play(scene)


def test_every_question_ends_in_time() -> None:
    async def scene() -> None:
        async with Scripted(None) as server, aclosing(EngineApi(server.origin, "m")) as api:
            questions: list[Awaitable[object]] = [api.health(0.1), api.models(0.1), api.gauges(0.1)]
            questions += [api.is_sleeping(0.1)]
            questions += [api.alive(0.1), api.warm_up("x", 2, 0.1), api.canary(0.1), api.sleep(1, within=0.1)]
            questions += [api.wake(1, 0.1), api.wake(2, 0.1)]
            await asyncio.gather(*(fails("timeout", question) for question in questions))

    play(scene)


def test_a_cancelled_question_leaves_nothing() -> None:
    async def scene() -> None:
        async with Scripted(None) as server, aclosing(EngineApi(server.origin, "m")) as api:
            task = asyncio.create_task(api.canary())
            while not server.asked:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while server.open:
                await asyncio.sleep(0.001)

    play(scene)


def test_no_connection_is_kept(running: tuple[Child, str]) -> None:
    async def scene() -> None:
        async with aclosing(EngineApi(running[1], "m")) as api:
            await api.health()
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(20):
                await api.health()
            assert len(os.listdir("/proc/self/fd")) <= before

    play(scene)


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_killed_in_the_middle(name: str, where: str, tmp_path: Path) -> None:
    """The process is stopped, so the question is in its socket; then it is killed, and nobody is there."""

    async def scene() -> None:
        listen = ["--uds", str(tmp_path / "s")] if where == "unix" else ["--port", str(free_port())]
        with engine(tmp_path, *listen) as (child, origin):
            async with aclosing(EngineApi(origin, "m")) as api:
                await api.sleep(2) if "wake" in name else None
                with stopped(child):
                    idle = len(os.listdir("/proc/self/fd"))
                    task = asyncio.ensure_future(ASKED[name](api))
                    while len(os.listdir("/proc/self/fd")) == idle:
                        await asyncio.sleep(0)
                    await asyncio.wait((task,), timeout=0.05)
                    assert not task.done()
                    child.kill()
                    await fails("lost", task)
                await fails("refused", ASKED[name](api))

    play(scene)
