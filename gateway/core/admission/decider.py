"""Interface between relay and decider: a call's arrival, its admission, its grant, and the end of each.

A relay carries bytes: client connections, engine connections, parsing, attempts' I/O. A decider owns everything that
must be known in one place: limits, estimates, classes, queues, engines' ledgers and breakers, the retry budget. The
relay never decides about an engine by itself. It knows of a decider what is here and nothing else.

    admission = decider.arrive(...)         count a request, before it is parsed
    judging = admission.judge(call)         estimate, classify, charge
    grant = admission.at_once(call)         an engine, if none has to be waited for
    grant = await admission.ask(call)       else wait for one
    grant.first_byte(...), grant.failed(...), await grant.again(...), await grant.move(...)
    admission.settle(...), grant.close(), admission.ended(...)

Rules. What is awaited is a question, and its answer may come from another process. The rest is either news for the
decider, which nobody waits for, or something a relay has been told before. Every refusal is the exception Refused.
The implementation in one process is `gateway/decider/local.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol, Self

from gateway.core.engines.breaker import Ending
from gateway.core.policy.snapshot import Snapshot
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.request.tenants import Account

NOT_FOUND = 404  # of an engine: its list of models, or of routes, is not what was expected
SLOWER = 3.0  # times its usual pace that an engine may take for a whole answer, before it is given up and blamed


class GrantedEngine(Protocol):
    """An engine, as far as a relay needs to know it. `name` is for clients, `id` is its address. `provider`: the
    policy's name for a provider; empty: the engine is none."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def provider(self) -> str: ...


class GrantedHold(Protocol):
    """Tokens reserved on an engine, since `taken_at`."""

    @property
    def tokens(self) -> int: ...
    @property
    def taken_at(self) -> float: ...


class PrefillPlan(Protocol):
    """Decision where a call's prompt is read: on `engine`; None: on the grant's own. `reason` and predictions as in
    transfer.py; `within`: seconds that the reading may take there; `priority`: as in Grant, for that engine."""

    @property
    def engine(self) -> GrantedEngine | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def here(self) -> float: ...
    @property
    def there(self) -> float: ...
    @property
    def within(self) -> float: ...
    @property
    def priority(self) -> int: ...


class Grant(Protocol):
    """Permission to use one engine, until it is left or closed. Its engine changes only before the first byte.

    `cached`: prompt tokens that the engine has probably cached. `tpot`, `pace`: its seconds an output token: usual,
    and the fastest seen lately. `priority`: what the engine is told, lower goes first; 0: nothing. `prefill`: where the
    prompt is read; None: nothing was to be decided. `ending`: what the attempt says of its engine; the decider reads it
    when the grant is closed.
    """

    ending: Ending

    @property
    def engine(self) -> GrantedEngine: ...
    @property
    def hold(self) -> GrantedHold: ...
    @property
    def cached(self) -> int: ...
    @property
    def tpot(self) -> float: ...
    @property
    def pace(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def prefill(self) -> PrefillPlan | None: ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    def prefilled(self, now: float, failure: str, message: str, reason: str) -> None:
        """The prompt was read elsewhere, or was not: then `failure` is its kind (a name of the policy's, a status,
        `unreadable` or `fetch`), `reason` one of trouble.REASONS, and the grant's own engine reads it."""

    def answered(self, status: int) -> None:
        """The head of an answer is here."""

    def failed(self, kind: str, message: str, reason: str, *, over: bool, pause: float = 0.0) -> None:
        """No answer: `kind` is the policy's name for the failure, `reason` one of trouble.REASONS. `over`: the call's
        own deadline ended the attempt. `pause`: seconds for which a provider wants no calls; 0: it has not said."""

    def again(self, kind: str, attempts: int, failed: set[str]) -> Awaitable[float | None]:
        """Seconds to wait before another attempt, which is now paid for; None: there is none. `attempts` were made,
        engines with an id in `failed` have failed the call before."""

    def move(self, exclude: frozenset[str]) -> Awaitable[None]:
        """Give the hold back and wait for one elsewhere, ahead of all waiting calls. Raises Refused."""

    def hedge_after(self) -> float | None:
        """Seconds without an answer after which a second attempt is worth its cost; None: never."""

    def second(self, first: Any, /) -> Awaitable[Self | None]:  # the core knows no futures
        """A grant on another engine for a second attempt, if there is room at once and the budget allows. None is
        waited for once the `first` attempt, a future, has ended well."""

    def take(self, other: Self) -> None:
        """Become the other, whose engine was faster; this one's hold goes back."""

    def first_byte(self, now: float) -> None:
        """The engine has read the prompt."""

    def finished(self, now: float, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> None:
        """The whole answer is here, with the engine's own numbers; None: it does not tell."""

    def wrote(self, tokens: int) -> None:
        """Tokens of prompt and answer, as estimated for an answer of which the engine has not told the whole."""

    def close(self) -> None:
        """Give the hold back; a second time changes nothing."""


class Admission(Protocol):
    """Admission of one call, from its arrival to its end. Leaving it settles the charge. After an exception, the unused
    part is refunded."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def counted(self) -> Awaitable[None]:
        """Count a request that is no call and asks no engine, in place of `judge`. Raises Refused."""

    def judge(self, call: Call) -> Awaitable[None] | None:
        """Estimate the call's cost, find its class, charge its tenant's limits; fills in the call and its record.
        None: that is done. Raises Refused."""

    def at_once(self, call: Call) -> Grant | None:
        """Give the call an engine, if that takes no waiting and no question to another process."""

    def ask(self, call: Call) -> Awaitable[Grant]:
        """Wait for an engine, where `at_once` has given none. Raises Refused; cancellation withdraws the call."""

    def settle(self, tokens: int, now: float) -> None:
        """Tokens that the call is charged in place of the estimate."""

    def headers(self, now: float) -> bytes:
        """The answer's x-ratelimit lines."""

    def ended(self, outcome: Outcome) -> None:
        """Report how the call ended, once everything else is done."""


class Decider(Protocol):
    """The relay's questions to a decider."""

    @property
    def up(self) -> bool:
        """Whether balancers should send calls here."""

    def arrive(self, snapshot: Snapshot, account: Account, record: Record, now: float, body: bytes) -> Admission:
        """Count a request before it is parsed, because parsing is most of the work that a request can make here.
        `snapshot` applies to the call until its end. Raises Refused."""

    def ask(self, call: Call) -> Awaitable[Grant]:
        """Ask as Admission.ask does, for a call that stands for several. Each of these was judged and charged by
        itself."""

    def learn(self, call: Call, prompt_tokens: int, completion_tokens: int) -> None:
        """Take the engine's own counts, to estimate the next calls by."""

    def metered(self, tenant: str) -> bool:
        """Whether a limit counts this tenant's tokens, so that the engine must be asked for its numbers."""

    def context(self, model: str) -> int | None:
        """Tokens of a model's context; None: not known."""

    def window(self, model: str) -> float:
        """Share of a batch's window that calls for this model may wait for company, 0..1."""

    def models(self, path: bytes, account: Account, given_up: Callable[[], bool]) -> Awaitable[tuple[int, bytes]]:
        """Status and body of an answer to `GET /v1/models`, once every engine has been asked what it has."""
