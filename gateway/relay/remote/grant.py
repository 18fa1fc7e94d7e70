"""Grant of a decider in another process: permission to use one engine, by the terms that it has sent."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.core.admission.decider import NOT_FOUND
from gateway.core.engines.breaker import Ending, ending_of
from gateway.frames import messages as frames
from gateway.relay.attempts import attempt_ending
from gateway.relay.remote.asked import AskedCall


class RemoteGrant:
    """A Grant, as in gateway/core/admission/decider.py. `alone`: no admission ends with it, so it ends its call."""

    __slots__ = ("_alone", "_asked", "_told", "cached", "ending", "engine", "terms")

    def __init__(self, asked: AskedCall, *, alone: bool = False, second: bool = False) -> None:
        self._asked = asked
        self._alone = alone
        terms = asked.second if second else asked.terms
        assert terms is not None  # noqa: S101 # the answer was a grant
        self._go_by(terms)

    def _go_by(self, terms: frames.GrantTerms) -> None:
        """The grant is of these terms; so is its call, which may have been shaped."""
        self.terms = terms
        self.ending = Ending.NEUTRAL
        self._told = False  # the decider knows how this attempt ended
        self.engine = terms.engine
        self.cached = terms.cached
        self._asked.go_by(terms.facts)

    @property
    def hold(self) -> frames.GrantTerms:
        return self.terms  # its tokens, and since when

    @property
    def tpot(self) -> float:
        return self.terms.engine.tpot

    @property
    def pace(self) -> float:
        return self.terms.engine.pace

    @property
    def priority(self) -> int:
        return self.terms.priority

    @property
    def prefill(self) -> frames.PrefillTerms | None:
        return self.terms.elsewhere

    def __enter__(self) -> RemoteGrant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def first_byte(self, now: float) -> None:
        asked = self._asked
        asked.first_byte = now
        if asked.call is not None and asked.call.stream:
            asked.link.send(frames.FirstByte(asked.number, now))
        else:  # a whole answer is over in a moment
            asked.end.first_byte = now

    def finished(self, now: float, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> None:
        self._asked.end.finished = (prompt_tokens, completion_tokens, cached_tokens)

    def wrote(self, tokens: int) -> None:
        self._asked.end.wrote = tokens

    def settle(self, tokens: int) -> None:
        """Charge its call, which has no admission, so many tokens."""
        self._asked.end.tokens = max(0, tokens)

    def prefilled(self, now: float, failure: str, message: str, reason: str) -> None:
        self.terms.elsewhere = None  # a new decider takes over no hold there
        self._asked.tell(frames.Prefilled, now, failure, message, reason)

    def answered(self, status: int) -> None:
        self.ending = ending_of(status)
        self._told = False
        if self.ending is Ending.FAILURE or status == NOT_FOUND or (status >= 400 and self.engine.provider):
            self._asked.tell(frames.Answered, status)

    def failed(self, kind: str, message: str, reason: str, *, over: bool, pause: float = 0.0) -> None:
        self._told = True
        self._asked.tell(frames.AttemptFailed, kind, message, reason, over, pause, self._is_second)

    async def again(self, kind: str, attempts: int, failed: set[str]) -> float | None:
        answer = await self._asked.asks(frames.RetryAsk, kind, attempts, list(failed))
        assert isinstance(answer, frames.RetryAnswer)  # noqa: S101 # nothing else answers this
        return answer.pause

    async def move(self, exclude: frozenset[str]) -> None:
        terms = await self._asked.asks(frames.MoveAsk, list(exclude), self._ending())
        assert isinstance(terms, frames.GrantTerms)  # noqa: S101 # nothing else answers this
        self._go_by(terms)

    def hedge_after(self) -> float | None:
        return self.terms.hedge_after

    async def second(self, first: asyncio.Future[Any]) -> RemoteGrant | None:
        asked = self._asked
        asked.put(frames.SecondAsk(asked.number, asked.next_turn))
        first.add_done_callback(asked.look)
        try:
            while asked.answer is None and attempt_ending(first) is not Ending.SUCCESS:
                await asked.news()
        finally:
            first.remove_done_callback(asked.look)
        if asked.answer is None:
            asked.question = None
            asked.tell(frames.SecondEnd, False, Ending.NEUTRAL)
            return None
        answer = await asked.answered()
        granted = isinstance(answer, frames.GrantTerms)
        return RemoteGrant(asked, second=True) if granted else None

    def take(self, other: RemoteGrant) -> None:
        asked = self._asked
        asked.tell(frames.SecondEnd, True, self.ending)
        asked.terms, asked.second = other.terms, None
        self.terms, self.engine, self.cached = other.terms, other.engine, other.cached
        self.ending, self._told = other.ending, False

    @property
    def _is_second(self) -> bool:
        """Whether it is of a second attempt that was not taken."""
        return self.terms.second and self._asked.second is self.terms

    def _ending(self) -> Ending | None:
        return None if self._told else self.ending

    def close(self) -> None:
        asked = self._asked
        if self._is_second:
            asked.second = None
            asked.tell(frames.SecondEnd, False, Ending.NEUTRAL)
        elif asked.terms is self.terms:
            asked.end.ending = self._ending()
            if self._alone:
                self._alone = False
                asked.finish()
