"""Sessions of a shadow policy: the engine and the place in the queue that it would give, beside the enforced ones.

Compared are calls that got an engine, as `engine`: the shadow had chosen the same one or one that is as good
(`chosen`), `another`, or would have set the call `aside` for its session's sake. Calls that begin to wait are compared
as `ahead`: the seconds by which they go before their turn. The shadow remembers sessions and what it keeps for them, by
the traffic that there is. What engines have cached is as the enforced policy believes: of engines that publish no
events the shadow believes too much where it alone has sessions. Of more than 32 engines each policy looks at a sample
of its own, and some choices differ by that alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy
from math import inf
from typing import TYPE_CHECKING

from gateway.core.admission.ticket import Ticket
from gateway.core.engines.choice import Choice, choose
from gateway.core.engines.fleet import Engine
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call
from gateway.core.sessions.locality import choose_for_session, seconds_ahead
from gateway.core.sessions.memory import SessionMemory
from gateway.core.shadow.verdict import COMPARED

if TYPE_CHECKING:
    from gateway.core.shadow.shadow import Shadow

CHOSEN, ANOTHER, ASIDE = "chosen", "another", "aside"
AS_GOOD = 1e-9  # seconds of predicted time to first token


class SessionShadow:
    """Told of each call what the enforced policy's SessionMemory is told. Nothing here changes a call or an engine."""

    def __init__(self, shadow: Shadow, policy: Policy) -> None:
        self._shadow = shadow
        self._rng = random.Random(0)  # noqa: S311 # of its own, so that the enforced policy draws as without it
        self._memory: SessionMemory | None = None  # None: the shadow has no sessions, and the enforced policy has
        self.apply(policy)

    def apply(self, policy: Policy) -> None:
        """The shadow is this policy from now on."""
        self._policy = policy
        if policy.sessions is None:
            self._memory = None
        elif self._memory is None:
            self._memory = SessionMemory(policy.sessions)
        else:
            self._memory.policy = policy.sessions

    def arrive(self, call: Call, now: float) -> None:
        """A call has come."""
        if self._memory is not None:
            self._shadow.safely(self._memory.arrive, copy(call), now)  # it is given a session

    def waits(self, ticket: Ticket, engines: Sequence[Engine], now: float) -> None:
        """The call begins to wait."""
        self._shadow.safely(self._waits, ticket, engines, now)

    def granted(
        self, call: Call, choice: Choice, engines: Sequence[Engine], now: float, ticket: Ticket | None,
        exclude: frozenset[str],
    ) -> None:  # fmt: skip
        """The call is about to be given this engine, of all those that serve its model. `ticket`: its ticket, if it
        waited; `exclude`: engines that have failed it."""
        self._shadow.safely(self._granted, call, choice, engines, now, ticket, exclude)

    def left(self, call: Call) -> None:
        """The call has gone without an engine."""
        if self._memory is not None:
            self._shadow.safely(self._memory.left, call)

    def ended(self, call: Call, engine: str, tokens: int, now: float) -> None:
        """The call's answer has ended: the engine has its `tokens` cached, prompt and answer."""
        if self._memory is not None:
            self._shadow.safely(self._memory.ended, call, engine, tokens, now)

    def _waits(self, ticket: Ticket, engines: Sequence[Engine], now: float) -> None:
        ours = seconds_ahead(self._memory, engines, ticket.call, now)
        self._shadow.count("ahead", *COMPARED[(ours > ticket.ahead) - (ours < ticket.ahead)])

    def _granted(
        self, call: Call, choice: Choice, engines: Sequence[Engine], now: float, ticket: Ticket | None,
        exclude: frozenset[str],
    ) -> None:  # fmt: skip
        memory, routing = self._memory, self._policy.routing
        if not exclude:  # one that has lost its engine goes where it can
            if memory is None:
                ours = choose(engines, call, now, routing=routing, rng=self._rng)
            else:
                memory.advance(now, engines)
                waited = 0.0 if ticket is None else inf if choice.owed else now - ticket.since
                found = choose_for_session(memory, engines, call, now, routing=routing, rng=self._rng, waited=waited)
                ours = found if isinstance(found, Choice) else None
            word = ASIDE
            if ours is not None:
                word = CHOSEN if ours.engine is choice.engine or abs(ours.ttft - choice.ttft) < AS_GOOD else ANOTHER
            self._shadow.count("engine", CHOSEN, word)
        if memory is not None:
            memory.granted(call)
