"""Sequential test of a canary against the route's other members: whether its errors or first tokens are worse.

Each answered call is one Bernoulli trial: bad or good. `limit` is the share of bad calls of a canary that is just good
enough. For each of ODDS, Page's CUSUM sums log-likelihood ratios against a canary whose odds of a bad call are so many
times those of `limit`, and starts anew at 0:

    p = odds x limit / (1 - limit + odds x limit);  sum = max(0, sum + log(p / limit) or log((1 - p) / (1 - limit)))

A canary is out once a sum reaches LIMIT. One that is just good enough is out after a million calls on average (Lorden,
1971); one twice as slow as allowed after some forty. One minute adds no more than a third of LIMIT, so that no single
bad minute takes a canary out.

Callers choose what they send, and by their session also where it goes. So that none of them takes a canary out, of the
calls of one tenant that engines refuse (4xx) one a minute counts, and first tokens are compared among prompts of about
one length.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from hashlib import blake2b

import msgspec
from msgspec import UNSET

from gateway.core.checkpoint import SavedVerdict
from gateway.core.policy.routes import ModelRoute, RouteMember
from gateway.core.quantile import TTFTQuantile
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record

ODDS = (2.0, 4.0, 8.0)
LIMIT = math.log(1e6 * len(ODDS))
MINUTE = 60.0  # seconds
FORGETTING = 0.999  # for each call of the others: their share of errors is that of about the last 1,000
LEAST, MOST = 0.002, 0.9  # shares of bad calls that can be told from none and from all
ERRORS = frozenset({Outcome.UPSTREAM, Outcome.TRUNCATED, Outcome.ENGINE_REFUSED})


class Evidence:
    """Sums of one figure of one canary."""

    __slots__ = ("_gained", "_minute", "_sums", "bad", "calls")

    def __init__(self) -> None:
        self._sums = [0.0] * len(ODDS)
        self._gained = [0.0] * len(ODDS)
        self._minute = -math.inf
        self.calls = self.bad = 0

    def add(self, limit: float, now: float, *, bad: bool) -> bool:
        """Take a call. Return whether the canary is out. `now`: seconds."""
        self.calls += 1
        self.bad += bad
        if now - self._minute >= MINUTE:
            self._minute, self._gained = now, [0.0] * len(ODDS)
        limit = min(MOST, max(LEAST, limit))
        for index, odds in enumerate(ODDS):
            share = odds * limit / (1.0 - limit + odds * limit)
            step = math.log(share / limit) if bad else math.log((1.0 - share) / (1.0 - limit))
            step = min(step, LIMIT / 3.0 - self._gained[index])
            before = self._sums[index]
            self._sums[index] = max(0.0, before + step)
            self._gained[index] += self._sums[index] - before
        return max(self._sums) >= LIMIT - 1e-9


class CanaryTrial:
    """Trial of a route's canaries: the members with `until`. `out`: those that were taken out, each with the figure
    that did it, in words."""

    def __init__(self, route: ModelRoute) -> None:
        self.route = route
        self.out: dict[str, str] = {}
        self._canaries = {member.model: member for member in route.members if member.until is not None}
        self._rest = frozenset(member.model for member in route.members if member.until is None)
        self._evidence: dict[tuple[str, str], Evidence] = defaultdict(Evidence)
        self._calls = self._errors = 0.0  # of the rest, the last ones
        self._ttfts: dict[tuple[str, bool, int], TTFTQuantile] = defaultdict(TTFTQuantile)  # see `_alike`
        self._refused: dict[tuple[str, str], float] = {}  # by model and tenant, when one of its refused calls counted

    def checkpoint(self, name: str) -> list[SavedVerdict]:
        """The verdicts so far, of the route of this name."""
        return [SavedVerdict(name, _definition(self.route), model, why) for model, why in self.out.items()]

    def restore(self, saved: SavedVerdict) -> None:
        """Take a canary out again, unless the verdict is of another route."""
        if saved.definition == _definition(self.route) and saved.model in self._canaries:
            self.out[saved.model] = saved.why

    @property
    def members(self) -> Iterable[str]:
        return (member.model for member in self.route.members)

    def observe(self, model: str, outcome: Outcome, record: Record | None, now: float) -> str | None:
        """Take a call that a member has answered or failed. Return the words of the figure that takes the member out
        now, else None. `record` None: another model has answered the call. `now`: seconds."""
        if outcome is not Outcome.OK and outcome not in ERRORS:
            return None  # it says nothing of the model
        if record is not None and outcome is Outcome.ENGINE_REFUSED:
            payer = (model, record.tenant)
            if now - self._refused.get(payer, -math.inf) < MINUTE:
                return None
            self._refused[payer] = now
        first = None if record is None or outcome is not Outcome.OK else record
        if model in self._rest:
            self._calls = FORGETTING * self._calls + 1.0
            self._errors = FORGETTING * self._errors + (outcome in ERRORS)
            if first is not None:
                self._ttfts[_alike(first)].add(first.ttft)
            return None
        canary = self._canaries.get(model)
        if canary is None or model in self.out:
            return None
        words = self._errors_of(canary, now, bad=outcome in ERRORS)
        if words is None and first is not None:
            words = self._ttft_of(canary, first, now)
        if words is not None:
            self.out[model] = words
        return words

    def _errors_of(self, canary: RouteMember, now: float, *, bad: bool) -> str | None:
        margin = None if canary.until is None else canary.until.errors
        if margin is None:
            return None
        usual = self._errors / max(1.0, self._calls)
        evidence = self._evidence[canary.model, "errors"]
        if not evidence.add(usual + margin, now, bad=bad):
            return None
        return f"errors: {evidence.bad} of its {evidence.calls} calls, {usual:.1%} of the others'"

    def _ttft_of(self, canary: RouteMember, record: Record, now: float) -> str | None:
        times = None if canary.until is None else canary.until.ttft
        median = self._ttfts[_alike(record)].value(0.5)
        if times is None or median is None:
            return None
        evidence = self._evidence[canary.model, "ttft"]
        if not evidence.add(0.5, now, bad=record.ttft > times * median):
            return None
        slow = f"ttft: {evidence.bad} of its {evidence.calls} first tokens"
        return f"{slow} took more than {times:g} times the others' median, {median:.3f} s"


def _alike(record: Record) -> tuple[str, bool, int]:
    """Return what calls have in common whose first tokens are compared: class, streamed or not, prompt's length by
    powers of two."""
    return record.class_name, record.stream, record.prompt_tokens.bit_length()


def _definition(route: ModelRoute) -> int:
    return int.from_bytes(blake2b(msgspec.json.encode(route), digest_size=8).digest(), "big", signed=True)


# -- answers of a mirror's sides --------------------------------------------------------------------------------------


class Answers:
    """Answers of one side of a mirror, added up: the members' to calls that were copied, or those to the copies.

    `results` counts calls: ok, error (the engine's fault, or refused by it), dropped (no room, or the caller left).
    `tokens`, `ttft` (seconds) and `finishes` are of those that are ok.
    """

    __slots__ = ("finishes", "results", "tokens", "ttft")

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.finishes: Counter[str] = Counter()
        self.tokens = 0
        self.ttft = 0.0

    def add(self, record: Record) -> None:
        """Take a call that has ended."""
        if record.outcome is not Outcome.OK:
            self.results["error" if record.outcome in ERRORS else "dropped"] += 1
            return
        self.results["ok"] += 1
        self.tokens += record.completion_tokens
        self.ttft += record.ttft
        if record.finish is not UNSET:
            self.finishes[record.finish] += 1
