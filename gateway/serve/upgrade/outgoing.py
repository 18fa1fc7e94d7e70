"""Calls of a gateway in one process that another has taken over from: to its successor this process is a relay.

The successor's decider is told what each call holds, and when that comes back. Calls that waited, and those that come
on connections that are still open, wait there. They were judged and charged here, and are not again.
"""

from __future__ import annotations

import os
import time

import msgspec

from gateway.core.engines.choice import Choice
from gateway.core.engines.hold import Hold
from gateway.core.request.call import Call
from gateway.decider.grant import LocalGrant
from gateway.frames.calls import ask_of, facts_of, terms_of
from gateway.frames.messages import VERSION, Hello, RelayCounts
from gateway.relay.remote.asked import AskedCall
from gateway.relay.remote.decider import RemoteDecider
from gateway.relay.remote.grant import RemoteGrant
from gateway.relay.remote.link import Link
from gateway.serve.assembly import Gateway
from gateway.shared.lines import say


class OutgoingCalls:
    """A Successor, as in gateway/decider/successor.py, reached by the socket at `path`. `number` and `epoch` name this
    process among all relays."""

    def __init__(self, gateway: Gateway, number: int, epoch: int, path: str) -> None:
        self._gateway = gateway
        self._grants: dict[Hold, RemoteGrant] = {}
        self.link = Link(
            path,
            Hello(VERSION, number, epoch, os.getpid(), time.time(), 0),
            gateway.clock,
            on_policy=_nothing,
            on_fleet=_nothing,
            on_drain=_nothing,
            counts=self._told,
            say=lambda line: say(f"after the hand-over: {line}"),
        )
        self._decider = RemoteDecider(self.link)

    def start(self) -> None:
        """Tell the successor what is held, from now on."""
        self.link.start()

    async def aclose(self) -> None:
        await self.link.tell_last()
        await self.link.aclose()

    def _told(self) -> RelayCounts:
        # The successor works the batches from now on, and says how many lines wait.
        return msgspec.structs.replace(self._gateway.counted(), line_calls=0, batch_states={})

    # -- what the dispatch tells and asks -----------------------------------------------------------------------

    def holds(self, grant: LocalGrant) -> None:
        call, hold = grant.call, grant.hold
        asked = AskedCall(self.link, call)
        asked.ask = ask_of(asked.number, call, 0, wait=True)
        asked.ask.facts = facts_of(call)
        asked.first_byte = 0.0 if hold.awaited else grant.first_at or hold.taken_at
        asked.terms = terms_of(asked.number, 0, 0, call, hold)
        asked.terms.cached, asked.terms.expected = grant.cached, grant.expected  # what its end is to teach goes by them
        self._grants[hold] = RemoteGrant(asked, alone=True)

    def began(self, hold: Hold, now: float) -> None:
        grant = self._grants.get(hold)
        if grant is not None:
            grant.first_byte(now)

    def finished(
        self, hold: Hold, now: float, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None
    ) -> None:
        grant = self._grants.get(hold)
        if grant is not None:
            grant.finished(now, prompt_tokens, completion_tokens, cached_tokens)
            grant.settle(prompt_tokens + completion_tokens)

    def wrote(self, hold: Hold, tokens: int) -> None:
        grant = self._grants.get(hold)
        if grant is not None:
            grant.wrote(tokens)
            grant.settle(tokens)

    def released(self, hold: Hold) -> None:
        grant = self._grants.pop(hold, None)
        if grant is not None:
            grant.close()

    async def grant(self, call: Call, exclude: frozenset[str], *, front: bool) -> LocalGrant:
        remote = await self._decider.ask(call, exclude, front=front)
        terms, gateway = remote.terms, self._gateway
        engine = gateway.engines.held_on(terms.engine.id, terms.engine.url)
        choice = Choice(engine=engine, prefill=terms.prefill, cached=terms.cached, ttft=terms.expected)
        grant = gateway.dispatch.restored(call, choice, terms.taken_at, 0.0)
        self._grants[grant.hold] = remote
        return grant


def _nothing(_: object) -> None:
    """Ignore news: this process keeps the policy and the fleet that it had, and how long its drain takes is settled."""
