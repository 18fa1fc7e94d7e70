"""Messages between relays and their decider: what the interface `gateway/core/admission/decider.py` says, as frames.

A message of a call carries the call's number, which its relay counts up. (Relay, relay's epoch, number) names a call
for good, and `turn` one question about it and its answer: a message that comes twice, or late, changes nothing, also
one of an earlier connection. A question that is asked again has another turn. An epoch is one life of a process: a
relay that is started again has a higher one, and so has a decider. A relay obeys the decider of the highest epoch that
it has met.

Times are seconds of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.core.engines.breaker import Ending
from gateway.core.engines.origin import provider_of
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record

MOST_RECORDS = 500  # in one message
VERSION = 14  # of these messages: both sides must have the same
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Hash = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Word = Annotated[str, Meta(max_length=256)]
Names = Annotated[list[Word], Meta(max_length=4096)]
Left = Literal["", "refused", "error", "cancelled"]  # the way that an admission was left: by an exception, or without


class CallRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Request of a client: the fields of `Call` that its decider needs, by the same names.

    `route` is the route's path. `body`: eight bytes that stand for the body, which stays in its relay; they are equal
    for equal bodies, in every process that has this one's parent.
    """

    request_id: str
    route: Word
    model: str
    tenant: Word
    arrived: float
    deadline: float
    stream: bool
    max_tokens: Count | None
    n: Count
    ascii_bytes: Count
    cjk_bytes: Count
    other_bytes: Count
    media: Count
    messages: Count
    token_ids: Count
    prefix: Annotated[tuple[Hash, ...], Meta(max_length=4096)]
    asked_class: Word
    asked_deadline: float
    sdk_timeout: float
    merged: bool
    leaves: Count
    splits: bool
    asked_model: Word
    conversation: Hash
    no_fallback: bool
    body: Annotated[bytes, Meta(max_length=16)]


class CallFacts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Findings of a decider about a call: the fields of `Call` that it sets, by the same names."""

    class_name: Word
    deadline: float
    ttft_by: float
    prompt_tokens: Count
    asked: Count
    output_tokens: Count
    expected_tokens: Count
    model: Word  # the client may have named an alias
    shaped: Count = 0
    predicted_wait: float = 0.0
    woken: float = 0.0
    others: Annotated[tuple[Word, ...], Meta(max_length=4096)] = ()


class EngineTerms(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """A granted engine and its speed at the grant; a GrantedEngine of gateway/core/admission/decider.py."""

    id: Word
    name: Word
    url: str
    tpot: float
    pace: float

    @property
    def provider(self) -> str:
        """The policy's name for a provider; empty: the engine is none."""
        return provider_of(self.id)


class PrefillTerms(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """Decision where a prompt is read; a PrefillPlan of gateway/core/admission/decider.py. Tokens: `unread`,
    `moved`."""

    engine: EngineTerms | None
    reason: Word
    here: float
    there: float
    within: float
    unread: Count
    moved: Count
    priority: Count


class RefusalFacts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """All of a `Refused`, by the same names."""

    outcome: Outcome
    message: str
    param: str | None
    code: str | None
    retry_after: float | None
    headers: bytes
    retry: bool
    limit: str
    kept: bool
    reason: str
    detail: str
    own: tuple[int, bytes] | None
    jittered: bool


# -- from a relay -----------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=1):
    """The first message of a relay. `started`: seconds since 1970. `decider_epoch`: the highest it has met."""

    version: int
    relay: Number
    epoch: Number
    pid: Number
    started: float
    decider_epoch: Number


class Ask(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=2):
    """Question about a call: judge it and, where `wait` is true, find it an engine."""

    number: Number
    call: CallRequest
    policy: Number  # the version that its relay goes by
    wait: bool
    turn: Count = 0
    facts: CallFacts | None = None  # it was judged before, so it is neither judged nor charged
    front: bool = False  # it had an engine and lost it
    exclude: Names = []  # engines that it lost


class WaitAsk(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=3):
    """A call that was judged now wants an engine."""

    number: Number
    turn: Count


class FirstByte(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=4):
    """The engine has read the prompt."""

    number: Number
    at: float


class Answered(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=5):
    """The head of an answer."""

    number: Number
    turn: Count
    status: Annotated[int, Meta(ge=0, le=999)]


class AttemptFailed(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=6):
    """No answer; see Grant.failed."""

    number: Number
    turn: Count
    kind: Word
    message: str
    reason: Word
    over: bool
    pause: float = 0.0
    second: bool = False  # the second attempt has failed, the first goes on


class RetryAsk(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=7):
    """May there be another attempt? See Grant.again."""

    number: Number
    turn: Count
    kind: Word
    attempts: Count
    failed: Names


class MoveAsk(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=8):
    """The hold goes back, and the call wants another engine. `ending` as in CallEnd."""

    number: Number
    turn: Count
    exclude: Names
    ending: Ending | None


class SecondAsk(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=9):
    """Is there room for a second attempt elsewhere?"""

    number: Number
    turn: Count


class SecondEnd(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=10):
    """End of the second attempt. It was `taken` in place of the first, whose end was `ending`, or is given up."""

    number: Number
    turn: Count
    taken: bool
    ending: Ending


class CallEnd(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=11):
    """The call is over, and what it held goes back.

    `ending`: what it says of its engine; None: what the decider knows already. `tokens`: what it is charged; None: not
    settled. `learned`: prompt and completion tokens as the engine counted them; `finished`: these, and the prompt's
    cached tokens where the engine tells. `first_byte`: when its engine had read the prompt, if nobody has told.
    `wrote`: tokens as in Grant.wrote; None: no answer has begun.
    """

    number: Number
    at: float
    ending: Ending | None = None
    tokens: Count | None = None
    learned: tuple[Count, Count] | None = None
    finished: tuple[Count, Count, Count | None] | None = None
    left: Left = ""
    outcome: Outcome = Outcome.BUG
    first_byte: float | None = None
    wrote: Count | None = None


class Held(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=12):
    """A grant of an earlier decider, reported to its successor."""

    ask: Ask
    terms: GrantTerms
    first_byte: float  # when its engine had read the prompt; 0: not yet
    second: bool = False  # it is of a second attempt


class AllHeld(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=13):
    """The relay has told of all that it holds, and asked again for all that waits. `last`: the highest number that it
    has given; of these `alive` are those of calls that have not ended, so that a question about another comes too
    late."""

    last: Number
    alive: list[Number]


class ModelsAsk(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=16):
    """The models that a tenant may use."""

    number: Number
    turn: Count
    path: bytes
    tenant: Word
    policy: Number


class ArrivalAsk(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=19):
    """A request that is no call, or came to nothing before it was judged: limits count it, and may refuse it."""

    number: Number
    turn: Count
    tenant: Word
    policy: Number
    at: float


class Prefilled(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=20):
    """The prompt was read elsewhere, or was not; see Grant.prefilled."""

    number: Number
    turn: Count
    at: float
    failure: Word
    message: str
    reason: Word


class RelayCounts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=17):
    """A relay's totals since its start. `calls` are those of `CallCounts`, `ended` their number. `lines`: of the Batch
    API, by what became of them; empty: it is not offered. `line_calls`: lines that wait or run now; `batch_states`:
    batches by state, where this relay works them."""

    calls: bytes
    ended: Count
    connections: Count
    body_bytes: Count
    refusals: dict[int, Count]
    body_refusals: dict[str, Count]
    batches: dict[str, Count]
    merged: Count
    again: Count
    lost_lines: Count
    lost_spans: Count = 0
    lines: dict[str, Count] = {}
    line_calls: Count = 0
    batch_states: dict[str, Count] = {}


class EndedRecords(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=18):
    """Records of calls that have ended since the last time, for the console: when, and how. Where there are more than
    MOST_RECORDS, the newest."""

    calls: Annotated[list[tuple[float, Record]], Meta(max_length=MOST_RECORDS)]


# -- from the decider -------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=32):
    """The decider takes the relay."""

    version: int
    epoch: Number


class PolicyNews(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=33):
    """The policy to go by from now on. `limited`: it has limits; `metered`: tenants whose tokens one counts.
    `jwks`: the keys of its issuer, where a file has them."""

    version: Number
    policy: msgspec.Raw
    cache_secret: bytes
    limited: bool
    metered: list[Word]
    jwks: bytes = b""


class EngineNews(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """An engine that calls may be sent to, or are under way to. `trust`: certificates to accept, as in Trust; None: the
    system's. `label`: its name for operators."""

    id: str
    url: str
    api_key: str | None
    trust: tuple[str | None, str | None] | None
    up: bool
    label: str = ""


class ModelNews(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """A model that an engine or a sidecar has. `window`: share of a batch's window, 0..1."""

    name: str
    context: Count | None
    window: float


class FleetNews(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=34):
    """The engines and models of now. `up`: whether balancers should send calls here."""

    engines: tuple[EngineNews, ...]
    models: tuple[ModelNews, ...]
    up: bool


class Judgement(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=35):
    """The call is charged, and waits for an engine or for WaitAsk. `lines`: the answer's x-ratelimit lines."""

    number: Number
    turn: Count
    facts: CallFacts
    lines: bytes


class GrantTerms(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=36):
    """Permission to use one engine."""

    number: Number
    turn: Count
    epoch: Number  # the decider's
    engine: EngineTerms
    tokens: Count  # of the hold
    taken_at: float
    prefill: Count
    cached: Count
    expected: float  # seconds to the first byte
    facts: CallFacts
    lines: bytes = b""  # the answer's x-ratelimit lines
    hedge_after: float | None = None  # seconds; None: never
    second: bool = False  # it is for a second attempt
    priority: Count = 0  # what the engine is told
    elsewhere: PrefillTerms | None = None  # where the prompt is read


class RefusedCall(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=37):
    """The call is refused. `facts` None: nobody has judged it."""

    number: Number
    turn: Count
    refusal: RefusalFacts
    facts: CallFacts | None


class RetryAnswer(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=38):
    """Seconds to wait before another attempt; None: there is none."""

    number: Number
    turn: Count
    pause: float | None


class SecondNone(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=39):
    """Answer that there is no room for a second attempt."""

    number: Number
    turn: Count


class ModelsAnswer(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=40):
    """Status and body of an answer to `GET /v1/models`."""

    number: Number
    turn: Count
    status: int
    body: bytes


class ArrivalAnswer(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=43):
    """The request of a ArrivalAsk is counted."""

    number: Number
    turn: Count


class CountsAsk(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=41):
    """The relay's totals are wanted now."""


class DrainOrder(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=42):
    """Finish what is under way within so many seconds, and end. `gently`: another has the listening sockets, so what
    comes on a connection that is open is still served, once. `decider`: the socket of the one to ask from now on;
    empty: this one."""

    within: float
    gently: bool = False
    decider: Annotated[str, Meta(max_length=4096)] = ""


Question: TypeAlias = Ask | WaitAsk | RetryAsk | MoveAsk | SecondAsk | ModelsAsk | ArrivalAsk
Answer: TypeAlias = GrantTerms | RefusedCall | RetryAnswer | SecondNone | ModelsAnswer | ArrivalAnswer
OfCall: TypeAlias = WaitAsk | Prefilled | Answered | AttemptFailed | RetryAsk | MoveAsk | SecondAsk | SecondEnd
FromRelay: TypeAlias = (
    Hello | Ask | WaitAsk | FirstByte | Answered | AttemptFailed | RetryAsk | MoveAsk | SecondAsk | SecondEnd
    | CallEnd | Held | AllHeld | ModelsAsk | RelayCounts | ArrivalAsk
    | EndedRecords | Prefilled
)  # fmt: skip
FromDecider: TypeAlias = (
    Welcome | PolicyNews | FleetNews | Judgement | GrantTerms | RefusedCall | RetryAnswer | SecondNone | ModelsAnswer
    | ArrivalAnswer | CountsAsk | DrainOrder
)  # fmt: skip
Message: TypeAlias = FromRelay | FromDecider
