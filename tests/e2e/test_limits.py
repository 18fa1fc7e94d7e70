"""Rate limits as clients meet them: the text of a 429, a true Retry-After, and the cost of a call in the end.

Each test has a tenant of its own. Limits that must not refill meanwhile are by the hour.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from loadtest.processes import until
from tests.e2e.traffic import CHAT, MESSAGES, QUICK, Site, Tree, Wire, body, sha256

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

BURST = 100_000
TOKENS: Tree = {"tokens": {"rate": "60/h", "burst": BURST}}
LARGEST = 30_147  # KV tokens of one call: 92 % of what the engine has
CHINESE = {"resultStatus": 1002, "tips": "顾客太多,客官请稍候", "seconds": "{retry_after}", "limit": "{limit}"}
LIMITS: dict[str, Tree] = {
    "slow": {"requests": {"rate": "20/min", "burst": 1}},
    "patient": {"requests": {"rate": "1/s", "burst": 1}},
    "shop": {"requests": {"rate": "1/h", "burst": 1}},
    "settled": TOKENS,
    "streamed": TOKENS,
    "left": TOKENS,
    "refunded": {"requests": {"rate": "1/h", "burst": 50}} | TOKENS,
    "fickle": {"requests": {"rate": "1/h", "burst": 50}} | TOKENS,
    "greedy": {"tokens": {"rate": "1000/min", "burst": 500}},
    "levels": {"requests": "60/min", "classes": {"batch": {"requests": {"rate": "1/h", "burst": 1}}}},
    "models": {"models": {"sim": {"requests": {"rate": "1/h", "burst": 1}}}},
    "raised": {"requests": {"rate": "1/h", "burst": 1}},
}


def policy(**changed: Tree) -> Tree:
    tenants = {name: {"keys": [sha256(key_of(name))], "limits": limits} for name, limits in (LIMITS | changed).items()}
    tenants["shop"]["refusal"] = {"status": 503, "body": CHINESE}
    # What a call costs is its prompt and all it asks for.
    return {
        "tenants": tenants,
        "lengths": 1,
        "budget": {"kv_target": "80%"},
        "fleet": QUICK,
    }


def key_of(tenant: str) -> str:
    return f"weir-key-of-{tenant}"


@pytest.fixture(scope="module")
def site(shared: Site) -> Iterator[Site]:
    shared.use(policy())
    yield shared
    assert until(shared.empty, 60.0) is not None


def ask(site: Site, tenant: str, **fields: Any) -> httpx.Response:
    return site.ask(fields, key=key_of(tenant))


def left(site: Site, tenant: str) -> int:
    """What is left of a tenant's tokens, as it is told with a call that is refused for being larger than BURST."""
    answer = ask(site, tenant, max_tokens=BURST // 4, n=8)
    assert answer.status_code == 429, answer.text
    assert answer.headers["x-ratelimit-limit-tokens"] == str(BURST)
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(call: Callable[[], object]) -> openai.RateLimitError:
    """The first refusal: a machine that stands still for three seconds lets another call through before it."""
    for _ in range(100):
        try:
            call()
        except openai.RateLimitError as error:
            return error
    raise AssertionError("no call is refused")


def test_what_the_sdk_sees_of_a_limit_and_that_the_time_it_is_told_is_true(site: Site) -> None:
    create = site.openai(key_of("slow")).chat.completions.with_raw_response.create
    asked: Tree = {"model": "sim", "messages": MESSAGES, "max_tokens": 2}
    first = create(**asked)
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert first.headers["x-ratelimit-reset-requests"].endswith(("s", "ms"))
    error = refused(partial(create, **asked))
    told = error.response.headers
    assert (error.status_code, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert "tenant slow" in error.message
    assert "20/min requests" in error.message
    assert told["x-weir-reason"] == "rate_limited"
    assert told["x-ratelimit-remaining-requests"] == "0"
    assert "x-should-retry" not in told
    milliseconds = int(told["retry-after-ms"])
    assert 0 < milliseconds <= 3750
    assert int(told["retry-after"]) == -(-milliseconds // 1000)
    time.sleep(milliseconds / 1000)
    assert create(**asked).parse().choices[0].message.content
    assert refused(partial(create, **asked))


def test_the_sdk_waits_and_gets_its_answer(site: Site) -> None:
    client = site.openai(key_of("patient"), retries=1)
    began = time.monotonic()
    for _ in range(2):
        client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=2)
    assert time.monotonic() - began >= 1.0


def test_a_refusal_in_the_tenants_own_words(site: Site) -> None:
    assert ask(site, "shop").status_code == 200
    answer = ask(site, "shop")
    assert answer.status_code == 503
    seconds = answer.json()["seconds"]
    assert 3500 < int(seconds) <= 3600
    assert answer.json() == CHINESE | {"seconds": seconds, "limit": "1/h requests"}
    assert "客官请稍候" in answer.content.decode("utf-8"), "not escaped"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-weir-reason"] == "rate_limited"
    assert answer.headers["retry-after"] == seconds
    assert answer.headers["x-should-retry"] == "false", "no client waits for an hour"
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert ask(site, "shop", max_tokens=-1).status_code == 503, "its body is not read"


def test_more_than_there_ever_is_need_not_be_tried_again(site: Site) -> None:
    before = site.gateway.total("weir_requests_total", outcome="rate_limited")
    with pytest.raises(openai.RateLimitError) as limited:
        site.openai(key_of("greedy"), retries=3).chat.completions.create(model="sim", messages=MESSAGES, max_tokens=600)
    assert limited.value.response.headers["x-should-retry"] == "false"
    assert "retry-after" not in limited.value.response.headers
    assert "never lets more than 500 through" in limited.value.message
    assert site.gateway.total("weir_requests_total", outcome="rate_limited") == before + 1, "and it is not"
    assert ask(site, "greedy", max_tokens=100).status_code == 200


def test_a_limit_within_a_tenant_binds_only_there(site: Site) -> None:
    key = key_of("levels")
    assert site.ask(key=key, x_weir_class="batch").status_code == 200
    answer = site.ask(key=key, x_weir_class="batch")
    assert code(answer) == (429, "rate_limit_exceeded")
    assert "tenant levels in class batch" in answer.json()["error"]["message"]
    assert site.ask(key=key).status_code == 200
    assert ask(site, "models").status_code == 200
    assert "tenant models with model sim" in ask(site, "models").json()["error"]["message"]


def test_a_limit_that_is_raised_or_lifted_helps_at_once(site: Site) -> None:
    assert [ask(site, "raised").status_code for _ in range(2)] == [200, 429]
    site.use(policy(raised={"requests": {"rate": "1/h", "burst": 3}}))
    assert [ask(site, "raised").status_code for _ in range(3)] == [200, 200, 429], "what was taken stays taken"
    site.use(policy(raised={"requests": "unlimited"}))
    answers = [ask(site, "raised") for _ in range(5)]
    assert {answer.status_code for answer in answers} == {200}
    assert not any("x-ratelimit-limit-requests" in answer.headers for answer in answers)
    site.use(policy())


# -- what a call costs ------------------------------------------------------------------------------------------------


def test_a_call_costs_what_it_really_used(site: Site) -> None:
    used = 0
    for path, asked in (
        (CHAT, body(max_tokens=1000, ignore_eos=False, stop=None)),
        (CHAT, body(max_tokens=5, n=2)),
        ("/v1/completions", {"model": "sim", "prompt": "Once upon a time " * 50, "max_tokens": 7}),
        ("/v1/completions", {"model": "sim", "prompt": "Once upon a time " * 4000, "max_tokens": 7}),
        ("/v1/embeddings", {"model": "sim", "input": "a text " * 40}),
    ):
        answer = site.http.post(path, json=asked, headers={"x-api-key": key_of("settled")})
        assert answer.status_code == 200
        reserved = BURST - used - int(answer.headers["x-ratelimit-remaining-tokens"])
        usage = answer.json()["usage"]
        used += usage["total_tokens"]
        assert reserved > 0, "while it ran its estimate was taken"
        assert until(lambda: left(site, "settled") == BURST - used, 60.0) is not None, path  # noqa: B023


def test_a_stream_costs_what_it_really_used_though_its_client_does_not_ask_for_usage(site: Site) -> None:
    headers = {"x-api-key": key_of("streamed")}
    with site.http.stream("POST", CHAT, json=body(max_tokens=12, stream=True), headers=headers) as stream:
        assert int(stream.headers["x-ratelimit-remaining-tokens"]) < BURST - 12
        text = stream.read()
    assert b'"usage":{' not in text
    used = ask(site, "settled", max_tokens=12).json()["usage"]["total_tokens"]  # of the same prompt
    assert until(lambda: left(site, "streamed") == BURST - used, 60.0) is not None


def test_a_client_that_leaves_pays_for_what_it_got(site: Site) -> None:
    headers = {"x-api-key": key_of("left")}
    got = 0
    site.engine.faults(slow=100.0)  # 40 ms for each token
    with site.http.stream("POST", CHAT, json=body(max_tokens=6000, stream=True), headers=headers) as stream:
        assert int(stream.headers["x-ratelimit-remaining-tokens"]) <= BURST - 6000
        for line in stream.iter_lines():
            got += line.startswith("data: {")
            if got == 20:
                break
    assert until(lambda: left(site, "left") > BURST - 6000, 60.0) is not None
    site.engine.faults()
    paid = BURST - left(site, "left")
    assert 20 <= paid < 500, "prompt and tokens, and nothing of what was not written"
    assert until(site.empty, 60.0) is not None


def test_what_is_refused_further_on_costs_its_request_and_no_token(site: Site) -> None:
    def requests_left() -> int:
        return int(ask(site, "refunded", max_tokens=1).headers["x-ratelimit-remaining-requests"])

    assert requests_left() == 49
    before = left(site, "refunded")
    assert code(ask(site, "refunded", n=2, max_tokens=LARGEST // 2 + 1)) == (413, "context_length_exceeded")
    assert code(ask(site, "refunded", model="no-such-model")) == (404, "model_not_found")
    assert code(ask(site, "refunded", max_tokens=-1)) == (400, "invalid_request_error")
    assert left(site, "refunded") == before
    assert requests_left() == 49 - 3 - 3, "each of the six, whatever it was answered"


def test_what_its_own_deadline_ends_costs_what_an_engine_was_made_to_do(site: Site) -> None:
    """Charge its prompt, and what can have been written in that time: at most 600 tokens in 300 ms."""
    before = left(site, "refunded")
    site.engine.faults(hang=True)
    try:
        answer = site.ask_at_once({"max_tokens": 2000}, key_of("refunded"), x_weir_deadline_ms="300")
    finally:
        site.engine.faults()
    assert code(answer) == (504, "deadline_exceeded")
    assert 10 < before - left(site, "refunded") < 1000
    assert until(site.empty, 60.0) is not None


def test_a_client_that_leaves_before_the_first_byte_pays_for_the_prompt(site: Site) -> None:
    """Else leaving would be the way around every limit."""
    prompt = [{"role": "user", "content": "a long prompt " * 100}]
    data = json.dumps(body(messages=prompt, max_tokens=4000)).encode()
    site.engine.faults(slow=50.0)  # 80 s for the answer
    try:
        with Wire(site.gateway.url) as wire:
            wire.send(data, [(b"x-api-key", key_of("fickle").encode())])
            assert until(lambda: site.engine.running() == 1, 60.0) is not None
        assert until(site.empty, 60.0) is not None
        assert until(lambda: site.engine.running() == 0, 60.0) is not None
    finally:
        site.engine.faults()
    paid = BURST - left(site, "fickle")
    assert 200 < paid < 1000
    assert int(ask(site, "fickle", max_tokens=1).headers["x-ratelimit-remaining-requests"]) == 47
