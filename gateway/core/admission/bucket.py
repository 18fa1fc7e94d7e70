"""Token bucket of one rate limit (GCRA), and the x-ratelimit lines that callers are told.

A bucket is GCRA in its continuous-state form, a leaky bucket as a meter; ITU-T I.371 has both forms, and they let the
same traffic through. `level` rises by what is taken and drains at `rate`. A take must not lift it above `burst`. So in
any window what was taken, less what was given back in it, is at most burst + rate x window. The level counts calls or
tokens where GCRA has a theoretical arrival time: 600 calls at one instant are exactly 600, whatever the clock reads.

Questions change nothing: `allows`, `admits`, `wait` and `retry_after` read the level as it is at their `now`.
`advance`, `add` and `change` write it. `limits.py` says which limits count which call.
"""

from __future__ import annotations

import math

from gateway.core.admission.levels import Kind
from gateway.core.admission.limit_bookings import Booked
from gateway.core.policy.traffic import RateLimit

# Whose bucket it is: kind, tenant, class, model; "" where its level does not ask. All of them "": the whole gateway's.
Key = tuple[Kind, str, str, str]

MARGIN = 0.1  # of a burst of tokens, kept for calls that turn out to be more than they were estimated at
LATE = 1e-6  # seconds added to a retry time, so that the rounding of two clock readings cannot make it a lie


class Bucket:
    """Token bucket of one limit. `level`: amount taken and not yet drained, as of `at`. Only a Charge and the LimitBook
    write `level`."""

    __slots__ = ("at", "booked", "burst", "key", "level", "quota", "rate")

    def __init__(self, key: Key, quota: RateLimit) -> None:
        self.key = key
        self.level = self.at = 0.0
        self.booked: Booked | None = None  # once a call was told to come back
        self._set(quota)

    def _set(self, quota: RateLimit) -> None:
        self.quota = quota
        self.rate = quota.rate.amount / quota.rate.period  # per second
        self.burst = quota.rate.amount if quota.burst is None else quota.burst

    def change(self, quota: RateLimit, now: float) -> None:
        """A reload. What was taken stays taken: a higher limit helps at once, and a reload gives nothing away. But it
        is at most one new burst, beside what was debt already: nobody pays for an old burst at a much lower rate."""
        self.advance(now)
        debt = max(0.0, self.level - self.burst)
        self._set(quota)
        self.level = min(self.level, self.burst + debt)

    def level_at(self, now: float) -> float:
        """Amount that has not drained by `now`."""
        elapsed = now - self.at
        if elapsed <= 0.0:  # calls bring the time they came at, and may be a little out of order
            return self.level
        level = self.level - elapsed * self.rate
        return level if level > 0.0 else 0.0

    def advance(self, now: float) -> None:
        """Time has passed: the level drains."""
        elapsed = now - self.at
        if elapsed > 0.0:  # level_at(), written out: so does every call of every bucket
            level = self.level - elapsed * self.rate
            self.level = level if level > 0.0 else 0.0
            self.at = now

    def allows(self, amount: int, now: float) -> bool:
        """GCRA's question, in units: max(tat, now) + amount x T - now <= burst x T, with T = 1 / rate."""
        return self.level_at(now) + amount <= self.burst

    def wait(self, amount: int, now: float) -> float:
        """Seconds from `now` until `amount` is allowed, if nobody else takes; inf where it is above the burst."""
        if amount > self.burst:
            return math.inf
        short = self.level_at(now) + amount - self.burst
        return short / self.rate + max(0.0, self.at - now) + LATE if short > 0.0 else 0.0

    def admits(self, amount: int, now: float) -> bool:
        """Whether a newcomer is allowed, and leaves room for the booked calls."""
        if not self.allows(amount, now):
            return False
        if self.booked is None:
            return True
        margin = MARGIN * self.burst if self.key[0] == "tokens" else 0.0
        return self.booked.leaves(self.level_at(now) + amount - self.burst + margin, self.rate, now)

    def retry_after(self, amount: int, now: float) -> float:
        """Retry-After of a call that is not admitted, in seconds."""
        wait = self.wait(amount, now)
        return wait if self.booked is None else self.booked.after(wait, amount, self.rate, now)

    def add(self, amount: int, now: float) -> None:
        """Take without asking, or give back where `amount` is negative: at most all that has not drained."""
        self.advance(now)
        self.level = max(0.0, self.level + amount)

    def restore(self, level: float, then: float) -> None:
        """Restore the level that an earlier decider had at `then`, unless the amount taken here is higher."""
        self.advance(then)
        self.level = max(self.level, level - (self.at - then) * self.rate)

    def left(self, now: float) -> int:
        """The amount that could be taken at once."""
        left = self.burst - self.level_at(now)
        return int(left) if left > 0.0 else 0

    @property
    def owner(self) -> str:
        """The limit's owner, as messages name it."""
        _, tenant, class_name, model = self.key
        if model:
            what = f"model {model}"
            return f"tenant {tenant} with {what}" if tenant else f"{what}, all tenants together"
        if class_name:
            return f"tenant {tenant} in class {class_name}" if tenant else f"class {class_name}, all tenants together"
        return f"tenant {tenant}" if tenant else "this gateway, all tenants together"


Buckets = tuple[Bucket, ...]


def longest_wait(by_request: Buckets, by_token: Buckets, tokens: int, now: float) -> tuple[float, Bucket, int]:
    """The bucket that a call of `tokens` waits for longest: the seconds, the bucket, the amount."""
    takes = [*((bucket, 1) for bucket in by_request), *((bucket, tokens) for bucket in by_token)]
    return max(
        ((bucket.retry_after(amount, now), bucket, amount) for bucket, amount in takes), key=lambda wait: wait[0]
    )


def rate_lines(by_request: Buckets, by_token: Buckets, now: float) -> bytes:
    """OpenAI's x-ratelimit-{limit,remaining,reset}-{requests,tokens}, for the bucket of each kind with least left.

    As OpenAI says it: `limit` is what is permitted before the limit is reached (the burst), `reset` the time until all
    of it is again.
    """
    lines = _lines_of(_REQUESTS, by_request, now) if by_request else b""
    return lines + _lines_of(_TOKENS, by_token, now) if by_token else lines


_LINES = b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"
_REQUESTS, _TOKENS = (_LINES % (kind, kind, kind) for kind in (b"requests", b"tokens"))


def _lines_of(template: bytes, buckets: Buckets, now: float) -> bytes:
    tightest, least = buckets[0], math.inf
    for bucket in buckets:
        left = bucket.burst - bucket.level_at(now)
        if left < least:
            tightest, least = bucket, left
    used = duration((tightest.burst - least) / tightest.rate)
    return template % (tightest.burst, max(0, int(least)), used)


def duration(seconds: float) -> bytes:
    """Write seconds as OpenAI (and Go) do, in milliseconds rounded up: `0s`, `250ms`, `1s`, `8.64s`, `6m0s`,
    `24h0m0s`."""
    milliseconds = math.ceil(seconds * 1000.0 - 1e-3)  # no millisecond more for a rounding
    if 0 < milliseconds < 1000:
        return b"%dms" % milliseconds
    whole, part = divmod(milliseconds, 1000)
    minutes, whole = divmod(whole, 60)
    fraction = (b".%03d" % part).rstrip(b"0") if part else b""
    if not minutes:
        return b"%d%bs" % (whole, fraction)
    hours, minutes = divmod(minutes, 60)
    return b"%dh%dm%d%bs" % (hours, minutes, whole, fraction) if hours else b"%dm%d%bs" % (minutes, whole, fraction)
