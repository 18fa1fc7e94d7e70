"""Grant: one call's permission to use one engine, with its hold on the engine's ledger.

The hold is given back when the grant is left, by whatever path. Before the first byte a grant may move: after a failure
within the retry budget, or to a second engine that was faster (hedging). Only the decider knows whether a failure is
the engine's fault, whether others could take the call, and what the budget has left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.core.admission.decider import NOT_FOUND, SLOWER
from gateway.core.admission.retries import PER_CALL
from gateway.core.engines.breaker import FAILURE, NEUTRAL, Ending, ending_of
from gateway.core.engines.choice import Choice, usable_of
from gateway.core.engines.engine import Engine
from gateway.core.engines.transfer import Prefill
from gateway.core.engines.trouble import OWN, Trouble
from gateway.core.kv_transfer import FETCH
from gateway.core.money.book import Spending
from gateway.core.money.engine_time import EngineTime
from gateway.core.request.call import Call
from gateway.core.request.tenants import MIRROR
from gateway.decider.prefill_half import PrefillHalf

if TYPE_CHECKING:
    from gateway.core.admission.queues import Ticket
    from gateway.decider.dispatch import Dispatch

FAIR = 1.0  # seconds that any engine should need at most for a first byte, however little is predicted
QUANTILES = {"p90": 0.90, "p95": 0.95, "p99": 0.99}  # the policy's words


class LocalGrant:
    """A Grant, as in gateway/core/admission/decider.py. `ticket`: the call's ticket, if it waited. `first_at`: time of
    its first byte; 0: none has come."""

    __slots__ = (
        "_dispatch", "cached", "call", "ending", "engine", "expected", "first_at", "half", "hold",
        "prefill", "probe", "spending", "tells", "ticket",
    )  # fmt: skip

    def __init__(self, dispatch: Dispatch, call: Call, choice: Choice, now: float, ticket: Ticket | None) -> None:
        self._dispatch = dispatch
        self.call = call
        self.ticket = ticket
        self.cached = choice.cached
        self.engine: Engine = choice.engine
        engine = self.engine
        # Whether its first byte tells that its prompt is read: vLLM begins a Responses stream before it reads.
        self.tells = call.stream and call.route.kind != "response"
        self.hold = hold = engine.hold(
            call.cost, choice.prefill, now, call.class_name, output=call.output_tokens, teaches=self.tells
        )
        self.expected = choice.ttft
        if engine.adapters is not None:
            engine.adapters.used(call.model)
        dispatch.holds[hold] = self
        self.probe = engine.breaker.sent(now)
        self.ending = NEUTRAL  # until it is known how it ended
        self.first_at = 0.0
        self.prefill: Prefill | None = None
        self.half: PrefillHalf | None = None
        self.spending: Spending | EngineTime | None = None  # at a provider, or of an engine's time
        if not self.tells:
            engine.prefills.expect(hold, now + choice.ttft)
        dispatch.running[call.class_name] += 1
        dispatch.traffic[call.model].drain.taken(hold.tokens)

    def __enter__(self) -> LocalGrant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tpot(self) -> float:
        return self.engine.speed.tpot

    @property
    def pace(self) -> float:
        return self.engine.speed.pace

    @property
    def priority(self) -> int:
        """Rank of the call's class, 0 for the most important, if its engine schedules by priorities; else 0."""
        return self._dispatch.control.rules.rank.get(self.call.class_name, 0) if self.engine.priorities else 0

    def spend(self, provider: str, now: float) -> None:
        """Reserve the highest cost of the call. Its answer is bounded by what is reserved: its client may have given no
        limit, or one that is beyond the context of the model that it was first estimated for."""
        call = self.call
        if call.max_tokens != call.asked and call.route.generates and not call.shaped:
            call.shaped = call.asked
        self.spending = self._dispatch.control.money.reserve(provider, call, now)

    def share(self, now: float) -> None:
        """Pay for a share of the engine's time from now on."""
        self.spending = self._dispatch.control.money.begin(self.engine.id, self.call, self.hold.tokens, now)

    # -- its prompt, read elsewhere -----------------------------------------------------------------------------

    def split(self, plan: Prefill, now: float, *, restored: bool = False) -> None:
        """Go by the decision where the prompt is read. There it is held, too."""
        self.prefill = plan
        if plan.engine is not None:
            self.half = PrefillHalf(self._dispatch, self.call, plan.engine, plan, now, restored=restored)

    def prefilled(self, now: float, failure: str, message: str, reason: str) -> None:
        half = self.half
        if half is None:
            return
        if not failure:
            half.succeeded(now)
            return
        if failure != FETCH:
            half.failed(failure, message, reason, now)
        half.read_at = 0.0
        if self.hold.live and self.hold.prefill:
            self.hold.reads(half.plan.moved)

    def _fetched(self, half: PrefillHalf, now: float) -> None:
        """Learn how fast the engine fetched the prompt, where it had nothing else to read."""
        if half.read_at and not self.engine.prefills.ahead(now):
            self.engine.transfers.fetched(half.plan.moved, now - half.read_at - self.engine.speed.tpot, now)

    # -- an answer ----------------------------------------------------------------------------------------------

    def first_byte(self, now: float) -> None:
        call, engine = self.call, self.engine
        self.first_at = now
        engine.breaker.first_byte(self.probe)
        dispatch = self._dispatch
        if dispatch.fleet.is_large:
            dispatch.fleet.note_prefix(engine, call.prefix)
        half = self.half
        if self.tells or not call.stream:
            self.hold.first_byte(now, teach=self.tells and half is None)
        elif self.hold.awaited:
            self.hold.answered()
        if half is not None and call.stream:
            self._fetched(half, now)
        if dispatch.successor is not None:
            dispatch.successor.began(self.hold, now)
        if call.stream:  # a whole answer's first byte comes with its last
            self._remember(now)
        if self.tells:
            dispatch.traffic[call.model].first_byte(call, now)
            if engine.provider:
                engine.firsts.add(now - self.hold.taken_at)
        if self.tells or engine.ledger.headrooms:  # what else was read is known by now, or not yet
            dispatch.read(engine)

    def began(self, at: float) -> None:
        """The first byte of an answer that another decider has seen begin: it teaches nothing here."""
        self.first_at = at
        self.hold.first_byte(at, teach=False)

    def _remember(self, now: float) -> None:
        self.engine.remember(self.call.prefix, self.call.prompt_tokens, now)

    def finished(self, now: float, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> None:
        """Learn the time per output token and what the engine has cached, and charge the tenant's queue for real
        usage."""
        if cached_tokens is not None and self.half is None:  # what was fetched counts as cached
            self.engine.cache.told(self.cached, cached_tokens)
        if self.ticket is not None:
            self._correct(self.ticket, prompt_tokens, completion_tokens)
        if self.spending is not None:
            self.spending.usage = (prompt_tokens, cached_tokens or 0, completion_tokens)
        if self._dispatch.successor is not None:
            self._dispatch.successor.finished(self.hold, now, prompt_tokens, completion_tokens, cached_tokens)
        tokens = completion_tokens / self.call.n
        began = self.first_at if self.tells else self.hold.taken_at + self.expected
        self.engine.speed.learn_tpot(tokens, now - began, timed=self.tells)
        self.engine.speed.learn_pace(tokens, now - began)

    def wrote(self, tokens: int) -> None:
        if self.spending is not None:
            self.spending.tokens = tokens
        if self._dispatch.successor is not None:
            self._dispatch.successor.wrote(self.hold, tokens)

    def _correct(self, ticket: Ticket, prompt_tokens: int, completion_tokens: int) -> None:
        queues, witness = self._dispatch.queues[self.call.model], self._dispatch.witness
        if witness is not None:
            witness.correcting(ticket, prompt_tokens, completion_tokens)
        queues.correct(ticket, prompt_tokens, completion_tokens)
        if witness is not None:
            witness.corrected(ticket)

    # -- a failure before the first byte ------------------------------------------------------------------------

    def answered(self, status: int) -> None:
        self.ending = ending_of(status)
        if self.spending is not None and status >= 400:
            self.spending.unbilled = True
        if self.ending is FAILURE:
            self.engine.health.failed_call = f"it answered {status}"
        elif status == NOT_FOUND:
            self.engine.health.doubted = True

    def failed(self, kind: str, message: str, reason: str, *, over: bool, pause: float = 0.0) -> None:
        engine = self.engine
        self._unbilled(kind, reason)
        blameless = over and self._hurried(sent=reason != OWN) if kind == "timeout" else reason == OWN
        if blameless:
            self.ending = Ending.NEUTRAL
            return
        self.ending = Ending.FAILURE
        engine.health.failed_call = message
        if engine.provider:  # whose health nobody checks
            if pause > 0.0:
                engine.breaker.pause(pause, self._dispatch.clock())
        elif kind == "connect":  # until its health answers again
            engine.down(Trouble(reason, f"{message} (a call)", self._dispatch.clock()))
            self._dispatch.changed(engine)  # who waits for it may have to go elsewhere

    def _unbilled(self, kind: str, reason: str = "") -> None:
        """No provider takes money for a status of its own in place of an answer, or for a call that it never got."""
        if self.spending is not None and (kind.isdigit() or kind == "connect" or reason == OWN):
            self.spending.unbilled = True

    def _hurried(self, *, sent: bool) -> bool:
        """Whether the call's own deadline left the engine less time than it may well need: that is no fault of it, and
        no client may open a breaker by asking for the impossible. Not `sent`: it was only to be connected to."""
        call, usual = self.call, self.expected
        if sent and not call.stream:
            usual += (call.shaped or call.asked) * self.engine.speed.tpot
        return self._dispatch.clock() - self.hold.taken_at < max(FAIR, SLOWER * usual)

    async def again(self, kind: str, attempts: int, failed: set[str]) -> float | None:
        """A 429 goes elsewhere or nowhere, and at once: an engine that is too busy says nothing of the others."""
        dispatch = self._dispatch
        retries = dispatch.retries
        self._unbilled(kind)
        if self.call.tenant == MIRROR:
            return None
        if attempts > PER_CALL or (kind == "429" and not self._others(failed)):
            return None
        if self._lost_one(kind, attempts, failed):
            if dispatch.witness is not None:
                dispatch.witness.moved_free(self.call)
        elif not self._pays():
            return None
        return 0.0 if kind == "429" else retries.backoff(attempts, dispatch.rng)

    def _pays(self) -> bool:
        """Whether the budget has a retry left, which is then taken."""
        dispatch = self._dispatch
        taken = dispatch.retries.take(dispatch.clock())
        if taken and dispatch.witness is not None:
            dispatch.witness.retried(self.call)
        return taken

    def _others(self, failed: set[str]) -> list[Engine]:
        """Engines that could take the call and have not failed it."""
        usable = usable_of(self._dispatch.fleet.serving(self.call.model), self._dispatch.clock())
        return [engine for engine in usable if engine is not self.engine and engine.id not in failed]

    def _lost_one(self, kind: str, attempts: int, failed: set[str]) -> bool:
        """Whether the call has lost its engine while the others are well: its one move from there costs no budget.

        The budget keeps retries from adding load where everything fails; an engine that is gone takes none.
        """
        lost = kind in ("connect", "reset") and attempts == 1
        return lost and any(not engine.breaker.failures for engine in self._others(failed))

    async def move(self, exclude: frozenset[str]) -> None:
        self.close()
        if self.call.others and self._dispatch.routes.reroute(self.call, exclude):
            self.ticket = None  # of another model's queue
        self.take(await self._dispatch.enter(self.call, exclude, front=True))

    # -- a second attempt ---------------------------------------------------------------------------------------

    def hedge_after(self) -> float | None:
        after = self._dispatch.control.rules.policy.hedging
        if after is None or not self.call.stream or self.call.tenant == MIRROR or self.engine.provider:
            return None  # a second attempt beside a provider's would be paid twice
        traffic = self._dispatch.traffic[self.call.model]
        if traffic.level:
            return None
        return after if isinstance(after, float) else traffic.usual_ttft(self.call.class_name, QUANTILES[after])

    async def second(self, _: object) -> LocalGrant | None:
        dispatch = self._dispatch
        if not self._others(set()):
            return None
        call = self.call
        shaped, output, expected = call.shaped, call.output_tokens, call.expected_tokens
        second = dispatch.at_once(call, frozenset((self.engine.id,)))
        if second is None:
            return None
        unfit = second.engine is self.engine or second.engine.provider or call.shaped != shaped  # answers of one length
        if unfit or not self._pays():
            second.discard()
            call.shaped, call.output_tokens, call.expected_tokens = shaped, output, expected
            return None
        return second

    def take(self, other: LocalGrant) -> None:
        """The ticket stays: its tenant's charge is with the one that the call waited with first."""
        self.close()
        self.engine, self.hold, self.expected, self.probe = other.engine, other.hold, other.expected, other.probe
        self.ending, self.cached = other.ending, other.cached
        self.prefill, self.half, self.spending = other.prefill, other.half, other.spending
        self._dispatch.holds[self.hold] = self  # which has the first byte, for a successor

    def close(self) -> None:
        """Tells the engine's breaker how it went, too."""
        if self.half is not None:
            self.half.close()
        hold = self.hold
        if hold.live:
            hold.release()
            now = self._dispatch.clock()
            if self.first_at and self.engine.health.up:
                self._remember(now)  # only from now on may the engine evict it
            self.engine.breaker.ended(self.probe, self.ending, now)
            if self.spending is not None:
                self.spending.end(now)
            self._dispatch.released(self.call, hold, now)

    def discard(self) -> None:
        """Close a grant that nobody has used."""
        if self.spending is not None:
            self.spending.unbilled = True
        self.close()
