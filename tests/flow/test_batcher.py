"""Request batching in virtual time: windows, limits, failures, callers that leave, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.core.policy.traffic import Merge
from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.relay.batcher import Batcher, Exchanged
from loadtest.simulate import vtime
from tests.pooled import EMBEDDINGS, RERANK, SCORE, answer, asked, row

RULE = Merge(window=0.02, max_items=8, max_tokens=1000)


class World:
    """An engine that answers in `takes` seconds, and a batcher before it. `fails` may raise, or change the answer."""

    def __init__(self, rule: Merge | None = RULE, takes: float = 0.1) -> None:
        self.loop = asyncio.get_running_loop()
        self.batching = {"embeddings": rule, "rerank": rule, "score": rule}
        self.takes = takes
        self.fails: Callable[[Call], Exchanged | None] = lambda call: None
        self.factor = 1.0
        self.bodies = BodyMemory()
        self.batcher = Batcher(lambda: self.batching, self.exchange, self.loop.time, self.bodies, lambda _: self.factor)
        self.sent: list[tuple[float, Call]] = []
        self.open = 0
        self.most_open = 0
        self.cancelled = 0
        self.number = 0

    async def exchange(self, call: Call) -> Exchanged:
        self.sent.append((self.loop.time(), call))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.takes)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1
        failure = self.fails(call)
        if failure is not None:
            return failure
        status, body = answer(call)
        told = body["usage"]["prompt_tokens"] if status == 200 else None
        return Exchanged(status=status, body=json.dumps(body).encode(), engine="e", prompt_tokens=told)

    def call(self, body: Any = "x", path: str = EMBEDDINGS, **more: Any) -> Call:
        self.number += 1
        body = body if isinstance(body, dict) else {"input": body}
        return asked(path, body, now=self.loop.time(), request_id=f"id{self.number}", **more)

    async def ask(self, body: Any = "x", path: str = EMBEDDINGS, **more: Any) -> Exchanged:
        piece = self.batcher.piece(self.call(body, path, **more))
        assert piece is not None
        return await self.batcher.answer(piece)

    def asking(self, *texts: Any) -> list[asyncio.Task[Exchanged]]:
        return [asyncio.create_task(self.ask(text)) for text in texts]

    async def warm(self) -> None:
        """Calls have come close upon each other: the next one waits for others."""
        await asyncio.gather(*(self.ask(f"warm{number}") for number in range(8)), self.ask("warm"))
        self.sent.clear()
        self.batcher._states[next(iter(self.batcher._states))].pace.at = self.loop.time()

    def inputs(self) -> list[Any]:
        return [json.loads(call.body)["input"] for _, call in self.sent]

    def idle(self) -> None:
        """No request, no task, no timer and no open batch is left."""
        assert self.open == 0
        assert self.bodies.held == 0
        assert not self.batcher.tasks
        assert all(state.batch is None for state in self.batcher._states.values())
        assert isinstance(self.loop, vtime.VirtualLoop)
        assert not self.loop.timers
        assert asyncio.all_tasks() == {asyncio.current_task()}


def virtual(scenario: Callable[[World], Awaitable[None]], **world: Any) -> None:
    async def main() -> None:
        made = World(**world)
        await scenario(made)
        made.idle()

    vtime.run(main())


def vectors(part: Exchanged) -> list[Any]:
    return [one["embedding"] for one in json.loads(part.body)["data"]]


def test_a_merged_body_is_held_while_it_is_sent_and_those_it_was_made_of_are_let_go() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        pieces = [world.batcher.piece(world.call(text)) for text in ("a", "b")]
        asking = [asyncio.create_task(world.batcher.answer(piece)) for piece in pieces if piece is not None]
        await asyncio.sleep(0.05)
        ((_, merged),) = world.sent
        assert world.bodies.held == len(merged.body)
        assert [(piece.lists, piece.fields) for piece in pieces if piece is not None] == [({}, {})] * 2
        assert [vectors(part) for part in await asyncio.gather(*asking)] != []
        assert world.bodies.held == 0

    virtual(scenario)


def test_where_there_is_no_room_for_a_merged_body_each_goes_by_itself() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        world.bodies.apply(10)
        parts = await asyncio.gather(*world.asking("a", "b"))
        assert world.inputs() == ["a", "b"]
        assert [part.calls for part in parts] == [1, 1]
        assert world.bodies.refused["memory"] == 1

    virtual(scenario)


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_lone_call_goes_at_once_as_it_came() -> None:
    async def scenario(world: World) -> None:
        for number in range(3):
            part = await world.ask(f"text {number}")
            await asyncio.sleep(0.5)
            assert (part.calls, part.prompt_tokens, part.engine) == (1, 8, "e")
            assert vectors(part) == [row(f"text {number}")]
        assert [at for at, _ in world.sent] == [0.0, 0.6, 1.2]
        assert world.inputs() == ["text 0", "text 1", "text 2"], "the body it came with"
        assert world.batcher.batches == {"alone": 3, "window": 0, "items": 0, "tokens": 0}
        assert world.batcher.merged == 0

    virtual(scenario)


def test_of_a_burst_the_first_goes_at_once_and_the_others_together() -> None:
    async def scenario(world: World) -> None:
        parts = await asyncio.gather(*world.asking("a", ["b", "c"], "d"))
        assert world.inputs() == ["a", ["b", "c", "d"]]
        assert [at for at, _ in world.sent] == pytest.approx([0.0, 0.0025])
        assert [vectors(part) for part in parts] == [[row("a")], [row("b"), row("c")], [row("d")]]
        assert [part.calls for part in parts] == [1, 2, 2]
        assert world.batcher.batches == {"alone": 1, "window": 1, "items": 0, "tokens": 0}
        assert world.batcher.merged == 2

    virtual(scenario)


def test_the_window_grows_with_the_rate_and_counts_from_the_first() -> None:
    async def scenario(world: World) -> None:
        tasks = []
        for number in range(400):
            tasks += world.asking(f"text {number}")
            await asyncio.sleep(0.004)
        await asyncio.gather(*tasks)
        sizes = [len(body) for body in world.inputs()[20:-1]]
        assert set(sizes) <= {4, 5}, "every 4 ms for 16 ms"
        assert world.batcher.batches["alone"] <= 3

    virtual(scenario)


def test_slow_callers_do_not_wait() -> None:
    async def scenario(world: World) -> None:
        for number in range(50):
            began = world.loop.time()
            await world.ask(f"text {number}")
            assert world.loop.time() == pytest.approx(began + world.takes)
        assert world.batcher.batches["alone"] == 50

    virtual(scenario, takes=0.025)


def test_a_full_batch_leaves_at_once() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        now = world.loop.time()
        await asyncio.gather(*world.asking(*"abcdefgh", *"ijk"))
        assert [len(inputs) for inputs in world.inputs()] == [8, 3]
        assert [at - now for at, _ in world.sent] == pytest.approx([0.0, 0.02], abs=0.01)
        assert world.sent[0][0] == now

    virtual(scenario)


def test_a_call_too_many_goes_into_the_next_batch() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        before = dict(world.batcher.batches)
        await asyncio.gather(*world.asking(["a"] * 5, ["b"] * 4, "c" * 3000, "d" * 3000))
        assert world.inputs() == [["a"] * 5, ["b"] * 4 + ["c" * 3000], "d" * 3000]
        after = world.batcher.batches
        assert {name: after[name] - before[name] for name in after} == {
            "alone": 0,
            "window": 1,
            "items": 1,
            "tokens": 1,
        }

    virtual(scenario)


def test_enough_tokens_are_a_full_batch() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        tokens = 3 * world.call("a" * 20).prompt_tokens
        world.batching = {"embeddings": Merge(window=0.02, max_items=100, max_tokens=tokens)}
        now, before = world.loop.time(), world.batcher.batches["tokens"]
        await asyncio.gather(*world.asking(*["a" * 20] * 3))
        assert [at for at, _ in world.sent] == [now]
        assert world.batcher.batches["tokens"] == before + 1

    virtual(scenario)


@pytest.mark.parametrize(
    "change",
    [
        lambda world: ["a"] * 8,
        lambda world: "a" * 8000,
        lambda world: setattr(world, "factor", 0.0) or "a",
        lambda world: setattr(world, "batching", {}) or "a",
    ],
    ids=["enough items", "enough tokens", "shrunken to nothing", "switched off meanwhile"],
)
def test_these_do_not_wait(change: Callable[[World], Any]) -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        piece = world.batcher.piece(world.call("a"))
        assert piece is not None
        body = change(world)
        call = world.call(body)
        made = world.batcher.piece(call) or piece
        now = world.loop.time()
        await asyncio.gather(world.batcher.answer(made), world.batcher.answer(made))
        assert [at for at, _ in world.sent] == [now, now]

    virtual(scenario)


@pytest.mark.parametrize("body", [["a"] * 8, "a" * 8000])
def test_what_is_a_batch_already_leaves_the_open_one_alone(body: Any) -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        now = world.loop.time()
        await asyncio.gather(*world.asking("x", body, "y"))
        assert world.inputs() == [body, ["x", "y"]]
        assert world.sent[0][0] == now < world.sent[1][0]

    virtual(scenario)


def test_who_has_no_time_does_not_wait_and_hurries_nobody() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        now = world.loop.time()
        tasks = world.asking("a", "b")
        tasks += [asyncio.create_task(world.ask(text, x_weir_deadline_ms="150")) for text in ("c", "d", "e")]
        await asyncio.gather(*tasks)
        assert world.inputs() == ["c", "d", "e", ["a", "b"]]
        assert [at for at, _ in world.sent[:3]] == [now] * 3
        assert world.sent[3][1].deadline == now + 300.0

    virtual(scenario)


def test_windows_shrink() -> None:
    async def scenario(world: World) -> None:
        world.factor = 0.25
        await world.warm()
        now = world.loop.time()
        await asyncio.gather(*world.asking("a", "b"))
        assert 0.0 < world.sent[0][0] - now <= 0.005

    virtual(scenario)


def test_what_may_not_be_merged_is_not() -> None:
    async def scenario(world: World) -> None:
        bodies = [
            (EMBEDDINGS, {"input": "a"}),
            (EMBEDDINGS, {"input": [7]}),
            (EMBEDDINGS, {"input": "a", "dimensions": 4}),
            (RERANK, {"query": "q", "documents": ["a", "b"]}),
            (RERANK, {"query": "p", "documents": ["a", "b"], "top_n": 1}),
            (SCORE, {"text_1": "a", "text_2": "b"}),
            (SCORE, {"text_1": "a", "text_2": ["b", "c"]}),
        ]
        calls = [world.call(body, path) for path, body in bodies for _ in range(3)]
        pieces = [piece for call in calls if (piece := world.batcher.piece(call)) is not None]
        parts = await asyncio.gather(*map(world.batcher.answer, pieces))
        for call, part in zip(calls, parts, strict=True):
            assert json.loads(part.body) | {"usage": 0} == answer(call)[1] | {"usage": 0}
        assert len(world.sent) == 2 * len(bodies), "of each, one alone and two together"
        assert world.batcher.piece(world.call({"messages": [{"role": "user", "content": "x"}]})) is None
        world.batching = {}
        assert world.batcher.piece(world.call("a")) is None

    virtual(scenario)


def test_keys_are_forgotten() -> None:
    async def scenario(world: World) -> None:
        for number in range(50):
            await world.ask({"query": f"q{number}", "documents": ["a"]}, RERANK)
        assert len(world.batcher._states) == pytest.approx(20, abs=2), "those of two seconds"
        await asyncio.sleep(3.0)
        await world.ask("a")
        assert len(world.batcher._states) == 1

    virtual(scenario)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "status"), [("bad", 400), ("broken", 500)])
def test_a_bad_input_fails_nobody_else(word: str, status: int) -> None:
    async def scenario(world: World) -> None:
        world.batching = {"embeddings": Merge(max_items=40)}
        await world.warm()
        world.most_open = 0
        texts = [f"text {number}" for number in range(20)]
        parts = await asyncio.gather(*world.asking(*texts[:10], word, *texts[10:]))
        assert [part.status for part in parts] == [200] * 10 + [status] + [200] * 10
        assert [vectors(part) for part in parts if part.status == 200] == [[row(text)] for text in texts]
        assert b"+" not in parts[10].body, "its own error, not the merged call's"
        assert (len(world.sent), world.most_open, world.batcher.again) == (22, 8, 21)

    virtual(scenario)


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_what_no_input_is_the_cause_of_is_everybodys(status: int) -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        world.fails = lambda call: Exchanged(status=status, body=b"busy", engine="e")
        parts = await asyncio.gather(*world.asking("a", "b"))
        assert [(part.status, part.body, part.calls) for part in parts] == [(status, b"busy", 2)] * 2
        assert (len(world.sent), world.batcher.again) == (1, 0)

    virtual(scenario)


def refusing(outcome: Outcome) -> Callable[[Call], Exchanged | None]:
    def fails(call: Call) -> Exchanged | None:
        if "+" in call.request_id:
            raise Refused(
                outcome, "no", param="p", code="c", retry_after=3.0, headers=b"x: y\r\n",
                retry=False, limit="1/h requests", kept=True, reason="no_memory",
            )  # fmt: skip
        return None

    return fails


@pytest.mark.parametrize(
    "outcome", [Outcome.TOO_LARGE, Outcome.DEADLINE_UNREACHABLE, Outcome.BAD_REQUEST, Outcome.QUEUE_FULL, Outcome.SHED]
)
def test_what_is_refused_for_its_size_or_told_a_time_goes_singly(outcome: Outcome) -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        world.fails = refusing(outcome)
        parts = await asyncio.gather(*world.asking("a", "b"))
        assert [vectors(part) for part in parts] == [[row("a")], [row("b")]]
        assert world.inputs() == [["a", "b"], "a", "b"]

    virtual(scenario)


@pytest.mark.parametrize("outcome", [Outcome.MODEL_UNAVAILABLE, Outcome.EXPIRED, Outcome.UPSTREAM, Outcome.DRAINING])
def test_any_other_refusal_is_everybodys_own(outcome: Outcome) -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        world.fails = refusing(outcome)
        errors = await asyncio.gather(*world.asking("a", "b"), return_exceptions=True)
        assert errors[0] is not errors[1]
        for error in errors:
            assert isinstance(error, Refused)
            assert (error.outcome, error.message, error.param, error.code) == (outcome, "no", "p", "c")
            assert (error.retry_after, error.headers) == (3.0, b"x: y\r\n")
            assert (error.retry, error.limit, error.kept, error.reason) == (False, "1/h requests", True, "no_memory")
        assert len(world.sent) == 1

    virtual(scenario)


def test_an_answer_that_cannot_be_taken_apart_is_the_engines_failure() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        world.fails = lambda call: Exchanged(status=200, body=b'{"data":[{"index":0}]}', engine="e7")
        errors = await asyncio.gather(*world.asking("a", "b"), return_exceptions=True)
        for error in errors:
            assert isinstance(error, Refused)
            assert error.outcome is Outcome.UPSTREAM
            assert "An engine was asked for 2 merged calls, and it answered 1 rows" in error.message
            assert error.detail == f"e7: {error.message}", "which one is for the log"

    virtual(scenario)


def test_a_bug_is_told_to_everybody() -> None:
    async def scenario(world: World) -> None:
        def bug(call: Call) -> None:
            raise ZeroDivisionError

        await world.warm()
        world.fails = bug
        errors = await asyncio.gather(*world.asking("a", "b"), return_exceptions=True)
        assert [type(error) for error in errors] == [ZeroDivisionError] * 2

    virtual(scenario)


# -- leaving ----------------------------------------------------------------------------------------------------------


def test_who_leaves_while_his_batch_waits_is_not_in_it() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        tasks = world.asking(["a"] * 3, "b", ["c"] * 3)
        await asyncio.sleep(0.005)
        tasks[0].cancel()
        await asyncio.sleep(0)
        tasks += world.asking(["d"] * 3)
        parts = await asyncio.gather(*tasks, return_exceptions=True)
        assert world.inputs() == [["b", "c", "c", "c", "d", "d", "d"]], "and his items leave room"
        assert [isinstance(part, asyncio.CancelledError) for part in parts] == [True, False, False, False]

        await world.warm()
        tokens = 2 * world.call("a" * 20).prompt_tokens + 1
        world.batching = {"embeddings": Merge(window=0.02, max_items=100, max_tokens=tokens)}
        tasks = world.asking("b" * 20, "a" * 20)
        await asyncio.sleep(0.001)
        tasks[1].cancel()
        await asyncio.sleep(0)
        await asyncio.gather(tasks[0], *world.asking("c" * 20))
        assert world.inputs() == [["b" * 20, "c" * 20]], "nor do his tokens count"

    virtual(scenario)


def test_when_all_leave_while_it_waits_nothing_is_sent() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        tasks = world.asking("a", "b")
        await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        world.idle()
        await asyncio.sleep(1.0)
        assert not world.sent

    virtual(scenario)


def test_after_it_was_sent_the_rest_go_on_and_the_last_takes_the_request_along() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        tasks = world.asking("a", "b", "c")
        await asyncio.sleep(0.05)
        tasks[1].cancel()
        parts = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(parts[1], asyncio.CancelledError)
        assert [vectors(part) for part in parts if isinstance(part, Exchanged)] == [[row("a")], [row("c")]]
        assert world.cancelled == 0

        await world.warm()
        tasks = world.asking("a", "b")
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        assert (world.open, world.cancelled) == (1, 0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0)
        assert (world.open, world.cancelled) == (0, 1)

    virtual(scenario)


def test_who_leaves_is_known_to_have_been_with_an_engine_or_not() -> None:
    async def scenario(world: World) -> None:
        calls = [world.call(text) for text in "abcd"]

        async def asks(call: Call) -> None:
            piece = world.batcher.piece(call)
            assert piece is not None
            await world.batcher.answer(piece)

        async def left(tasks: list[asyncio.Task[None]], leaving: int) -> None:
            tasks[leaving].cancel()
            await asyncio.wait((tasks[leaving],))

        await world.warm()
        tasks = [asyncio.create_task(asks(call)) for call in calls]
        await asyncio.sleep(0.001)
        await left(tasks, 0)
        assert calls[0].sent_at is None, "its batch was still open"
        await asyncio.sleep(0.05)
        await left(tasks, 1)
        assert calls[1].sent_at == world.loop.time(), "no engine has it yet, and one will: for the others"
        world.sent[0][1].sent_at = 7.0
        await left(tasks, 2)
        await left(tasks, 3)
        assert (calls[2].sent_at, calls[3].sent_at) == (7.0, 7.0)
        await asyncio.sleep(0)

        await world.warm()
        calls = [world.call(text) for text in "ab"]
        tasks = [asyncio.create_task(asks(call)) for call in calls]
        await asyncio.sleep(0.05)
        await left(tasks, 0)
        await left(tasks, 1)
        assert calls[1].sent_at is None, "it was the last, and no engine had it"
        await asyncio.sleep(0)

    virtual(scenario)


@pytest.mark.parametrize("leaving", [1, 2])
def test_leaving_in_the_moment_of_sending(leaving: int) -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        calls = [world.call(text) for text in "ab"]
        pieces = [world.batcher.piece(call) for call in calls]
        tasks = [asyncio.create_task(world.batcher.answer(piece)) for piece in pieces if piece is not None]
        await asyncio.sleep(0)
        (batch,) = [state.batch for state in world.batcher._states.values() if state.batch is not None]
        before = sum(world.batcher.batches.values())
        for task in tasks[:leaving]:
            task.cancel()  # their futures are cancelled; they have not run yet
        world.batcher._send(batch, "window")
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [True, leaving == 2]
        assert world.inputs() == ([] if leaving == 2 else ["b"])
        assert calls[0].sent_at is None, "it cost no engine anything"
        assert sum(world.batcher.batches.values()) - before == 2 - leaving

    virtual(scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_in_the_moment_of_the_answer(fails: bool) -> None:
    async def scenario(world: World) -> None:
        unread: list[dict[str, Any]] = []
        world.loop.set_exception_handler(lambda loop, context: unread.append(context))
        await world.warm()
        if fails:
            world.fails = refusing(Outcome.UPSTREAM)
        stays, leaves = world.asking("a", "b")
        await asyncio.sleep(0)
        (batch,) = [state.batch for state in world.batcher._states.values() if state.batch is not None]
        batch.members[0].part.add_done_callback(
            lambda _, task=leaves: task.cancel()
        )  # both have parts and have not run
        await asyncio.wait((stays, leaves))
        assert leaves.cancelled()
        assert (stays.exception() is not None) is fails
        del batch, stays, leaves
        gc.collect()
        assert not unread

    virtual(scenario)


def test_who_leaves_while_sent_singly_takes_only_his_own_along() -> None:
    async def scenario(world: World) -> None:
        world.batching = {"embeddings": Merge(max_items=40)}
        await world.warm()
        tasks = world.asking("bad", *(f"text {number}" for number in range(11)))
        await asyncio.sleep(0.15)  # eight are under way, four wait for a place
        assert world.open == 8
        tasks[1].cancel()
        tasks[11].cancel()
        parts = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(part, Exchanged) for part in parts] == [True, False, *[True] * 9, False]
        assert world.cancelled == 1

    virtual(scenario)


def test_a_request_that_is_ended_from_outside_ends_its_callers() -> None:
    async def scenario(world: World) -> None:
        await world.warm()
        tasks = world.asking("a", "b")
        await asyncio.sleep(0.05)
        for task in world.batcher.tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)

    virtual(scenario)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 25))])
def test_random_lives_each_get_their_own_and_leave_nothing_behind(seed: int) -> None:
    async def scenario(world: World) -> None:
        rng = random.Random(seed)
        unread: list[dict[str, Any]] = []
        world.loop.set_exception_handler(lambda loop, context: unread.append(context))

        def fails(call: Call) -> Exchanged | None:
            world.takes = rng.uniform(0.0, 0.08)
            drawn = rng.random()
            if drawn < 0.02:
                raise Refused(rng.choice([Outcome.TOO_LARGE, Outcome.UPSTREAM, Outcome.QUEUE_FULL]), "no")
            if drawn < 0.06:
                return Exchanged(status=rng.choice([400, 429, 500, 503]), body=b"{}", engine="e")
            return Exchanged(status=200, body=b'{"data":[]}', engine="e") if drawn < 0.08 else None

        async def life(body: dict[str, Any], path: str, **more: str) -> str:
            call = world.call(body, path, **more)
            piece = world.batcher.piece(call)
            assert piece is not None
            part = await world.batcher.answer(piece)
            if part.status != 200:
                return "error"
            if part.body == b'{"data":[]}':
                return "garbage"
            got, alone = json.loads(part.body), answer(call)[1]
            assert got | {"usage": 0} == alone | {"usage": 0}
            return "merged" if part.calls > 1 else "alone"

        def body() -> tuple[dict[str, Any], str]:
            word = rng.choice(["bad", *(f"text {rng.random()}" for _ in range(20))])
            return rng.choice([
                ({"input": word}, EMBEDDINGS),
                ({"input": [f"{word}{number}" for number in range(rng.randint(1, 9))]}, EMBEDDINGS),
                ({"input": [rng.randint(0, 9)] * 3}, EMBEDDINGS),
                ({"query": "q", "documents": [word, "b"], "top_n": rng.randint(0, 2)}, RERANK),
                ({"text_1": word, "text_2": "b"}, SCORE),
            ])  # fmt: skip

        world.fails = fails
        tasks: list[asyncio.Task[str]] = []
        for number in range(3000):
            rate = (20, 200, 3000)[number // 100 % 3]
            await asyncio.sleep(rng.expovariate(rate))
            more = {"x_weir_deadline_ms": "100"} if rng.random() < 0.05 else {}
            tasks.append(asyncio.create_task(life(*body(), **more)))
            if rng.random() < 0.2:
                rng.choice(tasks[-40:]).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {result if isinstance(result, str) else type(result) for result in results}
        assert kinds == {"merged", "alone", "error", "garbage", Refused, asyncio.CancelledError}
        assert world.cancelled
        assert world.batcher.again
        assert not unread

    virtual(scenario)
