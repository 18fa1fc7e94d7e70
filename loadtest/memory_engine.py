"""The simulated vLLM without sockets: one `Engine`, driven by the event loop's clock, answering in memory.

    leave = engine.post(path, body, taker)      # `taker` is told what comes back; `leave()` is a closed connection

One timer per engine step, none per token, so it belongs in virtual time: a stream is its first event, when the first
token is out, and all the rest at the end. Prompts are the same tokens and KV blocks as over HTTP (`tokens.py`), so
prefix hits are real; every answer says the same word again and again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from loadtest.engine import tokens
from loadtest.engine.checks import ApiError, Limits, check_model, decode, output_room
from loadtest.engine.engine import Engine, EngineConfig, StepResult
from loadtest.engine.sequence import Sequence, State

WORD = b" ban"
SSE = b"text/event-stream; charset=utf-8"
JSON = b"application/json"
FIRST = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"%b"}}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":"%b"}]}\n\n'
USAGE = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
COUNTED = b'data: {"choices":[],"usage":%b}\n\n'
WHOLE = (
    b'{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"%b"},'
    b'"finish_reason":"%b"}],"usage":%b}'
)
DONE = b"data: [DONE]\n\n"
Condition = Literal["up", "dead", "stopped"]


class Taker(Protocol):
    """Who takes an answer. `begin` comes first and once; after `end` or `failed` nothing comes."""

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None: ...
    def data(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def failed(self, kind: Literal["reset", "truncated"], message: str) -> None: ...


class Options(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class Chat(msgspec.Struct, gc=False):
    """What is read of a chat request; the rest is taken as vLLM takes it, and changes nothing."""

    messages: list[dict[str, Any]]
    model: str | None = None
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stream_options: Options | None = None


_CHAT = msgspec.json.Decoder(Chat)


class Work:
    """One request under way: its sequence, and how its answer is written down."""

    __slots__ = ("begun", "counts", "sequence", "stream", "taker")

    def __init__(self, taker: Taker, sequence: Sequence, stream: bool, counts: bool) -> None:
        self.taker = taker
        self.sequence = sequence
        self.stream = stream
        self.counts = counts  # a stream that ends with its usage
        self.begun = False
        sequence.owner = self

    def first(self) -> None:
        """The first token is out. After a preemption the prompt is read again, and nothing is said twice."""
        if self.stream and not self.begun:
            self.begun = True
            self.taker.begin(200, SSE, FIRST % WORD, None)

    def finished(self) -> None:
        """The last token is out."""
        sequence, taker = self.sequence, self.taker
        reason = sequence.reason.encode()
        said = sequence.output - (sequence.reason == "stop")  # the end token is counted and says nothing
        numbers = sequence.prompt, sequence.output, sequence.prompt + sequence.output, max(0, sequence.cached)
        if self.stream:
            last = LAST % (WORD * max(0, said - 1), reason)
            taker.data(last + (COUNTED % (USAGE % numbers) if self.counts else b"") + DONE)
        else:
            body = WHOLE % (WORD * said, reason, USAGE % numbers)
            taker.begin(200, JSON, body, len(body))
        taker.end()


class MemoryEngine:
    """One simulated engine. `posts` counts the requests that reached it, `posted_at` is when the last one was sent.

    Faults: `die`, `stop` (SIGSTOP: connections open, nothing comes), `slow` (every step takes this many times as
    long), `errors` (this share of requests is answered with `status` at once), `recover`.
    """

    def __init__(self, config: EngineConfig, *, model: str = "sim", seed: int = 0) -> None:
        self.config = config
        self.model = model
        self.engine = Engine(config)
        self.limits = Limits(models=(model,), max_model_len=config.max_model_len, priorities=False, prompt_details=True)
        self.condition: Condition = "up"
        self.changed_at = 0.0  # when it died, stopped or recovered last
        self.slow = 1.0
        self.errors = 0.0
        self.status = 503
        self.posts = 0
        self.posted_at = -1.0
        self.open: dict[Taker, Work | None] = {}  # unanswered, or not wholly; None: it came while stopped
        self._rng = random.Random(seed)  # noqa: S311 # draws faults
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None

    def __repr__(self) -> str:
        return f"<MemoryEngine {self.condition} {self.engine!r}>"

    @property
    def serves(self) -> bool:
        """Whether a request sent now would be worked on."""
        return self.condition == "up" and self.errors < 1.0

    @property
    def preempted(self) -> int:
        """Sequences that lost their blocks, since the start."""
        return self.engine.stats.preemptions

    def reading(self) -> tuple[float, int, int]:
        """KV used (0..1), sequences running, sequences waiting."""
        scheduler = self.engine.scheduler
        return scheduler.blocks.usage, len(scheduler.running), scheduler.waiting

    # -- requests -----------------------------------------------------------------------------------------------

    def post(self, path: bytes, body: bytes, taker: Taker) -> Callable[[], None]:
        """Take a request. The function returned ends it: a connection that is closed. Raises ConnectionRefusedError."""
        self.posts += 1
        self.posted_at = self._loop.time()
        if self.condition == "dead":
            raise ConnectionRefusedError("connection refused")
        if self.condition == "stopped":  # the kernel still takes the connection
            self.open[taker] = None
            return lambda: self._withdraw(taker)
        if self.errors and self._rng.random() < self.errors:
            self._refuse(taker, ApiError(self.status, "a fault was asked for", type="InternalServerError"))
            return _nothing
        try:
            if path != b"/v1/chat/completions":
                raise ApiError(404, "Not Found", type="NotFoundError")
            work = self._work(decode(_CHAT, body), taker)
        except ApiError as error:
            self._refuse(taker, error)
            return _nothing
        self.open[taker] = work
        self.engine.add(work.sequence, self.posted_at)
        self._wake()
        return lambda: self._withdraw(taker)

    def _work(self, chat: Chat, taker: Taker) -> Work:
        check_model(self.limits, chat.model)
        data = tokens.chat(chat.messages)
        prompt = tokens.count(data)
        asked = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
        most = output_room(self.limits, prompt, asked, "max_tokens")
        output, reason = tokens.output_length(data, 0, most, least=chat.min_tokens, ignore_end=chat.ignore_eos)
        said = WORD * (output - (reason == "stop"))
        sequence = Sequence(prompt, output, hashes=tokens.block_hashes(data + said, self.model), reason=reason)
        options = chat.stream_options
        return Work(taker, sequence, chat.stream, options is not None and options.include_usage is True)

    @staticmethod
    def _refuse(taker: Taker, error: ApiError) -> None:
        body = error.body()
        taker.begin(error.status, JSON, body, len(body))
        taker.end()

    def _withdraw(self, taker: Taker) -> None:
        work = self.open.pop(taker, None)
        if work is not None:
            self.engine.abort(work.sequence)

    # -- steps --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._timer is None and self.condition == "up" and self.engine.busy:
            self._timer = self._loop.call_soon(self._step)  # not at once: what came together is scheduled together

    def _step(self) -> None:
        if self.condition != "up" or not self.engine.busy:
            self._timer = None
            return
        now = self._loop.time()
        result = self.engine.step(now)
        self._timer = self._loop.call_at(now + result.duration * self.slow, self._hand_out, result)

    def _hand_out(self, result: StepResult) -> None:
        if self.condition != "up":
            self._timer = None
            return
        for sequence in result.prefilled:
            if sequence.state is not State.ABORTED:
                sequence.owner.first()
        for sequence in result.finished:
            work: Work = sequence.owner
            if self.open.pop(work.taker, None) is not None:  # else its client left while the step ran
                work.finished()
        self._step()

    # -- faults -------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """SIGKILL: connections are refused, answers are cut, the cache is gone."""
        self._becomes("dead")
        self.engine = Engine(self.config)
        lost, self.open = self.open, {}
        for taker, work in lost.items():
            if work is not None and work.begun:
                taker.failed("truncated", "the engine closed the connection in the middle of its answer")
            else:
                taker.failed("reset", "the engine closed the connection before answering")

    def stop(self) -> None:
        """SIGSTOP: nothing moves any more."""
        self._becomes("stopped")

    def recover(self) -> None:
        """As new, after whatever it was. One that was stopped has been killed and started again."""
        if self.condition == "stopped":
            self.die()
        self._becomes("up")
        self.slow, self.errors = 1.0, 0.0

    def _becomes(self, condition: Condition) -> None:
        self.condition = condition
        self.changed_at = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _nothing() -> None:
    return None
