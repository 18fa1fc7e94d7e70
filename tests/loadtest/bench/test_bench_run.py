"""One run of the bench against hand-made servers: its numbers are theirs, and every behaviour is an outcome."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from loadtest.bench.help_text import unreachable
from loadtest.bench.run import Load, TargetRun, probe, run
from loadtest.clients.calls import WallClock
from loadtest.clients.retries import Clients
from loadtest.clients.targets import Address, Target
from loadtest.load.arrivals import Arrivals, Closed, Rate
from loadtest.load.lengths import Length
from loadtest.load.scenario import planned
from loadtest.load.workload import Planned, Sessions
from loadtest.report.records import Run, Window
from loadtest.report.summary import summarise
from tests.certificates import made
from tests.loadtest.bench_servers import (
    DONE,
    SSE,
    USAGE,
    WORD,
    always,
    chunk,
    plain,
    scenario_of,
    sent,
    served,
    stream,
)

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

GOOD = stream(WORD, WORD, WORD, USAGE, DONE)
SPACED = WORD.replace(b'"choices":[{', b'"choices": [ {').replace(b"\n", b"\r\n")
FIRST, BETWEEN = 0.2, 0.2  # seconds
SLACK = 0.1  # seconds, for a machine that has other things to do; what is too short is always wrong
QUICK = scenario_of(Arrivals(constant=Rate(100.0)), 60.0)  # `count` of them: what is late at its end is not sent
ONE_BY_ONE = scenario_of(Arrivals(closed=Closed(clients=1)), 60.0)


async def timed(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
    """Five tokens: the first after FIRST, each other BETWEEN later."""
    writer.write(SSE)
    await asyncio.sleep(FIRST)
    for token in range(5):
        if token:
            await asyncio.sleep(BETWEEN)
        writer.write(chunk(WORD))
    writer.write(chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n")


def test_its_numbers_are_the_servers_delays() -> None:
    over_seconds = scenario_of(Arrivals(constant=Rate(5.0)), 60.0)  # so that a busy moment delays some and not all
    with served(timed) as server:
        ran = sent(server.address, over_seconds, count=20)
    assert len(ran.results) == 20
    assert {result.outcome for result in ran.results} == {"ok"}
    assert [result.at for result in sorted(ran.results, key=lambda one: one.index)] == [n / 5.0 for n in range(20)]
    ttft = [result.first_token - result.at for result in ran.results]
    gaps = [gap for result in ran.results for gap in result.gaps]
    assert min(ttft) >= FIRST
    assert min(ttft) < FIRST + SLACK
    assert {len(result.gaps) for result in ran.results} == {4}
    assert median(gaps) > BETWEEN - 0.01
    assert min(gaps) < BETWEEN + SLACK
    # A token that is read late shortens the gap after it, and the last is there no sooner for that.
    assert all(result.first_token + sum(result.gaps) - result.at >= FIRST + 4 * BETWEEN for result in ran.results)
    for result in ran.results:
        assert result.sent >= result.at
        assert result.sent <= result.first_byte <= result.first_token
        assert result.first_token + sum(result.gaps) <= result.finished + 1e-9
        assert (result.prompt_tokens, result.completion_tokens, result.tries) == (7, 3, 1)


def test_a_slow_server_does_not_slow_the_load() -> None:
    together = asyncio.Event()

    async def slow(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        if number == 9:
            together.set()
        async with asyncio.timeout(60):
            await together.wait()  # no answer comes before the last request
        writer.write(GOOD)

    with served(slow) as server:
        ran = sent(server.address)
    assert server.connections == 10  # all were open at once
    assert {result.outcome for result in ran.results} == {"ok"}


def test_what_a_starved_bench_has_not_sent_was_offered_still() -> None:
    scenario = scenario_of(Arrivals(constant=Rate(400.0)), 1.0)

    def starved() -> Iterator[Planned]:
        for number, each in enumerate(planned(scenario)):
            if number == 3:
                time.sleep(scenario.seconds)  # the bench gets no core, up to the end of its run
            yield each

    with served(always(GOOD)) as server:
        load = Load(planned=starved(), seconds=scenario.seconds, clients=Clients(timeout=60.0))
        target = Target(name="t", addresses=[server.address])
        ran = run(TargetRun(target, load, 0, lambda share, words: None), None)
    assert sorted(result.index for result in ran.results) == list(range(400))
    assert {result.outcome for result in ran.results} == {"ok", "not_sent"}
    assert not any(result.sent or result.tries for result in ran.results if result.outcome == "not_sent")
    summary = summarise(Run(name="t", rate=400.0, window=Window(duration=1.0), results=ran.results))
    assert (summary.total.offered, summary.valid) == (400, False)


def test_what_is_due_in_the_last_moment_of_a_run_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    class LateTimers(WallClock):
        def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
            return super().call_at(when + 0.006, callback, *args)

    monkeypatch.setattr("loadtest.bench.run.WallClock", LateTimers)
    # The last timer rings after the end. No more than BURST: where the bench is held up all are due then.
    scenario = scenario_of(Arrivals(constant=Rate(100.0)), 0.304)
    with served(always(GOOD)) as server:
        load = Load(planned=planned(scenario), seconds=scenario.seconds, clients=Clients(timeout=60.0))
        ran = run(TargetRun(Target(name="t", addresses=[server.address]), load, 0, lambda share, words: None), None)
    assert Counter(result.outcome for result in ran.results) == {"ok": 31}


def test_connections_are_used_again() -> None:
    with served(always(GOOD)) as server:
        ran = sent(server.address, scenario_of(Arrivals(closed=Closed(clients=2)), 60.0), count=20)
        assert ran.connections == server.connections == 2
        assert len(ran.results) == 20
        assert {result.outcome for result in ran.results} == {"ok"}


def test_clients_of_a_closed_loop_have_one_conversation_after_another() -> None:
    session = Sessions(turns=Length(constant=3), think=0.02, spread=0.0)
    scenario = scenario_of(Arrivals(closed=Closed(clients=2, within=0.04, rounds=2)), 600.0, session=session)
    with served(always(GOOD)) as server:
        ran = sent(server.address, scenario)
    assert ran.seconds < 300.0, "it is over with the last conversation"
    calls = sorted(ran.results, key=lambda result: result.index)
    assert [result.index for result in calls] == list(range(12))
    begins, ends = [calls[3 * n].at for n in range(4)], [calls[3 * n + 2].finished for n in range(4)]
    assert begins[1] >= 0.02
    assert all(begin >= min(ends[:2]) for begin in begins[2:]), "two at a time"


ENDS = (
    (plain(500, b'{"error":{"message":"41 things","type":"InternalServerError"}}'), "upstream",
     "500 InternalServerError"),
    (plain(404, b"no such page", kind=b"text/plain"), "engine_refused", "404"),
    (plain(429, b"{}", b"x-weir-reason: queue_full"), "queue_full", "429"),
    (plain(200, b"<html>", kind=b"text/html"), "garbled", "text/html, asked for a stream"),
    (plain(200, b"{}"), "garbled", "application/json, asked for a stream"),
    (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "unanswered", "an answer that is not HTTP"),
    (stream(DONE), "empty", "a stream without a token"),
    (stream(WORD, WORD), "cut", "no [DONE]"),
    (stream(WORD, b'data: {"error":{"message":"x","code":"oom"}}\n\n'), "truncated", "200 oom"),
    (SSE + b"zz\r\n", "cut", "an answer that is not HTTP"),
    (stream(WORD, DONE), "ok", ""),  # without a usage
    (stream(SPACED, DONE.replace(b"\n", b"\r\n")), "ok", ""),
    (b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + GOOD, "ok", ""),
)  # fmt: skip
STALLS = ((b"", "no answer"), (SSE, "no token"), (SSE + chunk(WORD), "stalled within the answer"))


def test_what_servers_do_is_an_outcome() -> None:
    with served(always(*(data for data, _, _ in ENDS))) as server:
        ran = sent(server.address, ONE_BY_ONE, count=len(ENDS))
    found = sorted(ran.results, key=lambda result: result.index)
    assert [(result.outcome, result.reason) for result in found] == [(word, why) for _, word, why in ENDS]
    assert all(result.finished >= result.sent > 0.0 for result in found)


def test_a_plan_of_nothing_is_over_at_once() -> None:
    ran = sent(Address("127.0.0.1", 9), scenario_of(Arrivals(constant=Rate(1.0)), 600.0), count=0)
    assert ran.results == []
    assert ran.seconds < 300.0, "it does not wait for the scenario's end"


def test_what_stalls_is_given_up() -> None:
    with served(always(*(data for data, _ in STALLS))) as server:
        ran = sent(server.address, ONE_BY_ONE, count=len(STALLS), timeout=3.0)
    found = sorted(ran.results, key=lambda result: result.index)
    assert [(result.outcome, result.reason) for result in found] == [("timed_out", why) for _, why in STALLS]


def test_nobody_waits_for_ever() -> None:
    with served(always(b"")) as server:
        ran = sent(server.address, scenario_of(Arrivals(constant=Rate(5.0)), 0.1), drain=0.05, timeout=600.0)
    (result,) = ran.results
    assert (result.outcome, result.reason) == ("unfinished", "still open 0.05 s after the load's end")
    assert 0.14 < result.finished < 300.0, "it does not wait until the call times out"


def test_nobody_listens() -> None:
    ran = sent(Address("127.0.0.1", 9), QUICK, count=2)
    assert {(result.outcome, result.reason) for result in ran.results} == {("unanswered", "Connection refused")}
    ran = sent(Address("nobody.invalid", 80), QUICK, count=2)
    assert {result.outcome for result in ran.results} == {"unanswered"}
    assert all(result.reason.startswith("name lookup: ") for result in ran.results)


def test_it_tries_again_when_it_is_told_to() -> None:
    async def second(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(503, b"{}", b"retry-after-ms: 20") if number == 0 else GOOD)

    with served(second) as server:
        ran = sent(server.address, QUICK, count=1, retries=2)
    (result,) = ran.results
    assert (result.outcome, result.tries) == ("ok", 2)
    assert result.first_token - result.sent >= 0.02  # the wait is part of what its user felt
    assert server.bodies[0] == server.bodies[1]


def test_a_refusal_for_good_is_not_asked_again() -> None:
    with served(always(plain(503, b"{}", b"x-should-retry: false"))) as server:
        ran = sent(server.address, QUICK, count=1, retries=2)
    assert [result.tries for result in ran.results] == [1]
    assert len(server.bodies) == 1


def test_a_conversation_goes_on_with_what_was_said() -> None:
    with served(always(GOOD)) as server:
        session = Sessions(turns=Length(constant=3), think=0.01, spread=0.0)
        ran = sent(server.address, scenario_of(Arrivals(constant=Rate(1.0)), 30.0, session=session), count=1)
    assert [result.index for result in ran.results] == [0, 1, 2]
    assert [result.outcome for result in ran.results] == ["ok"] * 3
    first, second, _ = ran.results
    assert second.at >= first.finished  # its time follows from the answer
    said = b'{"role":"assistant","content":"' + b'hi \\"you\\"' * 3 + b'"}'
    assert [body.count(said) for body in server.bodies] == [0, 1, 2]


def test_embeddings_have_no_tokens() -> None:
    body = b'{"data":[],"usage":{"prompt_tokens":160,"total_tokens":160}}'
    with served(always(plain(200, body))) as server:
        ran = sent(server.address, scenario_of(Arrivals(constant=Rate(100.0)), 60.0, kind="embeddings"), count=2)
    assert len(ran.results) == 2
    for result in ran.results:
        assert (result.outcome, result.prompt_tokens, result.first_token, result.gaps) == ("ok", 160, 0.0, ())


def test_over_tls_and_its_errors(tmp_path: Path) -> None:
    theirs = made(tmp_path)
    certified = ssl.create_default_context(cafile=tmp_path / "localhost.pem")
    with served(always(GOOD), tls=theirs) as server:
        good = sent(Address("localhost", server.port, tls=True), QUICK, count=2, tls=certified)
        bad = sent(Address("localhost", server.port, tls=True), QUICK, count=2, tls=ssl.create_default_context())
        other = sent(Address("127.0.0.1", server.port, tls=True), QUICK, count=2, tls=certified)
        advice = [
            asked(Address("localhost", server.port, tls=True), ssl.create_default_context()),
            asked(Address("127.0.0.1", server.port, tls=True), certified),
            asked(Address("localhost", server.port), None),
        ]
        assert asked(Address("localhost", server.port, tls=True), certified) == ""
    assert {result.outcome for result in good.results} == {"ok"}
    assert {(result.outcome, result.reason) for result in bad.results} == {
        ("unanswered", "TLS: self-signed certificate")
    }
    assert all("IP address mismatch" in result.reason for result in other.results)
    assert [re.sub(r".* at \S+: ", "", line) for line in advice] == [
        "TLS: self-signed certificate (--ca FILE trusts it; --insecure checks none)",
        "TLS: IP address mismatch, certificate is not valid for '127.0.0.1'. (write the name in the certificate; "
        "--insecure checks none)",
        "connection closed without an answer (if it wants TLS, write https://)",
    ]
    with served(always(GOOD)) as server:  # which waits for a request in a hello
        ran = sent(
            Address("127.0.0.1", server.port, tls=True), QUICK, count=2, tls=ssl.create_default_context(), timeout=1.0
        )
    assert {(result.outcome, result.reason) for result in ran.results} == {("timed_out", "no answer")}


def asked(address: Address, tls: ssl.SSLContext | None) -> str:
    """Why it cannot be measured; "": it can."""
    told = probe(Target(name="t", addresses=[address]), tls)
    return "" if told.reached else unreachable(address, told.problem)


def test_a_target_is_there_if_it_answers_by_http_or_may_yet(tmp_path: Path) -> None:
    for data in (GOOD, plain(404, b"{}"), plain(500, b"{}"), plain(200, b"<html>", kind=b"text/html")):
        with served(always(data)) as server:
            assert asked(server.address, None) == ""
    with served(always(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")) as server:
        assert asked(server.address, None).endswith(": an answer that is not HTTP")
    with served(always(plain(400, b"{}")), tls=None) as server:
        wrong = asked(Address("127.0.0.1", server.port, tls=True), ssl.create_default_context())
    assert wrong.endswith("no connection within 5 s (if it speaks plain HTTP, write http://)")
    assert asked(Address("127.0.0.1", 9), None) == "nothing can be measured at 127.0.0.1:9: Connection refused"
    assert asked(Address("nobody.invalid", 80), None).startswith("nothing can be measured at nobody.invalid: name look")
    missing = Address("localhost", unix=str(tmp_path / "s"))
    assert asked(missing, None) == f"nothing can be measured at {tmp_path}/s: No such file or directory"


def test_any_openai_compatible_server_lists_its_models() -> None:
    listed = b'{"object":"list","data":[{"id":"m","object":"model","created":null,"owned_by":null}]}'
    with served(always(plain(200, listed))) as server:
        assert probe(Target(name="t", addresses=[server.address]), None).models == ("m",)


def test_over_a_unix_socket(tmp_path: Path) -> None:
    with served(always(GOOD), unix=tmp_path / "s"):
        ran = sent(Address("localhost", unix=str(tmp_path / "s")))
    assert {result.outcome for result in ran.results} == {"ok"}


def test_a_signal_ends_it_and_keeps_what_there_is() -> None:
    async def interrupting(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        if number < 9:
            writer.write(GOOD)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with served(interrupting) as server:
        ran = sent(server.address, ONE_BY_ONE, timeout=60.0, drain=60.0)
    assert ran.stopped
    assert Counter(result.outcome for result in ran.results) == {"ok": 9, "interrupted": 1}
    assert signal.getsignal(signal.SIGINT) is before


def test_what_targets_tell_is_sampled() -> None:
    page = (
        b"# TYPE vllm:num_requests_running gauge\n"
        b'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        b'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0\n'
        b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
    )

    async def later(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        while len(metrics.bodies) < 2:  # who asks again has the first sample
            await asyncio.sleep(0.005)
        writer.write(GOOD)

    with served(always(plain(200, page, kind=b"text/plain"))) as metrics, served(later) as server:
        ran = sent(server.address, sources=(("e", metrics.address), ("dead", Address("127.0.0.1", 9))))
    assert {(one.engine, one.kv, one.running, one.waiting) for one in ran.samples} == {("e", 0.25, 3, 2)}
