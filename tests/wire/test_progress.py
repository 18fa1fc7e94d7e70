"""Progress comments of a stream that waits: openai's and anthropic's clients read through them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest
import yaml

from gateway.core.admission.decider import Grant
from gateway.core.request.call import Call
from gateway.relay.progress import Progress
from gateway.relay.wire.server import Responder
from loadtest.processes import Gateway, until
from loadtest.simulate import vtime
from tests.e2e.children import SimEngine, post

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CALL = cast("Call", SimpleNamespace(request_id="r", class_name="batch"))
ASKS = {"x-weir-progress": "1"}


class Written:
    """What a responder is told."""

    def __init__(self) -> None:
        self.closed = self.started = False
        self.texts: list[str] = []

    def start(self, status: int, headers: bytes) -> None:
        self.started = True
        self.texts.append(f"{status} {headers.decode()}")

    def write(self, data: bytes) -> None:
        self.texts.append(data.decode())


def test_comments_come_while_the_call_waits_and_no_longer() -> None:
    async def main() -> None:
        written = Written()
        turn: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        progress = Progress(cast("Responder", written), CALL, 5.0)
        asking = asyncio.ensure_future(progress.of(turn))
        await asyncio.sleep(4.0)
        assert not written.started, "a short wait costs no status"
        await asyncio.sleep(7.0)
        turn.set_result(cast("Grant", None))
        await asking
        await asyncio.sleep(20.0)
        assert written.texts == [
            "200 content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
            "x-request-id: r\r\nx-weir-class: batch\r\n",
            ": waiting for 5 s\n\n",
            ": waiting for 10 s\n\n",
        ]

    vtime.run(main())


@pytest.mark.parametrize("how", ["cancelled", "gone"])
def test_nothing_is_written_for_a_call_that_is_given_up(how: str) -> None:
    async def main() -> None:
        written = Written()
        turn: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        asking = asyncio.ensure_future(Progress(cast("Responder", written), CALL, 5.0).of(turn))
        await asyncio.sleep(1.0)
        if how == "cancelled":
            asking.cancel()
        else:
            written.closed = True
        await asyncio.sleep(20.0)
        asking.cancel()
        assert not written.texts

    vtime.run(main())


# -- with the clients themselves ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(), ("--workers", "2")], ids=["one process", "two relays"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Over one engine, for which calls wait 8 s."""
    folder: Path = tmp_path_factory.mktemp("progress")
    engine = SimEngine(folder / "engine.log")
    tree = {
        "version": 1,
        "routing": {"hold_unserved": "8s"},
        "fleet": {"poll": "100ms", "engines": [{"url": engine.url}]},
    }
    (folder / "policy.yaml").write_text(yaml.safe_dump(tree))
    try:
        with Gateway(folder / "log", "--policy", str(folder / "policy.yaml"), *request.param) as started:
            yield started
    finally:
        engine.child.stop()


@pytest.fixture(autouse=True)
def in_service(gateway: Gateway) -> Iterator[None]:
    """Whatever a test has found, the next one has its engine."""
    yield
    drain(gateway, over=True)


def drain(gateway: Gateway, *, over: bool = False) -> None:
    id = gateway.fleet()["engines"][0]["id"]
    if over:
        httpx.delete(f"{gateway.control}/engines/{id}/drain", timeout=60.0).raise_for_status()
    else:
        httpx.post(f"{gateway.control}/engines/{id}/drain", timeout=60.0).raise_for_status()


def back_soon(gateway: Gateway) -> threading.Timer:
    """The engine is out for a while."""
    drain(gateway)
    timer = threading.Timer(2.4, drain, (gateway,), {"over": True})
    timer.start()
    return timer


@pytest.mark.slow
def test_the_comments_are_seen_on_the_wire(gateway: Gateway) -> None:
    drain(gateway)
    body = {"model": "sim", "messages": MESSAGES, "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=ASKS, timeout=60.0) as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["x-weir-class"] == "default"
        lines = filter(None, stream.iter_lines())
        assert next(lines).startswith(": waiting for ")
        assert next(lines).startswith(": waiting for ")
        drain(gateway, over=True)
        assert list(lines)[-1] == "data: [DONE]"


@pytest.mark.slow
def test_openais_client_reads_through_them(gateway: Gateway) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        timer = back_soon(gateway)
        stream = client.chat.completions.create(
            model="sim", messages=MESSAGES, max_tokens=4, stream=True, extra_headers=ASKS
        )
        assert sum(1 for chunk in stream if chunk.choices and chunk.choices[0].delta.content) >= 1
        timer.join()
        drain(gateway)
        try:
            with pytest.raises(openai.APIError, match="can be given calls now"):
                list(client.chat.completions.create(
                    model="sim", messages=MESSAGES, max_tokens=4, stream=True, extra_headers=ASKS
                ))  # fmt: skip
        finally:
            drain(gateway, over=True)
    assert until(gateway.idle, 60.0) is not None


@pytest.mark.slow
def test_anthropics_client_reads_through_them(gateway: Gateway) -> None:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60.0) as client:

        def text() -> str:
            with client.messages.stream(
                model="sim", messages=MESSAGES, max_tokens=4, extra_headers=ASKS
            ) as stream:  # fmt: skip
                return "".join(stream.text_stream)

        timer = back_soon(gateway)
        assert text()
        timer.join()
        drain(gateway)
        try:
            with pytest.raises(anthropic.APIStatusError, match="can be given calls now"):
                text()
        finally:
            drain(gateway, over=True)
    assert until(gateway.idle, 60.0) is not None


@pytest.mark.slow
def test_what_an_engine_refuses_after_them_is_an_error_event(gateway: Gateway) -> None:
    drain(gateway)
    body = {
        "model": "sim",
        "messages": MESSAGES,
        "max_tokens": 4,
        "stream": True,
        "response_format": {"type": "json_schema"},
    }
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=ASKS, timeout=60.0) as stream:
        assert stream.status_code == 200
        lines = filter(None, stream.iter_lines())
        assert next(lines).startswith(": waiting for ")
        drain(gateway, over=True)
        rest = list(lines)
    assert '"error"' in rest[-1]
    assert "data: [DONE]" not in rest


@pytest.mark.slow
def test_without_asking_nothing_is_sent_early(gateway: Gateway) -> None:
    timer = back_soon(gateway)
    body = {"model": "sim", "messages": MESSAGES, "max_tokens": 4, "stream": True}
    status, _, answer = post(f"{gateway.url}/v1/chat/completions", body)
    timer.join()
    assert (status, b": waiting" in answer) == (200, False)
    status, _, answer = post(f"{gateway.url}/v1/chat/completions", body, **{"x-weir-progress": "soon"})
    assert status == 400, answer
