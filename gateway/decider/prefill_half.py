"""First half of a granted call: the hold of its prompt on the engine that reads it, until that engine has answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.core.engines.breaker import Ending, ending_of
from gateway.core.engines.engine import Engine
from gateway.core.engines.hold import Hold
from gateway.core.engines.transfer import Prefill
from gateway.core.engines.trouble import OWN, Trouble
from gateway.core.kv_transfer import UNSENT
from gateway.core.request.call import Call

if TYPE_CHECKING:
    from gateway.decider.dispatch import Dispatch


# Failures that say nothing of the engine: nothing was sent, or the request is one that every engine refuses.
CALLS_OWN = frozenset((UNSENT, "400", "404", "413", "422"))


class PrefillHalf:
    """`plan`: the decision that it carries out. `read_at`: when the engine had read the prompt; 0: it has not."""

    __slots__ = ("_dispatch", "_probe", "_time", "call", "engine", "hold", "plan", "read_at")

    def __init__(
        self, dispatch: Dispatch, call: Call, engine: Engine, plan: Prefill, now: float, *, restored: bool = False
    ) -> None:
        self._dispatch = dispatch
        self.call = call
        self.engine = engine
        self.plan = plan
        self.hold: Hold = engine.hold(call.prompt_tokens, plan.unread, now, call.class_name, output=0)
        self._probe = engine.breaker.sent(now)
        self.read_at = 0.0
        money = dispatch.control.money
        # A share of the engine's time, whose tokens count where the call is answered.
        self._time = (
            None if money.meters.price is None else money.begin(engine.id, call, self.hold.tokens, dispatch.clock())
        )
        if not restored and dispatch.witness is not None:
            dispatch.witness.prefilling(call, self.hold)

    def succeeded(self, now: float) -> None:
        """The engine has read the prompt and said where its KV cache is."""
        if self.hold.live:
            self.read_at = now
            self.engine.breaker.first_byte(self._probe)
            self.hold.first_byte(now, teach=True)
            self.engine.remember(self.call.prefix, self.call.prompt_tokens, now)
            self.close(Ending.SUCCESS)

    def failed(self, kind: str, message: str, reason: str, now: float) -> None:
        """The engine has not. `kind`: the policy's name for a failed connection, a status, or `unreadable`; `reason`:
        one of trouble.REASONS."""
        if not self.hold.live:
            return
        engine, dispatch = self.engine, self._dispatch
        if kind not in CALLS_OWN:
            engine.transfers.failed(now)
        if kind.isdigit():
            ending = ending_of(int(kind))
        elif kind in ("connect", "reset") and reason != OWN:
            ending = Ending.FAILURE
        else:
            ending = Ending.NEUTRAL
        self.close(ending)
        if ending is Ending.FAILURE:
            engine.health.failed_call = message
        if kind == "connect" and ending is Ending.FAILURE:
            engine.down(Trouble(reason, f"{message} (a prefill)", now))
            dispatch.changed(engine)

    def close(self, ending: Ending = Ending.NEUTRAL) -> None:
        """Give the hold back; a second time changes nothing."""
        hold = self.hold
        if hold.live:
            hold.release()
            dispatch = self._dispatch
            if self._time is not None:
                self._time.end(dispatch.clock())
            self.engine.breaker.ended(self._probe, ending, dispatch.clock())
            dispatch.read(self.engine)  # calls that wait for room there
            if dispatch.witness is not None:
                dispatch.witness.prefilled(self.call, hold)
