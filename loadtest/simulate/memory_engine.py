"""Simulated vLLM without sockets: one `Engine`, driven by the event loop's clock, answering in memory.

    leave = engine.post(path, body, taker)      # `taker` is told what comes back; `leave()` is a closed connection

One timer per engine step, none per token, so it belongs in virtual time: a stream is its first event, when the first
token is out, and all the rest at the end. When the tokens between were written a `Pace` can tell. What is asked and
answered is `memory_requests.py`'s.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

from loadtest.engine import kv_transfer
from loadtest.engine.api.checks import BROKEN, ApiError, Limits
from loadtest.engine.engine import LEAST_AHEAD, Engine
from loadtest.engine.engine_config import EngineConfig
from loadtest.engine.latency import Front
from loadtest.engine.scheduler import EngineStep
from loadtest.engine.sequence import BLOCK, Sequence
from loadtest.simulate.memory_requests import Taker, Work, read, refuse
from loadtest.simulate.step_times import Pace

MOST_AHEAD = 64  # steps that are made with one timer where nothing but decoding is to be done
Reading = tuple[float, int, int]  # KV cache in use (0..1), sequences running, sequences waiting
Condition = Literal["up", "dead", "stopped", "stalled"]
HANGS = ("stopped", "stalled")  # connections are open, and nothing comes


class MemoryEngine:
    """Simulated engine, which serves `model` and, as if they were the same, `more`. `posts` counts the requests that
    reached the engine; `posted_at`: when the last was sent.

    Faults: `die`; `stop` (SIGSTOP: connections stay open, nothing comes); `stall` (calls alone hang: health checks and
    samples are answered); `slow` (every step takes this many times as long); `errors` (this share of requests is
    answered with `status` at once); `transfer` (what is wrong with its answers to prompts read for others); `recover`.
    `peers`: engines that it exchanges prompts with; None: with none.
    """

    def __init__(
        self, config: EngineConfig, *, model: str = "sim", seed: int = 0, more: tuple[str, ...] = (),
        pace: Pace | None = None, peers: list[MemoryEngine] | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.model = model
        self.lives = 0  # so many times it has died
        self.peers = peers
        self.on_kv_failure: kv_transfer.OnFailure = "fail"
        self._seed = seed
        self._engine = self._new_engine(seed)
        self._front = Front(config.profile)
        self.limits = Limits(
            models=(model, *more),
            max_model_len=config.profile.max_model_len,
            priorities=config.policy == "priority",
            prompt_details=True,
        )
        self.pace = pace
        self.condition: Condition = "up"
        self.changed_at = 0.0  # when it died, stopped or recovered last
        self._slow = 1.0
        self.errors = 0.0
        self.transfer: kv_transfer.Wrong = ""
        self.status = 503
        self.posts = 0
        self.posted_at = -1.0
        self.left: Callable[[Taker, int], None] = lambda *_: None  # told of who leaves, and the tokens written by then
        self.open: dict[Taker, Work | None] = {}  # unanswered, or not wholly; None: it came while stopped
        self._rng = random.Random(seed)  # noqa: S311 # draws faults
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._ahead: list[float] | None = None  # the ends of steps that are under way, the first of them begun
        self._reach = LEAST_AHEAD  # as far as nobody asked for anything else the last times

    def __repr__(self) -> str:
        return f"<MemoryEngine {self.condition} {self._engine!r}>"

    @property
    def engine(self) -> Engine:
        """Reading of its scheduler and of what it counts, as of now."""
        self._settle()
        return self._engine

    @property
    def slow(self) -> float:
        """Make every step take so many times as long as usual from now on."""
        return self._slow

    @slow.setter
    def slow(self, times: float) -> None:
        self._settle()
        self._slow = times

    def reading(self) -> Reading:
        """Return the share of KV cache in use, and the sequences that run and that wait."""
        scheduler = self.engine.scheduler
        return scheduler.blocks.usage, len(scheduler.running), scheduler.waiting

    # -- requests -----------------------------------------------------------------------------------------------

    def post(self, path: bytes, body: bytes, taker: Taker, request_id: str = "") -> Callable[[], None]:
        """Take a request. The function returned ends it: a connection that is closed. Raises ConnectionRefusedError."""
        self.posts += 1
        self.posted_at = self._loop.time()
        if self.condition == "dead":
            raise ConnectionRefusedError("connection refused")
        if self.condition in HANGS:  # the kernel still takes the connection
            self.open[taker] = None
            return lambda: self._withdraw(taker)
        if self.errors and self._rng.random() < self.errors:
            return refuse(taker, ApiError(self.status, "a fault was asked for", type="InternalServerError"))
        try:
            work = Work(taker, read(path, body, self.limits))
            fetched = self._transfer(work, None if self.peers is None else kv_transfer.transfer_of(body), request_id)
        except ApiError as error:
            return refuse(taker, error)
        self.open[taker] = work
        reaches = max(self._front.reaches(self.posted_at), fetched)
        if reaches > self.posted_at:
            work.coming = self._loop.call_at(reaches, self._enter, work, self.posted_at)
        else:
            self._enter(work, self.posted_at)
        return lambda: self._withdraw(taker)

    def _new_engine(self, seed: int) -> Engine:
        return Engine(self.config, engine_id=f"{self.model}-{seed}-{self.lives}")

    def _transfer(self, work: Work, params: kv_transfer.TransferParams | None, request_id: str) -> float:
        """Have the prompt kept for another engine, or fetch it from there. Return the time when it is here; 0: nothing
        comes. Raises ApiError where it cannot be fetched."""
        if params is None or self.peers is None:
            return 0.0
        sequence = work.asked.sequences[0]
        if not params.do_remote_prefill:
            sequence.keeps = True
            work.told = partial(self._keep, self._engine, sequence, request_id)
            return 0.0
        up = [peer.engine.kept for peer in self.peers if peer.condition == "up"]
        kept = next((each for each in up if each.engine_id == params.remote_engine_id), None)
        read = None if kept is None else kept.fetch(params.remote_engine_id, params.remote_request_id)
        if read is not None:
            whole = sequence.prompt // BLOCK
            if read.prompt != sequence.prompt or read.hashes[:whole] != sequence.hashes[:whole]:
                raise RuntimeError(f"{request_id} fetches the KV cache of another prompt: {read} for {sequence}")
            sequence.loaded = read.prompt
            return self.posted_at + kv_transfer.transfer_seconds(read.prompt)
        if self.on_kv_failure == "fail":
            raise ApiError(500, kv_transfer.FAILED, type=BROKEN)
        return 0.0

    def _keep(self, engine: Engine, sequence: Sequence, request_id: str, answer: bytes) -> bytes:
        params = engine.kept.keep(request_id, sequence)
        if sequence.reason != "length":
            engine.kept.expire(request_id)
            return answer
        self._loop.call_later(kv_transfer.KEPT, engine.kept.expire, request_id)
        return kv_transfer.with_params(answer, params, self.transfer)

    def _enter(self, work: Work, came: float) -> None:
        work.coming = None
        for sequence in work.asked.sequences:
            self.engine.add(sequence, came)
        self._wake()

    def _withdraw(self, taker: Taker) -> None:
        work = self.open.pop(taker, None)
        if work is not None:
            if work.coming is not None:
                work.coming.cancel()
                return
            for sequence in work.asked.sequences:
                self.engine.abort(sequence)
                sequence.owner = None  # a circle less for the garbage collector, here and below
            self.left(taker, sum([sequence.generated for sequence in work.asked.sequences]))

    # -- steps --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._timer is None and self.condition == "up" and self.engine.busy:
            self._timer = self._loop.call_soon(self._step)  # not at once: what came together is scheduled together

    def _step(self) -> None:
        if self.condition != "up" or not self._engine.busy:
            self._timer = None
            return
        now, engine = self._loop.time(), self._engine
        if self._slow == 1.0:
            ahead = self._ahead = engine.look_ahead(now, self._reach)
            if ahead is not None:
                self._timer = self._loop.call_at(ahead[-1], self._all_decoded)
                return
        result = engine.step(now)
        self._timer = self._loop.call_at(now + result.duration * self._slow, self._hand_out, result)

    def _all_decoded(self) -> None:
        ahead, self._ahead = self._ahead, None
        assert ahead is not None  # noqa: S101 # what cancels it cancels the timer
        self._reach = min(2 * self._reach, MOST_AHEAD)
        self._engine.go_on(len(ahead))
        self._paced(ahead)
        self._step()

    def _settle(self) -> None:
        """Make only the steps looked ahead that have begun, because the state is read or a new request has come."""
        ahead = self._ahead
        if ahead is None:
            return
        self._ahead = None
        begun = min(bisect_right(ahead, self._loop.time()) + 1, len(ahead))
        self._reach = max(LEAST_AHEAD, begun)
        self._engine.go_on(begun)
        self._paced(ahead[: begun - 1])
        if self._timer is not None:
            self._timer.cancel()
        end = ahead[begun - 1]
        self._timer = self._loop.call_at(end, self._hand_out, EngineStep([], [], ends=end))

    def _paced(self, ends: Iterable[float]) -> None:
        if self.pace is not None:
            for end in ends:
                self.pace.ended(end)

    def _hand_out(self, result: EngineStep) -> None:
        if self.condition != "up":
            self._timer = None
            return
        step = 0 if self.pace is None else self.pace.ended(self._loop.time())
        for sequence in result.prefilled:
            if sequence.owner is not None:
                work: Work = sequence.owner
                work.tokens.append((sequence.generated, step))
                work.first()
        for sequence in result.finished:
            work = sequence.owner
            if work is None:  # its client left while the step ran
                continue
            sequence.owner = None
            work.left -= 1
            if work.left == 0 and self.open.pop(work.taker, None) is not None:  # else its client left meanwhile
                if self.pace is not None and work.begun:
                    self.pace.finished(work.taker, work.tokens, sequence.output)
                work.finished()
        self._step()

    # -- faults -------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """SIGKILL: connections are refused, answers are cut, the cache is gone."""
        self._becomes("dead")
        self.lives += 1
        self._engine = self._new_engine(self._seed)
        lost, self.open = self.open, {}
        for taker, work in lost.items():
            if work is not None and work.coming is not None:
                work.coming.cancel()
            if work is not None and work.begun:
                taker.failed("truncated", "the engine closed the connection in the middle of its answer")
            else:
                taker.failed("reset", "the engine closed the connection before answering")

    def stop(self) -> None:
        """SIGSTOP: nothing moves any more."""
        self._becomes("stopped")

    def stall(self) -> None:
        """Hang its core, and not its HTTP server."""
        self._becomes("stalled")

    def recover(self) -> None:
        """Restore a failed engine. A hung engine is killed and started again."""
        if self.condition in HANGS:
            self.die()
        if self.condition != "up":
            self._becomes("up")
        self.slow, self.errors, self.transfer = 1.0, 0.0, ""

    def _becomes(self, condition: Condition) -> None:
        self._settle()
        self.condition = condition
        self.changed_at = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
