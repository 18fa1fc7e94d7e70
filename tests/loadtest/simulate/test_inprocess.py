"""In-memory simulation: engines answer as over HTTP, clients retry as openai-python, one seed is one run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from loadtest.clients.calls import ClientCall, Try
from loadtest.clients.retries import Clients
from loadtest.engine.config import sim_config
from loadtest.load.arrivals import Arrivals, Closed
from loadtest.load.lengths import Length, LogNormal
from loadtest.load.plan import plan, poisson
from loadtest.load.prompts import body_of, message
from loadtest.load.workload import Kind, Planned, Prefix, Sessions, SubAgents, Workload
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget, targets_of
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.rivals.router import Router
from loadtest.simulate.rivals.rules import RULES
from loadtest.simulate.simulation import Broken, Fault, SimulationRun

CHAT = b"/v1/chat/completions"
KIND = Kind(
    class_name="default", share=1.0, prompt=Length(log_normal=LogNormal(200)), output=Length(empirical=(64, 128))
)


def an_engine(**limits: Any) -> MemoryEngine:
    return MemoryEngine(sim_config("a100-8b", **{"num_gpu_blocks": 1024, "max_model_len": 4096} | limits).engine)


class Answer:
    """What an engine sent, and when."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.status = 0
        self.pieces: list[tuple[float, bytes]] = []
        self.ended = ""

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None:
        assert not self.status, "an answer begins once"
        self.status = status
        self.pieces.append((self.loop.time(), data))

    def data(self, data: bytes) -> None:
        self.pieces.append((self.loop.time(), data))

    def end(self) -> None:
        assert not self.ended
        self.ended = "end"

    def failed(self, kind: str, message: str) -> None:
        assert not self.ended
        self.ended = kind

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


def ask(prompt: bytes = b"x" * 800, asked: int = 64, stream: bool = True) -> bytes:
    body = body_of(message(b"user", prompt), asked)
    return body if stream else body.replace(b'"stream":true', b'"stream":false')


def in_memory(scenario: Callable[[], Any]) -> None:
    vtime.run(scenario())


# -- the engine -------------------------------------------------------------------------------------------------------


def test_a_stream_begins_with_its_first_token_and_ends_with_usage() -> None:
    async def scenario() -> None:
        engine, answer = an_engine(), Answer()
        engine.post(CHAT, ask(), answer)
        await asyncio.sleep(60.0)
        (first_at, first), (last_at, last) = answer.pieces
        assert (answer.status, answer.ended) == (200, "end")
        assert 0.0 < first_at < 0.1 < last_at, "reading 200 tokens takes one step, writing the rest many"
        assert b'"content":" ban"' in first
        assert last.endswith(b"data: [DONE]\n\n")
        assert b'"prompt_tokens":208,"completion_tokens":' in last
        assert not engine.open
        assert engine.engine.scheduler.blocks.usage == 0.0

    in_memory(scenario)


def test_an_answer_that_is_not_streamed_comes_whole() -> None:
    async def scenario() -> None:
        engine, answer = an_engine(), Answer()
        engine.post(CHAT, ask(stream=False), answer)
        await asyncio.sleep(60.0)
        assert len(answer.pieces) == 1
        assert answer.body.startswith(b'{"object":"chat.completion"')
        assert answer.ended == "end"

    in_memory(scenario)


def test_what_was_said_before_is_found_in_the_cache() -> None:
    async def scenario() -> None:
        engine, first, again, other = an_engine(), Answer(), Answer(), Answer()
        engine.post(CHAT, ask(), first)
        await asyncio.sleep(60.0)
        engine.post(CHAT, ask(), again)
        engine.post(CHAT, ask(b"y" * 800), other)
        await asyncio.sleep(60.0)
        assert b'"cached_tokens":0}' in first.body
        assert b'"cached_tokens":192}' in again.body, "12 whole blocks of 208 tokens, the last token always computed"
        assert b'"cached_tokens":0}' in other.body

    in_memory(scenario)


def test_an_answer_that_is_sent_back_is_found_in_the_cache_too() -> None:
    async def scenario() -> None:
        engine, first, second = an_engine(), Answer(), Answer()
        engine.post(CHAT, ask(asked=512), first)
        await asyncio.sleep(60.0)
        said = b"".join(re.findall(rb'"content":"([^"]*)"', first.body))
        turns = [message(b"user", b"x" * 800), message(b"assistant", said), message(b"user", b"and then?")]
        engine.post(CHAT, body_of(b",".join(turns), 64), second)
        await asyncio.sleep(60.0)
        cached = int(re.findall(rb'"cached_tokens":(\d+)', second.body)[0])
        assert len(said) > 200
        assert 208 + len(said) // 4 - 16 <= cached <= 208 + len(said) // 4

    in_memory(scenario)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, b"{", 400),
        (CHAT, ask(asked=5000), 400),
        (CHAT, ask().replace(b'"sim"', b'"other"'), 404),
        (b"/v1/nothing", ask(), 404),
    ],
)
def test_what_cannot_be_answered_is_refused_as_vllm_does(path: bytes, body: bytes, status: int) -> None:
    async def scenario() -> None:
        engine, answer = an_engine(), Answer()
        engine.post(path, body, answer)
        assert (answer.status, answer.ended) == (status, "end")
        assert answer.body.startswith(b'{"error"')

    in_memory(scenario)


def test_leaving_frees_the_blocks_at_once() -> None:
    async def scenario() -> None:
        engine, answer = an_engine(), Answer()
        leave = engine.post(CHAT, ask(asked=1024), answer)
        await asyncio.sleep(0.2)
        assert engine.engine.scheduler.blocks.usage > 0.0
        leave()
        leave()
        assert engine.engine.scheduler.blocks.usage == 0.0
        await asyncio.sleep(60.0)
        assert len(answer.pieces) == 1
        assert not answer.ended, "nobody is there to be told"

    in_memory(scenario)


def test_a_killed_engine_cuts_its_answers_refuses_connections_and_comes_back_without_its_cache() -> None:
    async def scenario() -> None:
        engine, streaming, waiting = an_engine(), Answer(), Answer()
        engine.post(CHAT, ask(asked=1024), streaming)
        await asyncio.sleep(0.2)
        engine.post(CHAT, ask(b"z" * 4000), waiting)
        engine.die()
        assert (streaming.ended, waiting.ended) == ("truncated", "reset")
        with pytest.raises(ConnectionRefusedError):
            engine.post(CHAT, ask(), Answer())
        engine.recover()
        again = Answer()
        engine.post(CHAT, ask(), again)
        await asyncio.sleep(60.0)
        assert b'"cached_tokens":0}' in again.body

    in_memory(scenario)


def test_a_stopped_engine_says_nothing_until_it_is_restarted() -> None:
    async def scenario() -> None:
        engine, before, after = an_engine(), Answer(), Answer()
        engine.post(CHAT, ask(asked=1024), before)
        await asyncio.sleep(0.2)
        engine.stop()
        engine.post(CHAT, ask(), after)
        await asyncio.sleep(600.0)
        assert (before.ended, after.ended, after.status) == ("", "", 0)
        engine.recover()
        assert (before.ended, after.ended) == ("truncated", "reset")

    in_memory(scenario)


def test_slow_and_failing_engines() -> None:
    async def scenario() -> None:
        slow, usual, failing = an_engine(), an_engine(), an_engine()
        slow.slow, failing.errors, failing.status = 10.0, 1.0, 500
        answers = [Answer() for _ in range(3)]
        for engine, answer in zip((slow, usual, failing), answers, strict=True):
            engine.post(CHAT, ask(), answer)
        assert answers[2].status == 500
        await asyncio.sleep(60.0)
        assert answers[0].pieces[0][0] == pytest.approx(10.0 * answers[1].pieces[0][0])

    in_memory(scenario)


# -- clients ----------------------------------------------------------------------------------------------------------


class Scripted:
    """A target that answers each try with the next status and headers; 0: never."""

    def __init__(self, *answers: tuple[int, dict[bytes, bytes]]) -> None:
        self.answers = list(answers)
        self.left = 0

    def send(self, call: Planned, attempt: ClientCall, tried: Try) -> Callable[[], None]:
        status, fields = self.answers.pop(0)
        if status:
            attempt.head(status, fields)
            attempt.over(status != 299)
        return self._leave

    def _leave(self) -> None:
        self.left += 1


def tries_of(target: Scripted, clients: Clients) -> list[Try]:
    async def scenario() -> list[Try]:
        planned = Planned(0.0, "default", b"", {})
        return (await SimulationRun([], target, [planned], clients=clients).until(1.0, grace=1000.0)).tries

    return vtime.run(scenario())


AGAIN = {b"x-weir-reason": b"queue_full"}


@pytest.mark.parametrize(
    ("answers", "clients", "waits"),
    [
        ([(200, {})], Clients(), []),
        ([(400, {})], Clients(), []),
        ([(503, {b"retry-after-ms": b"1500"} | AGAIN), (200, {})], Clients(), [(1.5, 1.5)]),
        ([(429, {b"retry-after": b"7"} | AGAIN), (200, {})], Clients(), [(7.0, 7.0)]),
        ([(503, {b"retry-after": b"7", b"x-should-retry": b"false"})], Clients(), []),
        ([(503, {b"retry-after": b"61"}), (503, {}), (503, {})], Clients(), [(0.375, 0.5), (0.75, 1.0)]),
        ([(503, {b"retry-after": b"61"})], Clients(exact=True), []),
        ([(503, {b"retry-after": b"2"}), (503, {b"retry-after": b"2"})], Clients(exact=True, retries=1), [(2.0, 2.0)]),
        ([(0, {}), (200, {})], Clients(patience={"default": 20.0}), [(20.375, 20.5)]),
    ],
)
def test_clients_come_back_as_openai_python_does(
    answers: list[tuple[int, dict[bytes, bytes]]], clients: Clients, waits: list[tuple[float, float]]
) -> None:
    target = Scripted(*answers)
    tries = tries_of(target, clients)
    assert not target.answers
    for (before, after), (least, most) in zip(pairwise(tries), waits, strict=True):
        assert least <= after.sent - before.sent <= most
    assert all(tried.intended == 0.0 and tried.finished >= tried.sent for tried in tries)
    assert [tried.number for tried in tries] == list(range(1, len(tries) + 1))


def test_a_client_out_of_patience_leaves() -> None:
    target = Scripted((0, {}))
    (tried,) = tries_of(target, Clients(retries=0, patience={"default": 20.0}))
    assert (tried.outcome, tried.finished, target.left) == ("timed_out", 20.0, 1)


def cut(target: Scripted, seconds: float, grace: float) -> tuple[ClientCall, Try]:
    """The call that the end of a run cuts off, and its last try."""

    async def scenario() -> ClientCall:
        run = SimulationRun([], target, [Planned(0.0, "default", b"", {})], clients=Clients(timeout=600.0))
        asyncio.get_running_loop().call_later(seconds / 2, lambda: ended.extend(run.driver.open))
        await run.until(seconds, grace=grace)
        return ended[0]

    ended: list[ClientCall] = []
    client_call = vtime.run(scenario())
    return client_call, client_call.tries[-1]


def test_the_end_of_a_run_is_the_loads_and_the_grace_after_it() -> None:
    call, last = cut(Scripted((0, {})), 10.0, 5.0)
    assert (last.outcome, last.finished) == ("unfinished", 15.0)
    assert last.reason == call.result("t").reason == "still open 5 s after the load's end"


def test_a_call_cut_off_between_two_tries_is_unfinished_and_its_try_stays_as_it_was() -> None:
    call, last = cut(Scripted((503, {b"retry-after": b"7"} | AGAIN)), 1.0, 1.0)
    result = call.result("t")
    assert (result.outcome, result.reason) == ("unfinished", "still open 1 s after the load's end")
    assert (last.outcome, last.finished) == ("queue_full", 0.0)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_workload_is_fixed_up_front_by_its_seed() -> None:
    first, again, other = (list(poisson((KIND,), 50.0, 20.0, seed)) for seed in (1, 1, 2))
    assert [(call.at, call.body) for call in first] == [(call.at, call.body) for call in again]
    assert first[0].at != other[0].at
    assert len(first) == pytest.approx(1000, rel=0.15)
    assert len({call.body for call in first}) == len(first)


def through_gateway(seed: int, *, faults: tuple[Fault, ...] = (), clients: Clients | None = None) -> SimulationRun:
    async def scenario() -> SimulationRun:
        engines = [an_engine(seed=number) for number in range(2)]
        target = GatewayTarget(b"", engines, seed=seed)
        calls = poisson((KIND,), 20.0, 20.0, seed)
        run = SimulationRun(engines, target, calls, clients=clients or Clients(), seed=seed, faults=faults)
        result = await run.until(20.0, grace=300.0)
        assert target.left_over() == []
        return result

    return vtime.run(scenario())


def test_one_seed_is_one_run() -> None:
    faults = (Fault(at=8.0, what="die", engines=(0,)), Fault(at=12.0, what="recover", engines=(0,)))
    clients = Clients(leaves=0.1, leaves_after=1.0)
    first, again = (through_gateway(3, faults=faults, clients=clients) for _ in range(2))
    assert first.tries == again.tries
    assert first.samples == again.samples
    assert {tried.outcome for tried in first.tries} >= {"ok", "left"}


def test_every_answer_of_the_gateway_is_the_engines_own() -> None:
    result = through_gateway(1)
    assert {(tried.outcome, tried.recorded, tried.upstream) for tried in result.tries} == {("ok", "ok", 1)}
    assert all(0.0 < tried.first_byte - tried.sent < 1.0 < tried.finished for tried in result.tries[50:])
    assert all(tried.prompt_tokens > 16 and tried.completion_tokens > 0 for tried in result.tries)
    assert sum(engine.posts for engine in result.engines) == result.driver.calls == len(result.tries)


def conversations(turns: float, prefix: Prefix | None = None) -> Kind:
    session = Sessions(turns=Length(geometric=turns), think=1.0)
    said, output = Length(log_normal=LogNormal(60)), Length(constant=256)
    return Kind(prompt=said, output=output, prefix=prefix, session=session)


def test_sessions_grow_and_find_their_beginning_cached() -> None:
    async def scenario() -> None:
        engines = [an_engine()]
        calls = poisson((conversations(4.0, Prefix(count=1)),), 0.2, 60.0, 1)
        router = Router(engines, RULES["round_robin"])
        result = await SimulationRun(engines, router, calls, clients=Clients()).until(60.0, grace=60.0)
        assert all(tried.outcome == "ok" for tried in result.tries)
        cached = sum(tried.cached_tokens for tried in result.tries)
        assert 0.8 < cached / sum(tried.prompt_tokens for tried in result.tries) < 1.0

    in_memory(scenario)


def test_a_closed_loop_of_conversations_waits_for_their_sub_agents() -> None:
    agents = SubAgents(share=1.0, count=Length(constant=2), turns=Length(constant=3))
    kind = Kind(
        prompt=Length(constant=20), session=Sessions(turns=Length(constant=2), think=0.5, spread=0.0, subagents=agents)
    )
    closed = Arrivals(closed=Closed(clients=3, within=0.9, rounds=2))
    spans: dict[str, list[float]] = {}

    def ended(client_call: ClientCall) -> None:
        tried = client_call.tried
        spans.setdefault(client_call.call.conversation, []).extend((tried.sent, tried.finished))

    async def scenario() -> None:
        engines, calls = [an_engine()], plan(Workload(mix=(kind,)), closed.times(1), 1)
        router = Router(engines, RULES["round_robin"])
        run = SimulationRun(engines, router, calls, clients=Clients(), closed=3, ended=ended)
        await run.until(600.0)
        assert [len(times) for times in spans.values()] == [2 * (2 + 2 * 3)] * 6
        begins, ends = sorted(min(times) for times in spans.values()), sorted(max(times) for times in spans.values())
        assert begins[:3] == pytest.approx([0.0, 0.3, 0.6])
        assert all(begin >= end for begin, end in zip(begins[3:], ends, strict=False))

    in_memory(scenario)


def test_a_turn_sends_all_that_was_said_before() -> None:
    first = next(poisson((conversations(50.0),), 1.0, 60.0, 1))
    assert first.session is not None
    (second,) = first.session.follow(b" so it is", 10.0)
    assert second.at > 10.0
    before, after = first.body.partition(b'],"max_tokens"')[0], second.body
    assert after.startswith(before + b',{"role":"assistant","content":" so it is"},{"role":"user"')


def test_a_bug_under_the_simulation_ends_the_run() -> None:
    class Buggy:
        def send(self, call: Planned, attempt: ClientCall, tried: Try) -> Callable[[], None]:
            raise ZeroDivisionError("of the target's")

    async def scenario() -> None:
        with pytest.raises(Broken, match=r"Driver\._begin_due"):
            await SimulationRun([], Buggy(), poisson((KIND,), 1.0, 20.0, 1), clients=Clients()).until(20.0)

    in_memory(scenario)


def test_targets_come_from_the_policy() -> None:
    targets = targets_of(b"version: 1\nclasses: {default: {deadline: 9s}, chat: {ttft: 1s, deadline: 5s}}\n")
    assert (targets["chat"].ttft, targets["chat"].deadline) == (1.0, 5.0)
    assert targets["default"].ttft == float("inf")
