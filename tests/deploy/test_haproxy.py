"""Example of HAProxy before Weir: OpenAI's client through it, refusals, clients that leave, failures, and load.

HAProxy is that of the machine, or what `make haproxy` has got.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from loadtest.lab.operate.debian import HAPROXY
from loadtest.processes import Child, Gateway, free_port, get, until
from tests.e2e.children import Call, SimEngine
from tests.programs import required

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "deploy/haproxy"
MESSAGES: list[Any] = [{"role": "user", "content": "Why is the river level?"}]
CLIENTS, CALLS = 12, 8


class Site:
    """HAProxy with the example's files, a gateway with a decide port, one engine."""

    def __init__(
        self, folder: Path, stack: contextlib.ExitStack, *, policy: str, token: bool, slots: int, poll: str
    ) -> None:
        program = required(HAPROXY)
        self.log = folder / "calls.jsonl"
        self.engine = SimEngine(folder / "engine.log")
        stack.callback(self.engine.child.stop)
        engine = f"{{url: '{self.engine.url}', max_concurrency: {slots}}}"
        (folder / "policy.yaml").write_text(f"fleet: {{poll: {poll}, health: {poll}, engines: [{engine}]}}\n{policy}")
        (folder / "token").write_text("a-token-for-haproxy\n")
        (folder / "token").chmod(0o600)
        decide = f"127.0.0.1:{free_port()}" if token else f"unix:{folder}/decide.sock"
        more = ("--decide-token-file", str(folder / "token")) if token else ()
        self.gateway = stack.enter_context(
            Gateway(
                folder / "gateway.log",
                *("--policy", str(folder / "policy.yaml"), "--log", str(self.log), "--decide", decide, *more),
            )
        )
        port = free_port()
        changes = {
            "bind 127.0.0.1:8080": f"bind 127.0.0.1:{port}",
            "server data_port 127.0.0.1:8000": f"server data_port {self.gateway.url.removeprefix('http://')}",
            "/etc/haproxy/weir.lua": str(FOLDER / "weir.lua"),
            "unix@/run/weir/decide.sock": f"ipv4@{decide}" if token else f"unix@{folder}/decide.sock",
            "global\n": f"global\n    setenv WEIR_DECIDE_TOKEN_FILE {folder}/token\n" if token else "global\n",
        }
        text = (FOLDER / "haproxy.cfg").read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / "haproxy.cfg").write_text(text)
        self.haproxy = Child("haproxy", [*program, "-db", "-f", str(folder / "haproxy.cfg")], folder / "haproxy.log")
        stack.callback(self.haproxy.stop)
        self.url = f"http://127.0.0.1:{port}"
        self.haproxy.wait(lambda: _listens(port), 10.0, "a listening port")
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30.0)

    def records(self, calls: int) -> list[dict[str, Any]]:
        """The call log, once it has so many lines and nothing is held."""

        def whole() -> bool:
            return self.gateway.idle() and len(self.log.read_text().splitlines()) >= calls

        assert until(whole, 15.0) is not None, (self.gateway.fleet(), self.haproxy.output())
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def leave(call: Call) -> None:
    call.answer.close()
    call.socket.close()


def queued(made: Site) -> int:
    return int(json.loads(get(f"{made.gateway.control}/drain")[1])["queued_calls"])


@contextlib.contextmanager
def site(
    folder: Path, policy: str = "", *, token: bool = False, slots: int = 64, poll: str = "200ms"
) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        made = Site(folder, stack, policy=policy, token=token, slots=slots, poll=poll)
        yield made
        assert "runtime error" not in made.haproxy.output(), made.haproxy.output()
        assert "Traceback" not in made.gateway.child.output()


@pytest.mark.parametrize("token", [False, True], ids=["unix socket", "token"])
def test_openais_client(tmp_path: Path, token: bool) -> None:
    with site(tmp_path, token=token) as made:
        assert [model.id for model in made.client.models.list()] == ["sim"]
        whole = made.client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=8)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 8
        stream = made.client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=8, stream=True)
        assert len([chunk.choices[0].delta.content for chunk in stream]) >= 8, "no event without a choice"
        told = made.client.chat.completions.create(
            model="sim", messages=MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        usage = [chunk.usage for chunk in told if chunk.usage is not None]
        assert [each.completion_tokens for each in usage] == [8]
        large = made.client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "x" * 60_000}], max_tokens=4
        )
        assert large.usage is not None
        records = made.records(4)
        assert [(each["outcome"], each["settled"], each["completion_tokens"]) for each in records] == [
            *[("ok", True, 8)] * 3,
            ("ok", True, 4),
        ]
        raw = made.client.chat.completions.with_raw_response.create(model="sim", messages=MESSAGES, max_tokens=1)
        assert raw.headers["x-weir-class"] == "default"
        assert raw.headers["x-request-id"] == made.records(5)[-1]["request_id"]


def test_a_refusal_is_the_clients_own(tmp_path: Path) -> None:
    with site(tmp_path, "limits: {per_tenant: {requests: 2/min}}\n") as made:
        for _ in range(2):
            made.client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as refused:
            made.client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=1)
        assert int(refused.value.response.headers["retry-after"]) > 5
        assert refused.value.response.headers["x-weir-reason"] == "rate_limited"
        assert refused.value.code == "rate_limit_exceeded"
        assert [each["outcome"] for each in made.records(3)] == ["ok", "ok", "rate_limited"]


def test_clients_that_leave_give_back_what_they_hold(tmp_path: Path) -> None:
    with site(tmp_path, "deadlines: {predict: false}\n", slots=1) as made:
        running = Call(made.url, stream=True, max_tokens=4000)
        assert until(lambda: not made.gateway.idle(), 10.0) is not None
        waiting = Call(made.url, stream=True)
        assert until(lambda: queued(made), 10.0) is not None
        leave(waiting)
        assert until(lambda: not queued(made), 10.0) is not None
        assert not made.gateway.idle()
        leave(running)
        records = made.records(2)
        assert {each["outcome"] for each in records} == {"client_gone"}, records
        assert until(lambda: made.engine.running() == 0, 10.0) is not None


def test_an_engine_that_dies_and_a_decider_that_is_gone(tmp_path: Path) -> None:
    with site(tmp_path, poll="60s") as made:
        streaming = Call(made.url, stream=True, max_tokens=4000)
        assert until(lambda: made.engine.running() == 1, 10.0) is not None
        made.engine.child.kill()
        with contextlib.suppress(OSError, http.client.HTTPException):
            streaming.read()
        assert made.records(1)[0]["outcome"] in {"client_gone", "truncated"}
        with pytest.raises(openai.InternalServerError) as failed:
            made.client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=1)
        assert failed.value.status_code == 503
        assert made.records(2)[1]["outcome"] == "upstream"
        made.gateway.child.kill()
        with pytest.raises(openai.InternalServerError) as gone:
            made.client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=1)
        assert gone.value.status_code == 503


def test_many_clients_at_once(tmp_path: Path) -> None:
    """Every third call leaves in the middle of its stream."""

    async def client(url: str, number: int) -> Counter[str]:
        seen: Counter[str] = Counter()
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as openais:
            for call in range(CALLS):
                stream = (number + call) % 2 == 0
                leaves = (number + call) % 3 == 0
                if not stream:
                    whole = await openais.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=6)
                    seen["ok"] += whole.usage is not None and whole.usage.completion_tokens == 6
                    continue
                tokens = 3000 if leaves else 6
                async with await openais.chat.completions.create(
                    model="sim", messages=MESSAGES, max_tokens=tokens, stream=True
                ) as events:
                    async for _ in events:
                        if leaves:
                            seen["left"] += 1
                            break
                    else:
                        seen["ok"] += 1
        return seen

    async def load(url: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for seen in await asyncio.gather(*[client(url, number) for number in range(CLIENTS)]):
            total += seen
        return total

    with site(tmp_path, slots=4) as made:
        seen = asyncio.run(load(made.url))
        assert sum(seen.values()) == CLIENTS * CALLS
        outcomes = Counter(each["outcome"] for each in made.records(CLIENTS * CALLS))
        assert outcomes == {"ok": seen["ok"], "client_gone": seen["left"]}
        assert until(lambda: made.engine.running() == 0, 10.0) is not None
