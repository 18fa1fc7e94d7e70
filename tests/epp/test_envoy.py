"""Picker behind a real Envoy, called by openai-python: answers, refusals, clients that leave, and what dies."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from loadtest.processes import Gateway, get
from tests.e2e.children import Call, SimEngine
from tests.epp.conftest import Site, start
from tests.epp.envoy import envoy, waits

pytestmark = pytest.mark.slow
FAST = "fleet: {poll: 100ms, health: 20s}\n"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Say something."}]


@contextlib.contextmanager
def served(
    folder: Path,
    engines: list[SimEngine],
    policy: str = FAST,
    *,
    mode: str = "",
    behind: list[SimEngine] | None = None,
) -> Iterator[tuple[Gateway, openai.OpenAI, str]]:
    """A gateway with a picker, Envoy, and a client of Envoy. `behind`: the engines, where the policy names them."""
    site: Site = start(folder, [engine.url for engine in engines], policy)
    assert site.gateway is not None
    with site.gateway as gateway:
        endpoints = [engine.url.partition("//")[2] for engine in behind or engines]
        child, url = envoy(folder, site.address, endpoints, mode=mode)
        with child, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
            yield gateway, client, url
            assert child.alive, child.output()
        assert "Traceback" not in gateway.child.output(), gateway.child.output()


def records(gateway: Gateway) -> list[dict[str, object]]:
    return [json.loads(line) for line in gateway.child.output().splitlines() if '"event":"call"' in line]


def ask(client: openai.OpenAI, tokens: int = 8) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=tokens)


@pytest.mark.parametrize("mode", ["", "BUFFERED"], ids=["duplex", "buffered"])
def test_answers_and_streams(tmp_path: Path, engines: list[SimEngine], mode: str) -> None:
    with served(tmp_path, engines, mode=mode) as (gateway, client, _):
        raw = client.chat.completions.with_raw_response.create(model="sim", messages=MESSAGES, max_tokens=8)
        answer = raw.parse()
        assert answer.usage is not None
        assert raw.headers["x-weir-class"] == "default"
        parts = list(client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=8, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == answer.choices[0].message.content
        assert all(part.usage is None for part in parts)
        assert {model.id for model in client.models.list()} == {"sim"}
        waits(lambda: len(records(gateway)) == 2 and gateway.idle(), "both calls end")
        for record in records(gateway):
            assert (record["outcome"], record["settled"]) == ("ok", True)
            usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
            assert (record["prompt_tokens"], record["completion_tokens"]) == usage


def test_a_large_prompt(tmp_path: Path, engines: list[SimEngine]) -> None:
    with served(tmp_path, engines) as (_, client, _url):
        text = "word " * 20_000
        answer = client.chat.completions.create(model="sim", messages=[{"role": "user", "content": text}], max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 10_000


def test_a_refusal_has_its_body_and_its_retry_after(tmp_path: Path, engines: list[SimEngine]) -> None:
    policy = f"limits: {{global: {{requests: {{rate: 1/min, burst: 1}}}}}}\n{FAST}"
    with served(tmp_path, engines, policy) as (_, client, _url):
        ask(client)
        with pytest.raises(openai.RateLimitError) as refused:
            ask(client)
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert refused.value.code == "rate_limit_exceeded"


def test_a_client_that_leaves_while_it_waits_is_withdrawn(tmp_path: Path) -> None:
    engine = SimEngine(tmp_path / "engine.log")
    policy = f"fleet: {{poll: 100ms, health: 20s, engines: [{{url: '{engine.url}', max_concurrency: 1}}]}}\n"
    with engine.child, served(tmp_path, [], policy, behind=[engine]) as (gateway, client, url):
        engine.faults(hang=True)
        first = Call(url, stream=True)
        waits(lambda: _states(gateway) == ["running"], "the first runs")
        second = Call(url, stream=True)
        waits(lambda: sorted(_states(gateway)) == ["queued", "running"], "the second waits")
        second.close()
        waits(lambda: _states(gateway) == ["running"], "the second is withdrawn")
        first.close()
        gone = ["client_gone"] * 2
        waits(lambda: [record["outcome"] for record in records(gateway)] == gone, "both are recorded")
        waits(gateway.idle, "nothing is held")
        engine.faults(hang=False)
        assert ask(client).usage is not None


@pytest.mark.parametrize("allow", [False, True], ids=["refused", "allowed"])
def test_a_picker_that_is_killed(tmp_path: Path, engines: list[SimEngine], allow: bool) -> None:
    site = start(tmp_path, [engine.url for engine in engines], FAST)
    assert site.gateway is not None
    with site.gateway as gateway:
        child, url = envoy(tmp_path, site.address, site.endpoints, allow=allow, mode="BUFFERED" if allow else "")
        with child, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
            ask(client)
            gateway.child.signal(signal.SIGKILL)
            gateway.child.process.wait(60.0)
            if allow:
                assert ask(client).usage is not None
            else:
                with pytest.raises(openai.InternalServerError):
                    ask(client)


def test_an_engine_that_dies(tmp_path: Path) -> None:
    pair = [SimEngine(tmp_path / f"engine{number}.log", "--speed", "20") for number in range(2)]
    with pair[0].child, pair[1].child, served(tmp_path, pair, "fleet: {poll: 100ms, health: 60s}\n") as all_of_it:
        gateway, client, _ = all_of_it
        for _ in range(4):
            ask(client)
        pair[0].child.kill()
        failed = 0
        for _ in range(12):
            try:
                ask(client)
            except openai.InternalServerError:
                failed += 1
        assert failed < 6, "the other engine gets the calls"
        ask(client)
        waits(gateway.idle, "nothing is held")


def _states(gateway: Gateway) -> list[str]:
    return [call["state"] for call in json.loads(get(f"{gateway.control}/calls")[1])["calls"]]
