"""Requests and answers of an engine without sockets: bodies in become sequences, sequences out become bodies.

    asked = read(path, body, limits, model)     # prompts are the same tokens and KV blocks as over HTTP (`tokens.py`)

Routes: chat, completions, embeddings, rerank. Answers have what clients and the gateway read of them, and every
generated one says the same word again and again.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from loadtest.engine import tokens
from loadtest.engine.api.checks import ApiError, Limits, check_model, check_priority, decode, output_room
from loadtest.engine.api.openai import CHAT, COMPLETION, ChatBody, CompletionBody, prompts_of
from loadtest.engine.api.pooling import DECODER, PoolingBody, inputs, readings
from loadtest.engine.sequence import Sequence

WORD = b" ban"
DONE = b"data: [DONE]\n\n"
SSE = b"text/event-stream; charset=utf-8"
JSON = b"application/json"
# Of a chat and of a text completion: the first event of a stream, the last with a choice, and a whole answer.
CHAT_FORM = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"%b"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":"%b"}]}\n\n',
    b'{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"%b"},'
    b'"finish_reason":"%b"}],"usage":%b}',
)
TEXT_FORM = (
    b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"%b","finish_reason":"%b"}]}\n\n',
    b'{"object":"text_completion","choices":[{"index":0,"text":"%b","finish_reason":"%b"}],"usage":%b}',
)
USAGE = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
SO_FAR = b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n'
COUNTED = b'data: {"choices":[],"usage":%b}\n\n'
# Of embeddings and of a rerank: one piece of the answer, and the whole of it.
VECTORS = (
    b'{"index":%d,"object":"embedding","embedding":[0.5]}',
    b'{"object":"list","data":[%b],"usage":{"prompt_tokens":%d,"total_tokens":%d}}',
)
RANKS = (
    b'{"index":%d,"document":{"text":""},"relevance_score":0.5}',
    b'{"results":[%b],"usage":{"prompt_tokens":%d,"total_tokens":%d}}',
)


class Generated(msgspec.Struct, frozen=True):
    """A request that generates. `counts`: a stream that ends with its usage; `always`: usage is in every event."""

    sequences: tuple[Sequence]
    form: tuple[bytes, bytes, bytes]
    stream: bool
    counts: bool
    always: bool = False

    @property
    def first(self) -> bytes:
        """The first event of its stream."""
        return self._counted(self.form[0] % WORD, 1)

    def _counted(self, event: bytes, output: int) -> bytes:
        """The event with the usage so far, where that is told."""
        if not self.always:
            return event
        prompt = self.sequences[0].prompt
        return event[:-3] + SO_FAR % (prompt, prompt + output, output)

    def answer(self) -> bytes:
        """Rest of the answer at its end: what is left of the stream, or all."""
        sequence = self.sequences[0]
        said = sequence.output - (sequence.reason == "stop")  # the end token is counted and says nothing
        prompt, output, reason = sequence.prompt, sequence.output, sequence.reason.encode()
        usage = USAGE % (prompt, output, prompt + output, max(0, sequence.cached))
        if not self.stream:
            return self.form[2] % (WORD * said, reason, usage)
        last = self._counted(self.form[1] % (WORD * max(0, said - 1), reason), output)
        return last + (COUNTED % usage if self.counts else b"") + DONE


class Pooled(msgspec.Struct, frozen=True):
    """A request for which texts are only read, each a sequence."""

    sequences: tuple[Sequence, ...]
    form: tuple[bytes, bytes]
    stream: bool = False

    @property
    def first(self) -> bytes:
        """Empty bytes: there is no stream."""
        return b""

    def answer(self) -> bytes:
        """The whole of it."""
        piece, whole = self.form
        read = sum(sequence.prompt for sequence in self.sequences)
        return whole % (b",".join([piece % number for number in range(len(self.sequences))]), read, read)


Asked = Generated | Pooled


class Taker(Protocol):
    """Receiver of an answer. `begin` comes first and once; after `end` or `failed` nothing comes."""

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None: ...
    def data(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def failed(self, kind: Literal["reset", "truncated"], message: str) -> None: ...


def refuse(taker: Taker, error: ApiError) -> Callable[[], None]:
    """Answer a request at once with an error. Return the leaving of its sender, which does nothing any more."""
    body = error.body()
    taker.begin(error.status, JSON, body, len(body))
    taker.end()
    return nothing


def nothing() -> None:
    """Do nothing: the leaving of a sender whose request was answered on the spot."""


class Work:
    """Request under way, and the places of its tokens. `tokens`: for each reading of its prompt (more than one after
    preemptions), the token written at the end of it, counted from 1, and the engine's step that wrote it."""

    __slots__ = ("asked", "begun", "coming", "left", "taker", "tokens", "told")

    def __init__(self, taker: Taker, asked: Asked) -> None:
        self.taker = taker
        self.asked = asked
        self.begun = False
        self.told: Callable[[bytes], bytes] | None = None  # adds to a whole answer where its KV cache is kept
        self.coming: TimerHandle | None = None  # until the scheduler has it
        self.left = len(asked.sequences)
        self.tokens: list[tuple[int, int]] = []
        for sequence in asked.sequences:
            sequence.owner = self

    def first(self) -> None:
        """The first token is out. After a preemption the prompt is read again, and nothing is said twice."""
        if self.asked.stream and not self.begun:
            self.begun = True
            self.taker.begin(200, SSE, self.asked.first, None)

    def finished(self) -> None:
        """The last token is out."""
        answer = self.asked.answer()
        if self.told is not None:
            answer = self.told(answer)
        if self.begun:
            self.taker.data(answer)
        else:
            self.taker.begin(200, JSON, answer, len(answer))
        self.taker.end()


def read(path: bytes, body: bytes, limits: Limits) -> Asked:
    """Parse a request. Raises ApiError, with what vLLM says of it."""
    if path == b"/v1/chat/completions":
        chat: ChatBody = decode(CHAT, body)
        most = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
        return _generated(chat, tokens.chat(chat.messages), most, CHAT_FORM, limits)
    if path == b"/v1/completions":
        text: CompletionBody = decode(COMPLETION, body)
        return _generated(text, prompts_of(text.prompt)[0], text.max_tokens, TEXT_FORM, limits)
    if path not in (b"/v1/embeddings", b"/v1/rerank"):
        raise ApiError(404, "Not Found", type="NotFoundError")
    pooling: PoolingBody = decode(DECODER, body)
    if path == b"/v1/embeddings":
        return _pooled(pooling, inputs(pooling), VECTORS, limits)
    if pooling.query is None or not pooling.documents:
        raise ApiError(400, "1 validation error:\n  query: Field required", type="Bad Request", param="query")
    query = tokens.units(pooling.query)
    return _pooled(pooling, [query + tokens.units(document) for document in pooling.documents], RANKS, limits)


def _generated(
    asked: ChatBody | CompletionBody, prompt: bytes, most: int | None, form: tuple[bytes, bytes, bytes], limits: Limits
) -> Generated:
    model = check_model(limits, asked.model)
    check_priority(limits, asked.priority)
    length = tokens.count(prompt)
    room = output_room(limits, length, most, "max_tokens")
    output, reason = tokens.output_length(prompt, 0, room, least=asked.min_tokens, ignore_end=asked.ignore_eos)
    said = WORD * (output - (reason == "stop"))
    hashes = tokens.block_hashes(prompt + said, (model, asked.cache_salt))
    sequence = Sequence(length, output, hashes=hashes, reason=reason, priority=asked.priority)
    options = asked.stream_options
    counts = options is not None and options.include_usage is True
    always = counts and options is not None and options.continuous_usage_stats is True
    return Generated((sequence,), form, asked.stream is True, counts, always)


def _pooled(asked: PoolingBody, texts: list[bytes], form: tuple[bytes, bytes], limits: Limits) -> Pooled:
    model = check_model(limits, asked.model)
    check_priority(limits, asked.priority)
    return Pooled(tuple(readings(texts, asked, model, limits)), form)
