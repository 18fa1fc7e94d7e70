"""Deadlines in real time: in the queue, before the first byte, in a stream, and calls that cannot make theirs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from loadtest.processes import until
from tests.e2e.traffic import CHAT, QUICK, Site, Tree, body

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

ONE_AT_A_TIME: Tree = {"interactive": {}, "default": {"max_concurrency": 1, "ttft": "30s"}}
PACE: Tree = {"slow": 5.0}  # the engine takes 2 ms for each token
LONG = 15_000  # tokens: 30 s of the engine's
POLICY: Tree = {"classes": ONE_AT_A_TIME, "service_tiers": {}, "lengths": 1, "fleet": QUICK}


@pytest.fixture(scope="module")
def site(shared: Site) -> Iterator[Site]:
    shared.use(POLICY)
    yield shared
    shared.engine.faults()


@pytest.fixture(autouse=True)
def settled(site: Site) -> Iterator[None]:
    """Whatever a test does, nothing is held by it afterwards, and its engine works for nobody."""
    site.engine.faults(**PACE)
    yield
    site.engine.faults(**PACE)
    assert until(site.empty, 10.0) is not None
    assert until(lambda: site.engine.running() == 0, 10.0) is not None, "long before it is done with what was left"


def code(answer: httpx.Response) -> tuple[int, str, str]:
    return answer.status_code, answer.json()["error"]["code"], answer.headers["x-weir-reason"]


def timed(ask: Callable[[], httpx.Response]) -> tuple[httpx.Response, float]:
    began = time.monotonic()
    return ask(), time.monotonic() - began


class Stream:
    """A call whose first event has come; the engine then stands still if `stopped`."""

    def __init__(self, site: Site, *, stopped: bool = False, headers: dict[str, str] | None = None, **fields: Any):
        self._opened = site.http.stream("POST", CHAT, json=body(stream=True, **fields), headers=headers)
        self._site, self._stopped = site, stopped

    def __enter__(self) -> Stream:
        self.answer = self._opened.__enter__()
        assert self.answer.status_code == 200
        self._lines = self.answer.iter_lines()
        assert next(self._lines).startswith("data: {")
        if self._stopped:
            self._site.engine.faults(hang=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def rest(self) -> list[str]:
        """What is left of it, event by event."""
        return [line.removeprefix("data: ") for line in self._lines if line]


# -- in the queue -----------------------------------------------------------------------------------------------------


def test_what_waits_past_its_deadline_is_told_then(site: Site) -> None:
    with Stream(site, max_tokens=LONG, stopped=True):
        answer, took = timed(lambda: site.ask_at_once({"max_tokens": 1}, x_weir_deadline_ms="300"))
        assert code(answer) == (504, "deadline_exceeded", "expired")
        assert took > 0.25
        assert "in the queue of class 'default'" in answer.json()["error"]["message"]
        assert "x-weir-engine" not in answer.headers
        assert not site.empty(), "what runs goes on"


def test_the_sdks_own_patience_is_a_deadline_too(site: Site) -> None:
    with Stream(site, max_tokens=LONG, stopped=True):
        told = {"x_stainless_read_timeout": "0.3", "x_weir_deadline_ms": "60000"}
        answer, took = timed(lambda: site.ask_at_once({"max_tokens": 1}, **told))
        assert code(answer) == (504, "deadline_exceeded", "expired")
        assert took > 0.25


def test_what_cannot_make_it_is_told_at_once_and_when_to_come_back(site: Site) -> None:
    for _ in range(3):  # so it is known how fast work drains, and how long such answers are
        assert site.ask({"max_tokens": 1100}).status_code == 200
    with Stream(site, max_tokens=6000):
        answer = site.ask_at_once({"max_tokens": 2000}, x_weir_deadline_ms="1000")
        assert code(answer) == (503, "deadline_unreachable", "deadline_unreachable"), "it is not let wait for its 504"
        seconds, milliseconds = int(answer.headers["retry-after"]), int(answer.headers["retry-after-ms"])
        assert 1000 <= milliseconds <= 60_000
        assert seconds == -(-milliseconds // 1000)
        assert "x-should-retry" not in answer.headers


# -- on an engine -----------------------------------------------------------------------------------------------------


def test_a_stream_past_its_deadline_ends_with_an_error_and_its_engine_stops(site: Site) -> None:
    with Stream(site, max_tokens=LONG, headers={"x-weir-deadline-ms": "5000"}) as stream:
        *tokens, last = stream.rest()
    assert until(lambda: site.engine.running() == 0, 15.0) is not None, "it would go on for 25 s"
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"
    assert 5 < len(tokens) < LONG - 1
    assert all("choices" in json.loads(token) for token in tokens), "and no [DONE]"
    assert site.gateway.total("weir_requests_total", outcome="expired") > 0
    assert site.ask().status_code == 200


def test_a_stream_whose_engine_stands_still_is_ended_all_the_same(site: Site) -> None:
    with Stream(site, max_tokens=LONG, headers={"x-weir-deadline-ms": "5000"}, stopped=True) as stream:
        last = stream.rest()[-1]
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"
    assert until(lambda: site.engine.running() == 0, 30.0) is not None


def test_a_whole_answer_past_its_deadline_is_a_504_and_its_engine_stops(site: Site) -> None:
    answer = site.ask_at_once({"max_tokens": LONG}, x_weir_deadline_ms="300")
    assert code(answer) == (504, "deadline_exceeded", "expired")
    assert until(lambda: site.engine.running() == 0, 20.0) is not None, "it would go on for 30 s"


def test_impatient_clients_do_not_open_the_breaker(site: Site) -> None:
    """That they waited for no longer says nothing of the engine."""
    for _ in range(8):
        answer = site.ask_at_once({"max_tokens": LONG}, x_weir_deadline_ms="50")  # a short answer may be there as soon
        assert code(answer) == (504, "deadline_exceeded", "expired")
    (engine,) = site.gateway.fleet()["engines"]
    assert engine["breaker"] == "closed"
    assert site.ask().status_code == 200


# -- as the policy says -----------------------------------------------------------------------------------------------


def test_where_the_policy_lets_them_finish_streams_do(site: Site) -> None:
    site.use(POLICY | {"deadlines": "run"})
    began = time.monotonic()
    with Stream(site, max_tokens=3000, headers={"x-weir-deadline-ms": "4000"}) as stream:
        rest = stream.rest()
        assert time.monotonic() - began > 5.0
    assert rest[-1] == "[DONE]"
    assert len(rest) >= 3000
    with Stream(site, max_tokens=LONG, stopped=True):
        answer = site.ask_at_once({"max_tokens": 1}, x_weir_deadline_ms="200")
        assert code(answer) == (504, "deadline_exceeded", "expired"), "what has not begun does not finish"
    site.use(POLICY)


def test_a_cut_answer_says_so(site: Site) -> None:
    """With a third of the cache promised to one call, the next ones are cut, but for the most important class."""
    tier = {"kv_above": "30%", "max_tokens": 20}
    site.use(POLICY | {"classes": {"interactive": {}, "default": {}}, "shaping": [tier]})
    alone = site.ask({"max_tokens": 40})
    assert "x-weir-max-tokens" not in alone.headers
    with Stream(site, max_tokens=12_000):
        for asked in ({"max_tokens": 40}, {"max_tokens": 60, "max_completion_tokens": 40}):
            cut = site.ask(asked)
            assert cut.headers["x-weir-max-tokens"] == "20; asked=40"
            assert cut.json()["usage"]["completion_tokens"] == 20
            assert cut.json()["choices"][0]["finish_reason"] == "length"
        few = site.ask({"max_tokens": 19})
        assert "x-weir-max-tokens" not in few.headers
        best = site.ask({"max_tokens": 40}, x_weir_class="interactive")
        assert "x-weir-max-tokens" not in best.headers
        assert best.json()["usage"]["completion_tokens"] == 40
        with Stream(site, max_tokens=40) as stream:
            assert stream.answer.headers["x-weir-max-tokens"] == "20; asked=40"
            assert len(stream.rest()) <= 23
    site.use(POLICY)
