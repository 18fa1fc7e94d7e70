"""Readiness of an engine: one that starts, never starts, hangs, dies, or is another process."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import Child, free_port
from sidecar.core.start_progress import StartProgress
from sidecar.core.vllm import steps_from
from sidecar.process.engine_api import ApiError, EngineApi
from sidecar.process.start_evidence import ready
from tests.sidecar.scripted import Scripted, answer, engine, play

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

NOBODY = "unix:///nonexistent/socket"
SAID = answer(b'{"choices":[{"text":"x"}]}')


def serving(*names: str) -> bytes:
    return answer(json.dumps({"data": [{"id": name} for name in names]}).encode())


async def wait(
    api: EngineApi,
    *,
    stall: float = 60.0,
    limit: float | None = None,
    look: Callable[[StartProgress], None] | None = None,
    dead: Awaitable[object] | None = None,
    requests: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    progress = StartProgress(clock(), stall)

    async def looks() -> None:
        if look is not None:
            look(progress)

    await ready(api, progress, limit, clock, dead=dead or never, look=looks, requests=requests)
    assert not never.cancelled()


async def fails(waiting: Awaitable[None]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await waiting
    return caught.value


@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_a_process_that_starts_meanwhile(where: str, tmp_path: Path) -> None:
    async def scene() -> None:
        port = free_port()
        origin = f"unix://{tmp_path}/s" if where == "unix" else f"http://127.0.0.1:{port}"
        listen = ["--uds", f"{tmp_path}/s"] if where == "unix" else ["--port", str(port)]
        async with aclosing(EngineApi(origin, "m")) as api:
            waiting = asyncio.create_task(wait(api, requests=2))
            argv = [sys.executable, "-m", "loadtest.engine", "--model", "m", "--speed", "10", *listen]
            with Child("engine", argv, tmp_path / "log"):
                await waiting
                assert steps_from(await api._metrics(5.0)) >= 32.0  # the tokens of two requests

    play(scene)


def test_each_stage_is_asked_until_it_is_so() -> None:
    async def scene() -> None:
        targets: dict[str, Any] = {
            "/health": [b"", answer(b"", 503), answer(b"")],
            "/v1/models": [b"", answer(b"{}"), serving(), serving("other"), serving("other", "m")],
            "/v1/completions": SAID,
        }
        async with Scripted(**targets) as server, aclosing(EngineApi(server.origin, "m")) as api:
            await wait(api, requests=3)
            asked = [target for _, target, _ in server.asked]
            assert asked == ["/health"] * 3 + ["/v1/models"] * 5 + ["/v1/completions"] * 3

    play(scene)


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        ({}, "/health: the connection ended"),
        ({"/health": answer(b"", 503)}, "/health: it answered 503"),
        ({"/health": answer(b""), "/v1/models": serving("other")}, "it serves ['other'], not 'm'"),
        ({"/health": answer(b""), "/v1/models": b"HTTP/9 ?\r\n\r\n"}, "what answers is not HTTP"),
        (
            {"/health": answer(b""), "/v1/models": serving("m"), "/v1/completions": None},
            "warm-up request 1 of 1 is not answered",
        ),
    ],
)
def test_without_progress_it_is_given_up_and_says_why(targets: dict[str, Any], why: str) -> None:
    """A stall of the test's clock passes once the last stage was asked: again, where it is answered."""
    last = list(targets or ["/health"])[-1]
    least = 1 if targets.get(last, b"") is None else 2

    async def scene() -> None:
        async with Scripted(b"", **targets) as server, aclosing(EngineApi(server.origin, "m")) as api:

            def clock() -> float:
                return 0.2 if [target for _, target, _ in server.asked].count(last) >= least else 0.0

            error = await fails(wait(api, stall=0.2, clock=clock))
            assert (error.kind, why in str(error)) == ("timeout", True), error
            assert "not ready after 0.2 s, 0.2 s of them without progress" in str(error)

    play(scene)


def test_progress_that_is_seen_extends_the_time() -> None:
    """A quarter of a second of the test's clock passes with each look. Progress is seen by the first six; a stall is
    1 s."""

    async def scene() -> None:
        now = 0.0

        def look(progress: StartProgress) -> None:
            nonlocal now
            now += 0.25
            if now <= 1.5:
                progress.reached("it got on", now)

        async with aclosing(EngineApi(NOBODY, "m")) as api:
            error = await fails(wait(api, stall=1.0, look=look, clock=lambda: now))
        words = r"([\d.]+) s of them without progress \(the last, 1\.5 s after its start: it got on\)"
        said = re.search(words, str(error))
        assert said is not None, error
        assert float(said[1]) >= 1.0

    play(scene)


def test_a_stage_reached_extends_the_time() -> None:
    """Four answers, each of which takes more than half a stall by the test's clock."""

    async def scene() -> None:
        targets = {"/v1/models": serving("m"), "/v1/completions": SAID}
        async with Scripted(answer(b""), **targets) as server, aclosing(EngineApi(server.origin, "m")) as api:
            server.delay = 0.8  # so that the time is looked at meanwhile
            await wait(api, stall=1.0, requests=2, clock=lambda: 0.6 * len(server.asked))
            assert len(server.asked) == 4

    play(scene)


def test_the_hard_limit_ends_also_what_gets_on() -> None:
    async def scene() -> None:
        began = time.monotonic()
        async with aclosing(EngineApi(NOBODY, "m")) as api:
            gets_on = lambda progress: progress.reached("it got on", time.monotonic())  # noqa: E731
            error = await fails(wait(api, stall=0.1, limit=0.3, look=gets_on, dead=asyncio.Event().wait()))
            assert time.monotonic() - began >= 0.3
        assert error.kind == "timeout"

    play(scene)


def test_a_process_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    async def scene() -> None:
        with engine(tmp_path) as (child, origin):
            async with aclosing(EngineApi(origin, "another name")) as api:
                waiting = asyncio.ensure_future(
                    fails(wait(api, dead=asyncio.to_thread(child.process.wait), stall=60.0))
                )
                await api.models()
                assert not waiting.done()
                child.kill()
                error = await waiting
                assert error.kind == "lost", "and no stall, which would take a minute"
                assert str(error).startswith("the process ended before it was ready: ")

    play(scene)


def test_one_that_had_ended_before_is_not_even_asked() -> None:
    async def scene() -> None:
        dead: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        dead.set_result(1)
        async with Scripted(b"") as server, aclosing(EngineApi(server.origin, "m")) as api:
            assert (await fails(wait(api, dead=dead))).kind == "lost"
            assert server.asked == []

    play(scene)


@pytest.mark.parametrize(("said", "kind"), [(answer(b"", 500), "status"), (b"", "lost"), (answer(b"{}"), "garbage")])
def test_a_warm_up_that_fails_is_not_repeated(said: bytes, kind: str) -> None:
    async def scene() -> None:
        targets = {"/v1/models": serving("m"), "/v1/completions": said}
        async with Scripted(answer(b""), **targets) as server, aclosing(EngineApi(server.origin, "m")) as api:
            assert (await fails(wait(api))).kind == kind
            assert len(server.asked) == 3

    play(scene)


def test_cancelled_it_leaves_nothing() -> None:
    async def scene() -> None:
        async with Scripted(None) as server, aclosing(EngineApi(server.origin, "m")) as api:
            dead: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            waiting = asyncio.create_task(wait(api, dead=dead))
            while not server.asked:
                await asyncio.sleep(0.001)
            waiting.cancel()
            await asyncio.wait((waiting,))
            assert waiting.cancelled()
            assert not dead.done()

    play(scene)
