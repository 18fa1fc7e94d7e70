"""Micro-batching: `answer(piece)` waits a few milliseconds for calls that one request to an engine can answer too.

A call goes at once and by itself while few others come, when it has little time, or when it is a batch already. Else
it joins the open batch of its key, which leaves when the window of its first call is over or it is full. From then on
the batch's task owns the request; callers only wait for their part. A caller that leaves takes its call out of a batch
that waits; one that has been sent goes on while anybody still wants it.

One bad input fails nobody else: where the engine refuses a merged call, each of its calls goes again by itself.
Nothing here is awaited between a look and the change that follows from it, so there are no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping

import msgspec

from gateway.core.admission import refusals
from gateway.core.admission.witness import BatchWitness
from gateway.core.batching.merge_pieces import Piece, piece_of, rule_of
from gateway.core.batching.merging import BatchWindow, SplitError, merge, split
from gateway.core.policy.traffic import BatchedKind, Merge
from gateway.core.request.body_memory import BodyLease, BodyMemory
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused

HURRY = 10.0  # a call with less time than this many windows does not wait: nobody is late for a tenth of his time
AGAIN_AT_ONCE = 8  # calls of one refused batch that are with engines at the same time
KEPT = 2.0  # seconds a key's pace is remembered, longer than any window: a policy's is 1 s at most
REASONS = ("alone", "window", "items", "tokens")
# Refusals that depend on a call's size, or make a booking: each call of the batch gets its own.
OF_THE_WHOLE = frozenset({Outcome.DEADLINE_UNREACHABLE, Outcome.QUEUE_FULL, Outcome.SHED})


class Exchanged(msgspec.Struct, kw_only=True, gc=False):
    """Result of a request to an engine, whatever its status, or one call's part of it. `granted`, `first_byte`:
    monotonic seconds. `calls`: how many share the request."""

    status: int
    body: bytes
    engine: str
    engine_name: str = ""
    content_type: bytes = b"application/json"
    again: int | None = None  # seconds of the engine's Retry-After
    attempts: int = 1
    granted: float = 0.0
    first_byte: float = 0.0
    prompt_tokens: int | None = None  # None: not told
    calls: int = 1


class _KeyState:
    """State of one key: how fast its calls come, and the batch that is open for them."""

    def __init__(self) -> None:
        self.pace = BatchWindow()
        self.batch: _Batch | None = None


class _Member:
    """Call in a micro-batch. `part` None: the merged call was refused, and this call is sent alone."""

    __slots__ = ("batch", "part", "piece")

    def __init__(self, batch: _Batch, piece: Piece) -> None:
        self.batch = batch
        self.piece = piece
        self.part: asyncio.Future[Exchanged | None] = asyncio.get_running_loop().create_future()


class _Batch:
    """Calls that wait to be sent (`timer`), or have been (`sent`)."""

    def __init__(self, state: _KeyState, wait: float, send: Callable[[_Batch, str], None]) -> None:
        self.state = state
        self.timer = asyncio.get_running_loop().call_later(wait, send, self, "window")
        self.members: list[_Member] = []
        self.items = 0
        self.tokens = 0
        self.sent = False
        self.request: Call | None = None  # what is sent for all of them
        self.task: asyncio.Task[None] | None = None
        self.again = asyncio.Semaphore(AGAIN_AT_ONCE)

    def full(self, rule: Merge, items: int, tokens: int) -> str:
        """Return the limit that leaves no room for so many more; empty: none does."""
        if self.items + items > rule.max_items:
            return "items"
        return "tokens" if self.tokens + tokens > rule.max_tokens else ""

    def add(self, piece: Piece) -> _Member:
        member = _Member(self, piece)
        self.members.append(member)
        self.items += piece.items
        self.tokens += piece.call.prompt_tokens
        return member

    def remove(self, member: _Member) -> None:
        self.members.remove(member)
        self.items -= member.piece.items
        self.tokens -= member.piece.call.prompt_tokens


class Batcher(msgspec.Struct, eq=False):
    """Merges calls as the policy says. `exchange` sends one call, admitted like any other, and gives its whole answer;
    it raises Refused. `bodies`: the budget that merged bodies are held in. `shrink` scales the windows of a model,
    0..1; 0: nothing is merged.

    `batches` counts requests by what sent them off, `merged` calls answered by a shared request, `again` calls that
    were sent once more by themselves. `tasks` are the requests under way for merged calls.
    """

    _policy: Callable[[], Mapping[BatchedKind, Merge]]
    _exchange: Callable[[Call], Awaitable[Exchanged]]
    _clock: Callable[[], float]
    _bodies: BodyMemory
    _shrink: Callable[[str], float] = lambda _: 1.0
    _witness: BatchWitness | None = None
    _states: dict[Hashable, _KeyState] = {}  # the one used last is last
    tasks: set[asyncio.Task[None]] = set()
    batches: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    merged: int = 0
    again: int = 0

    def piece(self, call: Call) -> Piece | None:
        """The call as `answer` takes it; None: its kind is not merged, or it cannot be. It goes the usual way."""
        return None if rule_of(self._policy(), call) is None else piece_of(call)

    def is_batch(self, piece: Piece) -> bool:
        """Whether the call is as large as a batch by itself, or is merged no more: it shares a request with none."""
        call = piece.call
        rule = rule_of(self._policy(), call)
        return rule is None or piece.items >= rule.max_items or call.prompt_tokens >= rule.max_tokens

    async def answer(self, piece: Piece) -> Exchanged:
        """The call's own part, whatever its status. Raises Refused, as `exchange` does. Cancellation withdraws it."""
        if self._witness is not None:
            self._witness.joining(piece.call)
        member = self._join(piece)
        if member is None:
            self.batches["alone"] += 1
            return await self._exchange(piece.call)
        try:
            part = await member.part
        except asyncio.CancelledError:
            self._leave(member)
            raise
        if part is not None:
            return part
        async with member.batch.again:
            self.again += 1
            return await self._exchange(piece.call)

    def left_over(self) -> list[object]:
        """Batches that wait and requests under way. Of a gateway without calls nothing may be left."""
        return [*(state.batch for state in self._states.values() if state.batch is not None), *self.tasks]

    # -- waiting ------------------------------------------------------------------------------------------------

    def _join(self, piece: Piece) -> _Member | None:
        """Return the call's membership of a micro-batch; None: the call goes at once, by itself."""
        call, now = piece.call, self._clock()
        rule = rule_of(self._policy(), call)
        if rule is None or self.is_batch(piece):
            return None
        window = rule.window * self._shrink(call.model)
        if call.deadline - now < HURRY * window:
            return None
        state = self._state(piece.key)
        wait = state.pace.wait(now, window)
        self._forget(now)
        batch = state.batch
        if batch is not None and (full := batch.full(rule, piece.items, call.prompt_tokens)):
            self._send(batch, full)
            batch = None
        if batch is None:
            if wait <= 0.0:
                return None
            batch = state.batch = _Batch(state, wait, self._send)
        member = batch.add(piece)
        if full := batch.full(rule, 1, 1):
            self._send(batch, full)
        return member

    def _state(self, key: Hashable) -> _KeyState:
        state = self._states.pop(key, None) or _KeyState()
        self._states[key] = state
        return state

    def _forget(self, now: float) -> None:
        """Drop the keys that nobody has used for long. The one used just now is last, and ends the search."""
        states = self._states
        while now - states[oldest := next(iter(states))].pace.at > KEPT:
            del states[oldest]

    def _leave(self, member: _Member) -> None:
        """The caller is gone: out of a batch that waits; one that was sent ends only with the last of its callers."""
        batch = member.batch
        if not batch.sent:
            batch.remove(member)
            if not batch.members:
                self._close(batch)
        elif batch.task is not None and member in batch.members:
            sent_at = None if batch.request is None else batch.request.sent_at
            if all(other.part.done() for other in batch.members):
                batch.task.cancel()
            elif sent_at is None:
                sent_at = self._clock()  # it will be sent with its part, for the others
            member.piece.call.sent_at = sent_at

    @staticmethod
    def _close(batch: _Batch) -> None:
        """Close the batch, so that no further call joins it."""
        batch.state.batch = None
        batch.timer.cancel()

    # -- sent ---------------------------------------------------------------------------------------------------

    def _send(self, batch: _Batch, reason: str) -> None:
        self._close(batch)
        batch.sent = True
        batch.members = [member for member in batch.members if not member.part.done()]  # else left, and not yet run
        if not batch.members:
            return
        self.batches[reason] += 1
        batch.task = asyncio.get_running_loop().create_task(self._run(batch))
        self.tasks.add(batch.task)
        batch.task.add_done_callback(lambda task: self._ended(batch, task))

    async def _run(self, batch: _Batch) -> None:
        """The request, and to each its part. What it raises is handed to everybody by `_ended`."""
        pieces = [member.piece for member in batch.members]
        witness = self._witness
        if witness is not None:
            witness.sending([piece.call for piece in pieces])
        parts: list[Exchanged] | None
        if len(pieces) == 1:
            batch.request = pieces[0].call
            parts = [await self._exchange(batch.request)]
        else:
            batch.request = merge(pieces)
            if witness is not None:
                witness.merging([piece.call for piece in pieces], sum([piece.items for piece in pieces]))
            parts = await self._together(batch.request, pieces)
            if witness is not None and parts is not None:
                status, told = parts[0].status, [part.prompt_tokens for part in parts]
                witness.merged([piece.call for piece in pieces], status, told)
        for number, member in enumerate(batch.members):
            if not member.part.done():
                member.part.set_result(None if parts is None else parts[number])

    def _ended(self, batch: _Batch, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        for member in batch.members:
            if member.part.done():
                continue
            if error is None:
                member.part.cancel()
            else:
                member.piece.call.sent_at = None if batch.request is None else batch.request.sent_at
                member.part.set_exception(error.copy() if isinstance(error, Refused) else error)

    async def _together(self, merged: Call, pieces: list[Piece]) -> list[Exchanged] | None:
        """The parts of a merged call, or None where each is to go by itself. Raises Refused."""
        for piece in pieces:  # they keep the bodies they came in
            piece.lists, piece.fields = {}, {}
        held = BodyLease(self._bodies, merged.tenant)
        if held.resize(len(merged.body)):
            return None
        try:
            exchanged = await self._exchange(merged)
        except Refused as refused:
            elsewhere = any(piece.call.asked_model for piece in pieces)  # some may get another of their models
            if elsewhere or refused.outcome in OF_THE_WHOLE or _for_what_was_sent(refused.status):
                return None
            raise
        finally:
            held.release()
        if _for_what_was_sent(exchanged.status):
            return None
        exchanged.calls = calls = len(pieces)
        if exchanged.status >= 400:
            return [exchanged] * calls
        try:
            parts = split(exchanged.body, merged, pieces)
        except SplitError as error:
            merged.sent_at = None  # the engine has failed it
            message = f"An engine was asked for {calls} merged calls, and {error}."
            detail = f"{exchanged.engine}: {message}"
            raise refusals.wrong_answer(message, detail) from error
        self.merged += calls
        return [msgspec.structs.replace(exchanged, body=body, prompt_tokens=told) for body, told in parts]


def _for_what_was_sent(status: int) -> bool:
    """Whether another call of the batch may be the cause. Not of what says that there is too much to do, or no time.

    500 is one: vLLM answers it to some inputs, and to send them singly is what there would be without merging.
    """
    return status == 500 or (400 <= status < 500 and status not in {408, 429, 499})
