"""Records of a run: the result of each request, the targets' samples.

`gateway bench` makes them over sockets, `gateway simulate` in virtual time. The modules that count and draw read them
and know nothing else of a run. Times are seconds from the start of the run (of its repeat), lengths are tokens, shares
lie between 0 and 1.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from loadtest.report.tally import Tally


MONEY = "money an hour"  # in the `meta` of a simulated run under a policy with providers: what these cost
NOT_SENT = "not_sent"  # outcome of a request that was due, and that a late sender has not sent


class TokenGaps(msgspec.Struct, gc=False):
    """Inter-token latencies of one answer, in seconds and in order. `total`: the seconds from its first token to its
    last, rounded once."""

    each: array[float]
    total: float

    def __len__(self) -> int:
        return len(self.each)

    def __iter__(self) -> Iterator[float]:
        return iter(self.each)


class RequestResult(msgspec.Struct, gc=False):
    """Result of one request over all its tries. 0.0 where a thing did not happen.

    `at` is the intended time, `sent` when the first try went out: their difference is the sender's lag. `first_token`
    is the first event of a stream that carries a choice, and stays 0.0 where the answer is not a stream. `gaps` are
    the inter-token latencies (ITL), in order: the seconds from each such event to the one before it, so that
    `first_token + sum(gaps)` is when the last one came; the event with the usage and `[DONE]` are none.
    """

    index: int
    target: str
    repeat: int  # 0 for the first
    at: float
    kind: str
    class_name: str
    tenant: str
    sent: float = 0.0
    first_byte: float = 0.0  # of the answer's head
    first_token: float = 0.0
    finished: float = 0.0  # all of the answer is here, or it is known that no more comes
    status: int = 0
    outcome: str = ""  # a word of loadtest.clients.client.Answer.outcome; "ok" is the only good one
    reason: str = ""  # the server's word for a refusal, or what the socket said
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tries: int = 1
    gaps: tuple[float, ...] | TokenGaps = ()


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Objective for requests of a class, in seconds from the intended time; None: no bound.

    `class_name` "": every class that has no SLO of its own. `attainment`: the share of the *offered* requests that
    must meet it, or the run has missed it: "p99 of TTFT below 0.5 s" is `ttft=0.5, attainment=0.99`.
    """

    class_name: str = ""
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    attainment: float = 0.99


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Measured part of a run: requests *intended* at or after `warmup` and before `duration - cooldown`.

    The rule looks at intended times only, which were fixed before the run: no answer, however late, can move a request
    out of the window or into it. `duration`: how long requests were planned for; infinite where nobody knows.
    """

    duration: float = math.inf
    warmup: float = 0.0
    cooldown: float = 0.0

    @property
    def ends(self) -> float:
        """The end of the measured part."""
        return self.duration - self.cooldown

    def __contains__(self, at: float) -> bool:
        return self.warmup <= at < self.ends


class EngineSample(msgspec.Struct, frozen=True, gc=False):
    """Sample of one engine (or of a target as a whole: `engine` "") at `at`: about one a second."""

    at: float
    engine: str
    kv: float  # share of the KV cache in use
    running: int
    waiting: int  # in the engine's queue, or in the gateway's where `engine` is ""
    repeat: int = 0


class Run(msgspec.Struct, kw_only=True):
    """All repeats of one target (or policy) at one offered rate: what a report is made of, one line of its table.

    `results`: of all repeats, in any order, to be iterated more than once. Where they are too many to keep there are
    only `tallies`, one per repeat, fed as the results came; left out, they are made of the results when first needed.
    A target that was measured at several rates is several runs of one `name`.
    """

    name: str
    rate: float  # requests a second as planned, over all classes; 0.0: unknown (a closed loop, a trace)
    window: Window
    slos: Sequence[Slo] = ()
    results: Iterable[RequestResult] = ()
    tallies: Sequence[Tally] = ()
    series: Sequence[EngineSample] = ()
    meta: Mapping[str, object] = {}  # command, seed, versions, machine: whatever JSON can say
