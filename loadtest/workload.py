"""What clients send: calls with their intended times, made up front from a seed, whatever the answers do.

Lengths are tokens of the simulated tokenizer (four bytes each). How long an answer really gets is the engine's
business (`tokens.natural_length`, log-normal with a median of 129); clients only say how much they would take.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Protocol

import msgspec

from loadtest.engine.tokens import BYTES

POOL = 1 << 16  # characters of text that prompts are cut from
LONGEST = 6000  # tokens of a prompt


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of call: its class, its share of the calls, its prompt (log-normal), the `max_tokens` it asks for."""

    class_name: str
    share: float
    prompt: float = 300.0  # median, tokens
    sigma: float = 0.6
    asked: tuple[int, ...] = (512, 1024)
    key: str = ""  # API key, if its tenant has one


class Planned(msgspec.Struct, gc=False):
    """One call to be made at `at` (seconds). `session` is told the answer, and may have a call that follows."""

    at: float
    class_name: str
    body: bytes
    fields: dict[bytes, bytes]
    session: Session | None = None


class Session(Protocol):
    """A conversation: the next call goes out some time after the answer to the one before."""

    def follow(self, answer: bytes, now: float) -> Planned | None: ...


class Text:
    """Words to cut prompts from. Each prompt begins with a number of its own, so none share blocks by chance."""

    def __init__(self, rng: random.Random) -> None:
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
        self._pool = " ".join(rng.choices(words, k=POOL // 6)).encode()

    def cut(self, length: int, rng: random.Random) -> bytes:
        """`length` tokens of text, plain in JSON."""
        start = int(rng.random() * (len(self._pool) - length * BYTES))
        return b"%011x " % rng.getrandbits(44) + self._pool[start : start + length * BYTES - 12]


def fields_of(kind: Kind) -> dict[bytes, bytes]:
    """The headers of a call of this kind."""
    fields = {b"content-type": b"application/json", b"x-weir-class": kind.class_name.encode()}
    if kind.key:
        fields[b"authorization"] = b"Bearer " + kind.key.encode()
    return fields


def body_of(messages: bytes, asked: int) -> bytes:
    """A chat request that streams and wants its usage. `messages`: the JSON array's inside."""
    return b'{"model":"sim","messages":[%b],"max_tokens":%d,"stream":true,"stream_options":{"include_usage":true}}' % (
        messages,
        asked,
    )


def message(role: bytes, text: bytes) -> bytes:
    """One message as JSON; `text` needs no escapes."""
    return b'{"role":"%b","content":"%b"}' % (role, text)


def log_normal(rng: random.Random, median: float, sigma: float) -> int:
    """Tokens, at least 16 and at most LONGEST."""
    return min(LONGEST, max(16, int(median * math.exp(sigma * rng.gauss(0.0, 1.0)))))


def poisson(
    kinds: tuple[Kind, ...], rate: float, seconds: float, seed: int, *, start: float = 0.0
) -> Iterator[Planned]:
    """Calls at `rate` per second for `seconds`, from `start` on: a Poisson process over all kinds together."""
    rng = random.Random(seed)  # noqa: S311 # a workload, no secrets
    text = Text(rng)
    shares = [kind.share for kind in kinds]
    fields = [fields_of(kind) for kind in kinds]
    picks = range(len(kinds))
    at = start + rng.expovariate(rate)
    while at < start + seconds:
        pick = rng.choices(picks, shares)[0]
        kind = kinds[pick]
        words = text.cut(log_normal(rng, kind.prompt, kind.sigma), rng)
        yield Planned(at, kind.class_name, body_of(message(b"user", words), rng.choice(kind.asked)), fields[pick])
        at += rng.expovariate(rate)


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations: `turns` on average, `think` seconds between them, a system prompt from `systems` shared ones."""

    class_name: str = "interactive"
    turns: float = 6.0
    think: float = 8.0
    systems: int = 8
    system: int = 400  # tokens
    said: float = 60.0  # tokens a turn of the user, median
    asked: int = 256


class Conversation:
    """One session: every turn sends all that was said before."""

    def __init__(self, chat: Chat, text: Text, system: bytes, rng: random.Random, number: int) -> None:
        self._chat = chat
        self._text = text
        self._rng = rng
        self._messages = message(b"system", system)
        self._left = 1 + int(rng.expovariate(1.0 / chat.turns))
        kind = Kind(class_name=chat.class_name, share=1.0)
        self._fields = fields_of(kind) | {b"x-weir-session": b"s%d" % number}

    def call(self, at: float) -> Planned:
        """The next turn, to be sent at `at`."""
        self._left -= 1
        words = self._text.cut(log_normal(self._rng, self._chat.said, 0.6), self._rng)
        self._messages += b"," + message(b"user", words)
        body = body_of(self._messages, self._chat.asked)
        return Planned(at, self._chat.class_name, body, self._fields, self)

    def follow(self, answer: bytes, now: float) -> Planned | None:
        """The turn after `answer`, if there is one."""
        self._messages += b"," + message(b"assistant", answer)
        return self.call(now + self._rng.expovariate(1.0 / self._chat.think)) if self._left > 0 else None


def conversations(chat: Chat, rate: float, seconds: float, seed: int) -> Iterator[Planned]:
    """The first calls of sessions that begin at `rate` per second, a Poisson process."""
    rng = random.Random(seed)  # noqa: S311 # a workload, no secrets
    text = Text(rng)
    systems = [text.cut(chat.system, rng) for _ in range(chat.systems)]
    at, number = rng.expovariate(rate), 0
    while at < seconds:
        number += 1
        own = random.Random(rng.random())  # noqa: S311 # what a session says must not depend on the others' answers
        yield Conversation(chat, text, rng.choice(systems), own, number).call(at)
        at += rng.expovariate(rate)
