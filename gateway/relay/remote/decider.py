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
from gateway.frames.calls import ask_of, facts_of, fill_in
from gateway.relay.remote.asked import AskedCall
from gateway.relay.remote.grant import RemoteGrant
from gateway.relay.remote.link import Link


class RemoteDecider:
    """A Decider, as in gateway/core/admission/decider.py."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._granted: dict[int, AskedCall] = {}  # by the identity of the call, which its AskedCall keeps alive

    @property
    def up(self) -> bool:
        return self.link.up and self.link.connected

    def arrive(self, snapshot: Snapshot, account: Account, record: Record, now: float, body: bytes) -> RemoteAdmission:
        """Never refuses: that is for `judge`, which is asked in another process."""
        return RemoteAdmission(self, account.name, record, now)

    async def ask(self, call: Call, exclude: frozenset[str] = frozenset(), *, front: bool = False) -> RemoteGrant:
        """`front`: the call had an engine and lost it, and waits for another than these."""
        asked = self.begin(call)
        ask = ask_of(asked.number, call, self.version, wait=True)
        ask.facts, ask.front, ask.exclude = facts_of(call), front, list(exclude)
        try:
            self.put(asked, ask)
            await asked.answered()
        except BaseException:
            self.finish(asked, left="cancelled")
            raise
        return RemoteGrant(self, asked, alone=True)

    def learn(self, call: Call, prompt_tokens: int, completion_tokens: int) -> None:
        asked = self._granted.get(id(call))
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
        answer = await self.ask_once(frames.ModelsAsk(self.link.number(), 0, path, account.name, self.version))
        assert isinstance(answer, frames.ModelsAnswer)  # noqa: S101 # nothing else answers this
        return answer.status, answer.body

    # -- for its admissions and grants --------------------------------------------------------------------------

    async def ask_once(self, question: frames.ModelsAsk | frames.ArrivalAsk) -> frames.Answer:
        """The answer to a question that is about no call. Raises Refused."""
        link, asked = self.link, AskedCall(question.number, None)
        link.calls[asked.number] = asked
        link.send(asked.asks(question))
        try:
            return await asked.answered()
        finally:
            del link.calls[asked.number]

    @property
    def version(self) -> int:
        """Version of the policy that applies to calls now; 0 before the first."""
        return 0 if self.link.policy is None else self.link.policy.version

    def begin(self, call: Call) -> AskedCall:
        """A call that the decider is about to be asked about."""
        asked = AskedCall(self.link.number(), call)
        self.link.calls[asked.number] = asked
        self._granted[id(call)] = asked
        return asked

    def put(self, asked: AskedCall, question: frames.Ask | frames.WaitAsk) -> None:
        """Ask the question; `asked` waits for its answer."""
        if isinstance(question, frames.Ask):
            asked.ask = question
        self.link.send(asked.asks(question))

    def finish(self, asked: AskedCall, left: frames.Left = "", outcome: Outcome = Outcome.BUG) -> None:
        """End the call, and send its decider the report of the end."""
        del self.link.calls[asked.number]
        if self._granted.get(id(asked.call)) is asked:
            del self._granted[id(asked.call)]
        end = asked.end
        end.at, end.left, end.outcome = self.link.clock(), left, outcome
        self.link.send(end)


class RemoteAdmission:
    """An Admission, as in gateway/core/admission/decider.py."""

    __slots__ = ("_arrived", "_asked", "_decider", "_left", "_lines", "_record", "_tenant", "_version",
                 "_was_counted")  # fmt: skip

    def __init__(self, decider: RemoteDecider, tenant: str, record: Record, now: float) -> None:
        self._decider = decider
        self._tenant = tenant
        self._record = record
        self._arrived = now
        self._version = decider.version
        self._asked: AskedCall | None = None
        self._was_counted = False
        self._lines = b""
        self._left: frames.Left = ""

    async def counted(self) -> None:
        link = self._decider.link
        if link.policy is None or not link.policy.limited:
            return
        self._was_counted = True
        await self._decider.ask_once(frames.ArrivalAsk(link.number(), 0, self._tenant, self._version, self._arrived))

    async def judge(self, call: Call) -> None:
        self._asked = asked = self._decider.begin(call)
        wait = not call.route.merges  # else it may yet share another's request, and then asks for no engine
        ask = ask_of(asked.number, call, self._version, wait=wait)
        self._decider.put(asked, ask)
        try:
            while asked.judgement is None and asked.answer is None:
                await asked.news()
            if asked.answer is None:
                assert asked.judgement is not None  # noqa: S101 # see above
                fill_in(call, asked.judgement.facts)
                self._lines = asked.judgement.lines
                if not wait:
                    asked.question = None
            elif isinstance(asked.answer, frames.GrantTerms):
                fill_in(call, asked.answer.facts)
            else:
                await asked.answered()
        finally:
            self._record.note(call)

    def at_once(self, call: Call) -> None:
        """None: the decider is asked."""

    async def ask(self, call: Call) -> RemoteGrant:
        asked = self._asked
        assert asked is not None  # noqa: S101 # it was judged
        if asked.question is None and asked.answer is None:
            self._decider.put(asked, frames.WaitAsk(asked.number, asked.next_turn))
        await asked.answered()
        grant = RemoteGrant(self._decider, asked, alone=False)
        self._lines = grant.terms.lines or self._lines
        return grant

    def settle(self, tokens: int, now: float) -> None:
        if self._asked is not None and self._asked.end.tokens is None:
            self._asked.end.tokens = max(0, tokens)

    def headers(self, now: float) -> bytes:
        return self._lines

    def ended(self, outcome: Outcome) -> None:
        """The last that its decider hears of the call, all else included."""
        link = self._decider.link
        if self._asked is not None:
            self._decider.finish(self._asked, self._left, outcome)
        elif not self._was_counted and link.policy is not None and link.policy.limited:
            link.send(frames.UnreadRequest(self._tenant, self._version, self._arrived, self._left, outcome))

    def __enter__(self) -> RemoteAdmission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            refused = isinstance(error, Refused)
            self._left = "refused" if refused else "error" if isinstance(error, Exception) else "cancelled"
