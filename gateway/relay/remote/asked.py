"""Call that a decider in another process was asked about: its question, the answer, and its holds.

The call outlives its decider. A new decider receives `held` and `asked_again`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome
from gateway.frames import messages as frames
from gateway.frames.calls import facts_of, fill_in, refused_of

if TYPE_CHECKING:
    from gateway.relay.remote.link import Link

P = ParamSpec("P")
ASKED_WITHIN = 30.0  # seconds for a question that is about no call; a list of models may take 20


class AskedCall:
    """Call under question over `link`, until `finish`. `end` collects the report for the decider at the call's end.
    `terms`: its grant; `second`: the grant of a second attempt. `first_byte`: when the engine had read the prompt, 0:
    not yet."""

    __slots__ = (
        "_asked_at", "_facts", "_wake", "answer", "ask", "call", "end", "first_byte", "judgement", "link", "number",
        "question", "second", "terms", "turn",
    )  # fmt: skip

    def __init__(self, link: Link, call: Call | None) -> None:
        self.link = link
        self.number = number = link.number()
        self._asked_at = link.clock()
        self.call = call  # None: it is no call, but a question of another kind
        self.ask: frames.Ask | None = None
        self.question: frames.Question | None = None  # that waits for an answer, or was judged and asks for no engine
        self.answer: frames.Answer | None = None
        self.judgement: frames.Judgement | None = None
        self.terms: frames.GrantTerms | None = None
        self.second: frames.GrantTerms | None = None
        self.first_byte = 0.0
        self.turn = 0  # of the last question
        self.end = frames.CallEnd(number, 0.0)
        self._facts: frames.CallFacts | None = None  # that the call has
        self._wake: asyncio.Future[None] | None = None
        link.calls[number] = self
        if call is not None:
            link.by_call[id(call)] = self

    def go_by(self, facts: frames.CallFacts) -> None:
        """Set in the call what its decider has found out."""
        if self.call is not None and facts is not self._facts:
            self._facts = facts
            fill_in(self.call, facts)

    def forget(self) -> None:
        """End it, without a word to the decider."""
        del self.link.calls[self.number]
        if self.link.by_call.get(id(self.call)) is self:
            del self.link.by_call[id(self.call)]

    def finish(self, left: frames.Left = "", outcome: Outcome = Outcome.BUG) -> None:
        """End it, and send its decider the report of the end."""
        self.forget()
        end = self.end
        end.at, end.left, end.outcome = self.link.clock(), left, outcome
        self.link.send(end)

    @property
    def deadline(self) -> float:
        """Time from which nobody waits for an answer."""
        return self._asked_at + ASKED_WITHIN if self.call is None else self.call.deadline

    def tell(self, kind: Callable[Concatenate[int, int, P], frames.Message], *args: P.args, **kwargs: P.kwargs) -> None:
        """Send news of the present turn."""
        self.link.send(kind(self.number, self.turn, *args, **kwargs))

    def put(self, question: frames.Question) -> None:
        """Send a question, which from now on waits for its answer."""
        self.question, self.answer = question, None
        self.link.send(question)

    async def asks(
        self, kind: Callable[Concatenate[int, int, P], frames.Question], *args: P.args, **kwargs: P.kwargs
    ) -> frames.Answer:
        """Ask a question in another turn. Return its answer. Raises Refused."""
        self.put(kind(self.number, self.next_turn, *args, **kwargs))
        return await self.answered()

    @property
    def next_turn(self) -> int:
        """Number of the next question."""
        self.turn += 1
        return self.turn

    def take(self, message: frames.Judgement | frames.Answer) -> None:
        """An answer has come. One to another question than that which waits came late, or twice."""
        if self.question is None or message.turn != self.question.turn:
            return
        if isinstance(message, frames.Judgement):
            self.judgement = message
        else:
            self.question, self.answer = None, message
            if isinstance(message, frames.GrantTerms):
                if message.second:
                    self.second = message
                else:
                    self.terms, self.first_byte = message, 0.0
        self.look()

    def look(self, _: object = None) -> None:
        """Wake whoever waits for news."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def news(self) -> None:
        """Wait for the next answer."""
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    async def judged(self) -> None:
        """Wait for its judgement, or an answer."""
        while self.judgement is None and self.answer is None:
            await self.news()

    async def answered(self) -> frames.Answer:
        """The answer to the question. Raises Refused."""
        while self.answer is None:
            await self.news()
        answer, self.answer = self.answer, None
        if isinstance(answer, frames.RefusedCall):
            if answer.facts is not None:
                self.go_by(answer.facts)
            raise refused_of(answer)
        return answer

    # -- to a new decider ---------------------------------------------------------------------------------------

    def held(self) -> Iterator[frames.Held]:
        """The grants that it has."""
        if isinstance(self.question, frames.MoveAsk):  # it has given its hold back
            return
        for terms in (self.terms, self.second):
            if terms is not None and self.ask is not None:
                self.ask.turn = self.turn
                yield frames.Held(self.ask, terms, self.first_byte, terms is self.second)

    def asked_again(self) -> frames.Question | None:
        """The question that has no answer yet, of another turn: an answer to its earlier asking may yet come. What was
        judged and has no engine is judged anew: its charge went with the old decider. No second attempt is worth it."""
        question, ask = self.question, self.ask
        if question is None:
            return None
        if isinstance(question, frames.SecondAsk):
            self.take(frames.SecondNone(self.number, question.turn))
            return None
        question.turn, self.judgement = self.next_turn, None
        if isinstance(question, frames.WaitAsk) and ask is not None:
            ask.wait, ask.turn = True, question.turn
            question = ask
        elif isinstance(question, frames.MoveAsk) and ask is not None and self.call is not None:
            ask.facts, ask.front, ask.exclude, ask.turn = facts_of(self.call), True, question.exclude, question.turn
            question = ask
        return question


async def ask_once(
    link: Link, kind: Callable[Concatenate[int, int, P], frames.Question], *args: P.args, **kwargs: P.kwargs
) -> frames.Answer:
    """Ask a question that is about no call. Return its answer. Raises Refused."""
    asked = AskedCall(link, None)
    try:
        return await asked.asks(kind, *args, **kwargs)
    finally:
        asked.forget()
