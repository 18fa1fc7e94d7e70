"""Decider in another process: the interface's questions are frames, asked over a link and answered some turns later.

A call that cannot share a request with others is judged and given an engine by one question. Its news gather, and go
with its end: three frames for most calls. What the interface answers without waiting (limits, models, whether balancers
should come) the decider has told before.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from gateway.core.policy.snapshot import Snapshot
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.core.request.tenants import Account
from gateway.frames import messages as frames
from gateway.frames.calls import ask_of, facts_of
from gateway.relay.remote.asked import AskedCall, ask_once
from gateway.relay.remote.grant import RemoteGrant
from gateway.relay.remote.link import Link


class RemoteDecider:
    """A Decider, as in gateway/core/admission/decider.py."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @property
    def up(self) -> bool:
        return self.link.up and self.link.connected

    def arrive(self, snapshot: Snapshot, account: Account, record: Record, now: float, body: bytes) -> RemoteAdmission:
        """Never refuses: that is for `judge`, which is asked in another process."""
        return RemoteAdmission(self.link, account.name, record, now)

    async def ask(self, call: Call, exclude: frozenset[str] = frozenset(), *, front: bool = False) -> RemoteGrant:
        """`front`: the call had an engine and lost it, and waits for another than these."""
        asked = AskedCall(self.link, call)
        asked.ask = ask = ask_of(asked.number, call, self.link.version, wait=True)
        ask.facts, ask.front, ask.exclude = facts_of(call), front, list(exclude)
        try:
            asked.put(ask)
            await asked.answered()
        except BaseException:
            asked.finish("cancelled")
            raise
        return RemoteGrant(asked, alone=True)

    def learn(self, call: Call, prompt_tokens: int, completion_tokens: int) -> None:
        asked = self.link.by_call.get(id(call))
        if asked is not None:
            asked.end.learned = (prompt_tokens, completion_tokens)

    def metered(self, tenant: str) -> bool:
        return tenant in self.link.metered

    def context(self, model: str) -> int | None:
        known = self.link.models.get(model)
        return None if known is None else known.context

    def window(self, model: str) -> float:
        known = self.link.models.get(model)
        return 1.0 if known is None else known.window

    async def models(self, path: bytes, account: Account, given_up: Callable[[], bool]) -> tuple[int, bytes]:
        answer = await ask_once(self.link, frames.ModelsAsk, path, account.name, self.link.version)
        assert isinstance(answer, frames.ModelsAnswer)  # noqa: S101 # nothing else answers this
        return answer.status, answer.body


class RemoteAdmission:
    """An Admission, as in gateway/core/admission/decider.py."""

    __slots__ = ("_arrived", "_asked", "_left", "_lines", "_link", "_record", "_tenant", "_version",
                 "_was_counted")  # fmt: skip

    def __init__(self, link: Link, tenant: str, record: Record, now: float) -> None:
        self._link = link
        self._tenant = tenant
        self._record = record
        self._arrived = now
        self._version = link.version
        self._asked: AskedCall | None = None
        self._was_counted = False
        self._lines = b""
        self._left: frames.Left = ""

    async def counted(self) -> None:
        if self._link.policy is None or not self._link.policy.limited:
            return
        self._was_counted = True
        await ask_once(self._link, frames.ArrivalAsk, self._tenant, self._version, self._arrived)

    async def judge(self, call: Call) -> None:
        self._asked = asked = AskedCall(self._link, call)
        wait = not call.route.merges  # else it may yet share another's request, and then asks for no engine
        asked.ask = ask = ask_of(asked.number, call, self._version, wait=wait)
        asked.put(ask)
        try:
            await asked.judged()
            if asked.answer is None:
                assert asked.judgement is not None  # noqa: S101 # see above
                asked.go_by(asked.judgement.facts)
                self._lines = asked.judgement.lines
            elif isinstance(asked.answer, frames.GrantTerms):
                asked.go_by(asked.answer.facts)
            else:
                await asked.answered()
        finally:
            self._record.note(call)

    def at_once(self, call: Call) -> None:
        """None: the decider is asked."""

    async def ask(self, call: Call) -> RemoteGrant:
        asked = self._asked
        assert asked is not None  # noqa: S101 # it was judged
        await asked.judged()  # else a new decider does not know of it yet
        if call.route.merges and asked.answer is None:
            asked.put(frames.WaitAsk(asked.number, asked.next_turn))
        await asked.answered()
        grant = RemoteGrant(asked)
        self._lines = grant.terms.lines or self._lines
        return grant

    def settle(self, tokens: int, now: float) -> None:
        if self._asked is not None and self._asked.end.tokens is None:
            self._asked.end.tokens = max(0, tokens)

    def headers(self, now: float) -> bytes:
        return self._lines

    def ended(self, outcome: Outcome) -> None:
        """The last that its decider hears of the call, all else included."""
        link = self._link
        if self._asked is not None:
            self._asked.finish(self._left, outcome)
        elif not self._was_counted and link.policy is not None and link.policy.limited:
            link.send(frames.ArrivalAsk(link.number(), 0, self._tenant, self._version, self._arrived))

    def __enter__(self) -> RemoteAdmission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Refused):
            self._left = "refused"
            self._was_counted = self._was_counted or error.ours  # it does not count: see LocalAdmission
        elif error is not None:
            self._left = "error" if isinstance(error, Exception) else "cancelled"
