"""Coding agents in a closed loop: sessions whose prompts grow from turn to turn, each turn a pause after the answer.

All that is sent follows from the seed, whoever sends it. The answers are not part of the prompts: what tools said is as
long, and no two servers answer alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from loadtest.engine.tokens import BYTES
from loadtest.load.prompts import Text, body_of, message
from loadtest.load.workload import Planned
from loadtest.report.records import Asked

SESSIONS, TURNS = 20, 8
THINK = 0.7  # seconds
FIRST, LAST = 2_000, 10_000  # tokens of a session's first and last prompt
ANSWER = 100  # tokens
FIELDS = {b"content-type": b"application/json"}


def prompts(session: int, seed: int) -> list[bytes]:
    """The user's words in each turn of one session, plain in JSON; each begins with those before."""
    draw = random.Random(f"agent {seed} {session}")  # noqa: S311 # a load, no secrets
    text = Text(draw).cut(LAST, draw)
    steps = (FIRST + (LAST - FIRST) * turn // (TURNS - 1) for turn in range(TURNS))
    return [text[: BYTES * tokens] for tokens in steps]


class Agent:
    """One session, from its first turn on."""

    def __init__(self, number: int, seed: int) -> None:
        self._number = number
        self._prompts = prompts(number, seed)
        self._turn = 0

    def next(self, at: float) -> Planned:
        """The next turn, to be sent at `at`."""
        words, turn = self._prompts[self._turn], self._turn
        self._turn += 1
        index = self._number * TURNS + turn
        asked = Asked(
            index, at, "chat", "default", "", "sim", f"s{self._number}", turn + 1, len(words) // BYTES, ANSWER
        )
        body = body_of(message(b"user", words), ANSWER, ignore_eos=True)
        return Planned(at, "default", body, FIELDS, self, asked=asked)

    def follow(self, answer: bytes, now: float) -> list[Planned]:
        """The turn after an answer that came `now`, if there is one."""
        return [self.next(now + THINK)] if self._turn < TURNS else []


def agents(seed: int, sessions: int = SESSIONS) -> Iterator[Planned]:
    """The first turns of all sessions, within THINK seconds; what follows they tell themselves."""
    draw = random.Random(f"agents {seed}")  # noqa: S311 # a load, no secrets
    for number, at in enumerate(sorted(draw.uniform(0.0, THINK) for _ in range(sessions))):
        yield Agent(number, seed).next(at)
