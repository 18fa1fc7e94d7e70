"""Plan of a run: the requests of a workload at a list of times. All of it follows from the seed.

Times, texts and requests have a stream of random numbers each, so that a change of one leaves the others alone. Each
conversation has one more, since its turns must not depend on the answers of others. A request that has been handed out
is forgotten, but for what conversations under way have said.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, takewhile
from typing import Literal

import msgspec

from loadtest.engine.tokens import BYTES
from loadtest.load import prompts
from loadtest.load.arrivals import Arrivals, Rate
from loadtest.load.lengths import Length
from loadtest.load.trace import BLOCK, Arrival
from loadtest.load.workload import Kind, Planned, Sessions, Workload

FRAME = 2 * prompts.HEADER  # tokens of a chat's template: before the message, and before the answer


class RequestBody(msgspec.Struct, frozen=True, gc=False):
    """A request's body, and its size in tokens."""

    body: bytes
    prompt: int
    asked: int = 0


class Writer:
    """Writes the requests of one kind. Raises ValueError for sizes of a trace where there is no row of one."""

    def __init__(self, kind: Kind, model: str, text: prompts.Text, rng: random.Random, *, named: bool = True) -> None:
        self.kind = kind
        self.named = named
        self.path = prompts.PATHS[kind.kind]
        self._json_model = prompts.json_text(kind.model or model)
        self._prefixes = [text.cut(kind.prefix.tokens, rng) for _ in range(kind.prefix.count)] if kind.prefix else []
        self._text = text

    def fields(self, key: str) -> dict[bytes, bytes]:
        """The headers of a request; an empty key is none."""
        fields = {b"content-type": b"application/json"}
        if self.named:
            fields[b"x-weir-class"] = self.kind.class_name.encode()
        if key:
            fields[b"authorization"] = b"Bearer " + key.encode()
        return fields

    def write(self, rng: random.Random, row: Arrival | None) -> RequestBody:
        """Write a request that stands alone."""
        kind = self.kind
        if kind.kind == "chat":
            return self.turn(*self.opening(rng), rng, row)[1]
        if kind.kind == "completions":
            prompt = self._prefix(rng) + self._words(rng, row, 0)
            asked = _drawn(kind.output, row.output_tokens if row else None, rng)
            model, stream = self._json_model, kind.stream
            body = prompts.completion_of(prompt, asked, model=model, stream=stream, ignore_eos=kind.ignore_eos)
            return RequestBody(body, len(prompt) // BYTES, asked)
        query = self._text.cut(kind.query.draw(rng), rng) if kind.kind == "rerank" else b""
        texts = [self._words(rng, row, 0) for _ in range(kind.inputs.draw(rng))]
        read = (len(texts) * len(query) + sum(map(len, texts))) // BYTES  # a reranker reads the query with each text
        if query:
            return RequestBody(prompts.rerank_of(query, texts, model=self._json_model), read)
        return RequestBody(prompts.embedding_of(texts, model=self._json_model), read)

    def opening(self, rng: random.Random) -> tuple[bytes, int]:
        """The messages that a chat begins with, and their tokens."""
        prefix = self._prefix(rng)
        said = prompts.message(b"system", prefix) + b","
        return (said, prompts.HEADER + len(prefix) // BYTES) if prefix else (b"", 0)

    def turn(
        self, messages: bytes, read: int, rng: random.Random, row: Arrival | None = None, prompt: Length | None = None
    ) -> tuple[bytes, RequestBody]:
        """Write the user's turn after `messages` of `read` tokens. Return all messages then, and the request. `prompt`:
        a length other than the kind's."""
        kind = self.kind
        words = self._words(rng, row, FRAME, prompt)
        messages += prompts.message(b"user", words)
        asked = _drawn(kind.output, row.output_tokens if row else None, rng)
        body = prompts.body_of(messages, asked, model=self._json_model, stream=kind.stream, ignore_eos=kind.ignore_eos)
        return messages, RequestBody(body, read + FRAME + len(words) // BYTES, asked)

    def _prefix(self, rng: random.Random) -> bytes:
        return rng.choice(self._prefixes) if self._prefixes else b""

    def _words(self, rng: random.Random, row: Arrival | None, frame: int, prompt: Length | None = None) -> bytes:
        """A prompt's text, of which `frame` tokens are the template's."""
        length = max(1, _drawn(prompt or self.kind.prompt, row.prompt_tokens if row else None, rng) - frame)
        if row is None or not row.blocks or self.kind.prompt != "trace":
            return self._text.cut(length, rng)
        text = self._text
        return b"".join(
            [
                text.block(name, min(BLOCK, length - at))
                for name, at in zip(row.blocks, range(0, length, BLOCK), strict=False)
            ]
        )


def _drawn(length: Literal["trace"] | Length, recorded: int | None, rng: random.Random) -> int:
    if length != "trace":
        return length.draw(rng)
    if recorded is None:
        raise ValueError("a length is a trace's, and there is no trace")
    return max(1, recorded)


class RequestOrigin(msgspec.Struct, frozen=True):
    """Tenant, kind and headers of a request."""

    tenant: str
    writer: Writer
    fields: dict[bytes, bytes]

    def session_fields(self, name: str) -> dict[bytes, bytes]:
        """The headers of each request of a conversation."""
        return self.fields | ({b"x-weir-session": name.encode()} if self.writer.named else {})

    def planned(
        self, index: int, at: float, written: RequestBody, session: Conversation | Replay | None = None, turn: int = 1
    ) -> Planned:
        """A request, by default one that stands alone."""
        kind = self.writer.kind
        fields = self.fields if session is None else session.fields
        return Planned(
            at, kind.class_name, written.body, fields, session, self.writer.path, index=index, kind=kind.kind,
            tenant=self.tenant, conversation="" if session is None else session.name, turn=turn,
            prompt_tokens=written.prompt, max_tokens=written.asked,
        )  # fmt: skip


class Conversation:
    """Conversation of one session's agent, or of its sub-agent. Its requests have the numbers from `index` on, as many
    as it has `turns`; after them come those of its sub-agents, up to `end`. `fields`: the headers of each."""

    def __init__(
        self, sender: RequestOrigin, sessions: Sessions, rng: random.Random, index: int, parent: Conversation | None
    ) -> None:
        self._sessions = sessions
        self._sender = sender
        self._rng = rng
        self._index = index
        self._turn = 0
        self._starts: list[tuple[int, Conversation]] = []  # sub-agents, and the turns at whose answers they begin
        agents = sessions.subagents
        if parent is None:
            self.turns = sessions.turns.draw(rng)
            self.name = f"s{index}"
            self._opening = sender.writer.opening(rng)
        else:
            assert agents is not None  # noqa: S101 # it is one
            self.turns = agents.turns.draw(rng)
            self.name, self._opening = parent.name, parent._opening  # of its own kind
        self._messages, self._read = self._opening
        self.fields = sender.session_fields(self.name)
        self.end = index + self.turns
        if parent is None and agents is not None and rng.random() < agents.share:
            for _ in range(agents.count.draw(rng)):
                own = random.Random(rng.getrandbits(64))  # noqa: S311 # a workload, no secrets
                agent = Conversation(sender, sessions, own, self.end, self)
                self._starts.append((rng.randint(1, self.turns), agent))
                self.end = agent.end

    def next(self, at: float) -> Planned:
        """The next turn, to be sent at `at`."""
        writer = self._sender.writer
        context = self._sessions.context
        if context is not None and self._read > context:
            self._messages, self._read = self._opening
        first = None if self._turn else self._sessions.first
        self._messages, written = writer.turn(self._messages, self._read, self._rng, prompt=first)
        self._read = written.prompt
        self._turn += 1
        return self._sender.planned(self._index + self._turn - 1, at, written, self, self._turn)

    def follow(self, answer: bytes, now: float) -> list[Planned]:
        """The turn after `answer`, if there is one, and the first turns of sub-agents that begin now."""
        following = [agent.next(now) for turn, agent in self._starts if turn == self._turn]
        if self._turn < self.turns:
            self._messages += b"," + prompts.message(b"assistant", answer) + b","
            self._read += -(-len(answer) // BYTES)
            following.insert(0, self.next(now + pause(self._sessions, self._rng)))
        return following


class Replay:
    """Recorded conversation: each turn but the first is sent some time after the answer to the one before. Prompts are
    as recorded, answers in them too. `fields`: the headers of each request."""

    def __init__(
        self, sender: RequestOrigin, sessions: Sessions, rng: random.Random, index: int, first: Arrival
    ) -> None:
        self._sessions = sessions
        self._sender = sender
        self._rng = rng
        self._index = index
        self._rows = (first, *first.turns)
        self._turn = 0
        self.name = f"s{index}"
        self.fields = sender.session_fields(self.name)
        self.end = index + len(self._rows)

    def next(self, at: float) -> Planned:
        """The next turn, to be sent at `at`."""
        written = self._sender.writer.write(self._rng, self._rows[self._turn])
        self._turn += 1
        return self._sender.planned(self._index + self._turn - 1, at, written, self, self._turn)

    def follow(self, answer: bytes, now: float) -> list[Planned]:
        """The turn after an answer, if there is one."""
        return [self.next(now + pause(self._sessions, self._rng))] if self._turn < len(self._rows) else []


def pause(sessions: Sessions, rng: random.Random) -> float:
    """Draw the seconds between an answer and the next turn."""
    think, spread = sessions.think, sessions.spread
    if spread is None:
        return rng.expovariate(1.0 / think)
    return think * rng.lognormvariate(0.0, spread)


def plan(
    workload: Workload,
    arrivals: Iterable[float] | Iterable[Arrival],
    seed: int,
    *,
    keys: Mapping[str, str] | None = None,
) -> Iterator[Planned]:
    """The requests that go out at these times, in order; what follows in conversations they tell themselves.

    A recorded arrival is a time with the sizes that were recorded. `keys`: API keys by tenant.
    """
    rng = random.Random(f"requests {seed}")  # noqa: S311 # a workload, no secrets
    text = prompts.Text(random.Random(f"text {seed}"))  # noqa: S311 # the same
    writers = [Writer(kind, workload.model, text, rng, named=workload.named) for kind in workload.mix]
    weights = {name: tenant.weight for name, tenant in workload.tenants.items()} or {"": 1.0}
    senders = [
        RequestOrigin(tenant, writer, writer.fields((keys or {}).get(tenant, "")))
        for writer in writers
        for tenant in weights
    ]
    # Every kind by every tenant: one draw for both.
    shares = list(accumulate(kind.share * weight for kind in workload.mix for weight in weights.values()))
    index = 0
    for arrival in arrivals:
        at, row = (arrival, None) if isinstance(arrival, float) else (arrival.at, arrival)
        sender = rng.choices(senders, cum_weights=shares)[0]
        sessions = sender.writer.kind.session
        if sessions is None:
            yield sender.planned(index, at, sender.writer.write(rng, row))
            index += 1
        else:
            own = random.Random(rng.getrandbits(64))  # noqa: S311 # the same
            conversation = (
                Conversation(sender, sessions, own, index, None)
                if row is None or sender.writer.kind.prompt != "trace"
                else Replay(sender, sessions, own, index, row)
            )
            yield conversation.next(at)
            index = conversation.end


def poisson(
    kinds: tuple[Kind, ...], rate: float, seconds: float, seed: int, *, start: float = 0.0
) -> Iterator[Planned]:
    """Requests of these kinds at `rate` per second for `seconds`, from `start` on: a Poisson process."""
    times = Arrivals(poisson=Rate(rate)).times(seed)
    return plan(Workload(mix=kinds), (start + at for at in takewhile(lambda at: at < seconds, times)), seed)
