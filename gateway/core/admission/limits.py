"""Rate limits: how many calls and tokens over time, at six levels.

Levels, most specific first: (tenant, model), (tenant, class), tenant, class, model, the whole gateway. A specific limit
replaces the default of its level, `requests` and `tokens` each for itself.

A request is taken from the tenant's and the whole gateway's limit as it arrives, before its body is read; from the
others, with its tokens, once they are known, and then from all or none. It is given back where it was refused for
nothing that its client did, never for a 4xx. Tokens are reserved at the estimate and settled at real usage, once; a
`Charge` is that reservation. Settling may lift a level above its burst: such a debt is paid before the next call.
Synchronous, no I/O; `now` is monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from gateway.core.admission.bucket import Bucket, Buckets, Key, longest_wait, rate_lines
from gateway.core.admission.levels import Kind, Level, limit_at
from gateway.core.admission.limit_bookings import CALLS, HORIZON, SLOT, SLOT_LEAST, SOON, Booked, LimitBookings
from gateway.core.admission.quotas import Calendar, QuotaBook, Windows, tightest
from gateway.core.admission.refusals import quota_exceeded, rate_limited
from gateway.core.admission.witness import LimitWitness
from gateway.core.checkpoint import MOST_BUCKETS, MOST_PLACES, SavedBucket, SavedLimitPlace, SavedLimits
from gateway.core.money.book import MoneyBook
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import AnyLimit, RateLimit, TenantLimits
from gateway.core.request.outcome import Refused

ROUTES_REMEMBERED = 4096  # (tenant, class, model) whose buckets are at hand

Route = tuple[Buckets, Buckets]  # those that count requests, those that count tokens


class Charge:
    """Charge of one call to every bucket that counts it: 1 request each, and its estimated tokens.

    A charge ends once, by the first of `settle`, `refund`, `forgo` and `keep`; the others then do nothing. Used as a
    context manager, a charge that has not ended returns its tokens at the exit. It returns its request too, unless the
    client caused the exit. `settled`: tokens, once they are known.
    """

    __slots__ = ("_requests", "_tokens", "_windows", "live", "refunded", "reserved", "settled")

    def __init__(
        self, requests: Buckets, tokens: Buckets, reserved: int, windows: Windows = (), *, live: bool = True
    ) -> None:
        self._requests = requests
        self._tokens = tokens
        self._windows = windows
        self.reserved = reserved
        self.refunded = False
        self.settled: int | None = None
        self.live = live

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        if self.live:
            if error is None or (error.ours if isinstance(error, Refused) else isinstance(error, Exception)):
                self.refund()
            else:  # refused for what it is, or cancelled: its client left
                self.forgo()

    def settle(self, tokens: int, now: float) -> None:
        """Replace the estimate by real usage: unused tokens are refunded, and usage beyond the estimate becomes
        debt."""
        if self.live:
            self.live = False
            self.settled = tokens
            for bucket in self._tokens:
                bucket.add(tokens - self.reserved, now)
            for window in self._windows:
                window.settle(self.reserved, tokens, now)

    def refund(self) -> None:
        """Refund the request and the tokens of a call that did not run."""
        if self.live:
            self.refunded = True
            for bucket in self._requests:
                bucket.level = max(0.0, bucket.level - 1)
            self.forgo()

    def forgo(self) -> None:
        """Refund the tokens, but not the request, of a call that no engine ran by its client's doing."""
        if self.live:
            self.live = False
            # No `now`: whether a level first drains and is then lowered, or the reverse, it ends the same.
            for bucket in self._tokens:
                bucket.level = max(0.0, bucket.level - self.reserved)
            for window in self._windows:
                window.release(self.reserved)

    def keep(self) -> None:
        """The call ran, and what it used is not known: the estimate is final."""
        if self.live:
            self.live = False
            for window in self._windows:
                window.release(self.reserved)
                window.since += self.reserved

    @property
    def requests(self) -> Buckets:
        """The buckets that it took a request from."""
        return self._requests

    @property
    def taken(self) -> Iterator[tuple[Bucket, int]]:
        """Yield each bucket with the amount that the charge holds of it; nothing once the charge has ended."""
        if self.live:
            yield from ((bucket, 1) for bucket in self._requests)
            yield from ((bucket, self.reserved) for bucket in self._tokens)

    def headers(self, now: float) -> bytes:
        """The answer's x-ratelimit lines, as the limits stand now; empty where none counts this call."""
        return rate_lines(self._requests, self._tokens, now)


class LimitBook:
    """Every bucket there is. `charge` is the only way to take from them."""

    def __init__(self, policy: Policy, witness: LimitWitness | None = None, calendar: Calendar | None = None) -> None:
        self._witness = witness
        calendar = calendar or Calendar()
        self.quotas = QuotaBook(policy, calendar)
        self.money = MoneyBook(policy, calendar)
        self._free = Charge((), (), 0, live=False)  # of no bucket, with nothing to end: one serves all
        self._buckets: dict[Key, Bucket] = {}
        self._routes: dict[Level, Route] = {}
        self._arrivals: dict[str, Route] = {}  # by tenant
        self._bookings = LimitBookings()
        self.apply(policy, 0.0)

    def apply(self, policy: Policy, now: float) -> None:
        """Apply another policy. Limits that still exist keep their level (see Bucket.change), and calls in flight
        settle on them as before."""
        self._policy = policy
        self.quotas.apply(policy)
        self.money.apply(policy)
        limits, tenants = policy.limits, {name: _own(tenant.limits) for name, tenant in policy.tenants.items()}
        shared: list[AnyLimit] = [limits.global_, limits.per_tenant]
        shared += [*limits.classes.values(), *limits.models.values()]
        self.limited = bool(self.quotas) or any(map(_limits, [*shared, *chain.from_iterable(tenants.values())]))
        self._counts_tokens = any(map(_counts_tokens, shared))
        self._metered = {name for name, own in tenants.items() if any(map(_counts_tokens, own))}
        self._named = {*limits.models, *(model for tenant in policy.tenants.values() for model in tenant.limits.models)}
        self._routes.clear()
        self._arrivals.clear()
        kept, self._buckets = self._buckets, {}
        for key, bucket in kept.items():
            quota = self._quota(key)
            if quota is not None:
                bucket.change(quota, now)
                self._buckets[key] = bucket

    def level(self, key: Key) -> float:
        """Level of one limit at its last change; 0 if nothing was taken."""
        bucket = self._buckets.get(key)
        return 0.0 if bucket is None else bucket.level

    def buckets(self) -> Collection[Bucket]:
        """Every limit that something was ever asked of, to look at."""
        return self._buckets.values()

    def counts_tokens(self, tenant: str) -> bool:
        """Whether a limit counts tokens of this tenant's calls, of some class and model at least."""
        return self._counts_tokens or tenant in self._metered or bool(self.quotas.of(tenant))

    def arrive(self, tenant: str, now: float, body: bytes | None = None) -> Charge:
        """Take 1 request from the limits that are known before a body is read: the tenant's and the whole gateway's.

        Raises Refused (RATE_LIMITED), as `charge` does.
        """
        if not self.limited:
            return self._free
        by_request, by_token = self._arrivals.get(tenant) or self._arrival(tenant)
        if not self._take(by_request, (), 0, now, tenant, body):
            raise self._refused(by_request, by_token, by_request, 0, now, tenant, body)
        if not by_request:
            return self._free
        charge = Charge(by_request, (), 0)
        if self._witness is not None:
            self._witness.arrived(charge)
        return charge

    def charge(
        self,
        tenant: str,
        class_name: str,
        model: str,
        tokens: int,
        now: float,
        arrived: Charge | None = None,
        body: bytes | None = None,
    ) -> Charge:
        """Take 1 request and `tokens` (the estimate, at least 0) from every bucket that counts the call, or from none.
        What `arrived` has taken is not taken again, and ends with this charge. `body` is what a retry would repeat:
        with it, a call that is refused gets a booking.

        Raises Refused (RATE_LIMITED): it names the limit to wait for and when all of them will allow the call.
        """
        if not self.limited:
            return self._free
        named = model if model in self._named else ""
        by_request, by_token = self._routes.get((tenant, class_name, named)) or self._route(tenant, class_name, named)
        taken: Buckets = () if arrived is None else arrived.requests
        left = by_request if not taken else tuple([bucket for bucket in by_request if bucket not in taken])
        windows = self.quotas.of(tenant)
        if windows and (window := tightest(windows, tokens, now)) is not None:
            raise quota_exceeded(window, tokens, now, rate_lines(by_request, by_token, now))
        if not self._take(left, by_token, tokens, now, tenant, body):
            raise self._refused(by_request, by_token, left, tokens, now, tenant, body)
        if not by_request and not by_token and not windows:
            return self._free
        for each in windows:
            each.reserve(tokens, now)
        if arrived is not None:
            arrived.keep()
        charge = Charge(taken + left, by_token, tokens, windows)
        if self._witness is not None:
            self._witness.charged(charge, arrived)
        return charge

    def carry(self, tenant: str, tokens: int, now: float) -> Charge:
        """The charge of a call that another decider let in: its end counts in the quotas. It takes from no rate limit,
        of which the levels were handed on."""
        windows = self.quotas.of(tenant)
        for window in windows:
            window.reserve(tokens, now)
        return Charge((), (), tokens, windows, live=bool(windows))

    def _take(
        self, by_request: Buckets, by_token: Buckets, tokens: int, now: float, tenant: str, body: bytes | None
    ) -> bool:
        """Take the call from all of these, or from none: False."""
        bookings, booking = self._bookings, None
        if bookings:
            bookings.lapse(now)
            booking = None if body is None else bookings.due(hash((tenant, body)), now)
        allowed = Bucket.admits if bookings and booking is None else Bucket.allows
        for bucket in by_request:
            if not allowed(bucket, 1, now):
                return False
        for bucket in by_token:
            if not allowed(bucket, tokens, now):
                return False
        if booking is not None:
            bookings.claim(booking)
        for bucket in by_request:
            bucket.add(1, now)
        for bucket in by_token:
            bucket.add(tokens, now)
        return True

    def _refused(
        self, by_request: Buckets, by_token: Buckets, left: Buckets, tokens: int, now: float, tenant: str,
        body: bytes | None,
    ) -> Refused:  # fmt: skip
        """Refusal of a call that is not let in; with a booking, if its client can repeat it."""
        seconds, bucket, amount = longest_wait(by_request, by_token, tokens, now)
        lines = rate_lines(by_request, by_token, now)
        kept: bool | None = None
        if body is not None and seconds < math.inf:
            key, after = hash((tenant, body)), max(SOON, seconds)
            kept = self._book(key, after, left, by_token, tokens, now)
            seconds = after if kept else seconds
        return rate_limited(bucket, amount, seconds, now, lines, kept=kept)

    def _book(self, key: int, after: float, left: Buckets, by_token: Buckets, tokens: int, now: float) -> bool | None:
        """Make a booking for a refused call. False: none can be made, and coming back will not help; None: nothing is
        promised."""
        booking = self._bookings.due(key, now)
        if booking is not None:  # it has come back, and there was no room yet
            self._bookings.claim(booking)
        parts = []
        for bucket, amount in [*((bucket, 1) for bucket in left), *((bucket, tokens) for bucket in by_token)]:
            if not bucket.admits(amount, now):
                if bucket.burst < CALLS[bucket.key[0]] * amount:
                    return None
                parts.append((_booked(bucket), amount))
        if parts and self._bookings.book(key, after, now, parts):
            return True
        return False if after <= HORIZON else None

    def _arrival(self, tenant: str) -> Route:
        if len(self._arrivals) >= ROUTES_REMEMBERED:
            del self._arrivals[next(iter(self._arrivals))]
        route = self._arrivals[tenant] = self._at((tenant, "", ""), ("", "", ""))
        return route

    # -- for the next decider -------------------------------------------------------------------------------------

    def checkpoint(self, now: float, waiting: Iterable[Charge] = ()) -> SavedLimits:
        """Levels and bookings of now, without what calls that wait have taken: the next decider charges them anew."""
        levels = {bucket: bucket.level_at(now) for bucket in self._buckets.values()}
        for charge in waiting:
            for bucket, amount in charge.taken:
                if bucket in levels:  # else a reload has done away with its limit
                    levels[bucket] -= amount
        kept = [each for each, level in levels.items() if level > 0.0 or (each.booked and each.booked.amount)]
        if len(kept) > MOST_BUCKETS:
            kept.sort(key=lambda bucket: levels[bucket] / bucket.burst, reverse=True)
            del kept[MOST_BUCKETS:]
        buckets = [SavedBucket(each.key, max(0.0, levels[each])) for each in kept]
        numbers = {each.booked: number for number, each in enumerate(kept) if each.booked is not None}
        places = [
            SavedLimitPlace(each.key, each.due - now, [(numbers[booked], amount) for booked, amount in each.parts])
            for each in self._bookings.live(MOST_PLACES)
            if all(booked in numbers for booked, _ in each.parts)
        ]
        return SavedLimits(buckets, places, self.quotas.states()[:MOST_BUCKETS])

    def restore(self, saved: SavedLimits, then: float, *, places: bool) -> None:
        """Go on from a checkpoint of `then`, with its `places`. Limits that the policy has no more are left out."""
        self.quotas.goes_on(saved.quotas, then)
        buckets = [self._found(each.key) for each in saved.buckets]
        for each, bucket in zip(saved.buckets, buckets, strict=True):
            if bucket is not None:
                bucket.restore(each.level, then)
        for place in saved.places if places else ():
            parts = [
                (_booked(bucket), amount)
                for number, amount in place.parts
                if number < len(buckets) and (bucket := buckets[number]) is not None
            ]
            if parts:
                self._bookings.book(place.key, place.due_in, then, parts)

    def _found(self, key: Key) -> Bucket | None:
        """The bucket of this key, made if the policy has such a limit."""
        kind, tenant, class_name, model = key
        return next(iter(self._counting(kind, ((tenant, class_name, model),))), None)

    # -- which buckets --------------------------------------------------------------------------------------------

    def _route(self, tenant: str, class_name: str, model: str) -> Route:
        """The buckets of every level, but of a model only where the policy names it (else model is ""). Bounded, the
        oldest out first; the buckets live elsewhere, so forgetting a route loses nothing."""
        if len(self._routes) >= ROUTES_REMEMBERED:
            del self._routes[next(iter(self._routes))]
        levels = [(tenant, class_name, ""), (tenant, "", ""), ("", class_name, ""), ("", "", "")]
        if model:
            levels = [(tenant, "", model), *levels[:3], ("", "", model), levels[3]]
        route = self._routes[tenant, class_name, model] = self._at(*levels)
        return route

    def _at(self, *levels: Level) -> Route:
        """The buckets of these levels, in this order; none for a level without a limit."""
        return self._counting("requests", levels), self._counting("tokens", levels)

    def _counting(self, kind: Kind, levels: tuple[Level, ...]) -> Buckets:
        found = []
        for level in levels:
            key: Key = (kind, *level)
            quota = self._quota(key)
            if quota is not None:
                bucket = self._buckets.get(key)
                if bucket is None:
                    bucket = self._buckets[key] = Bucket(key, quota)
                found.append(bucket)
        return tuple(found)

    def _quota(self, key: Key) -> RateLimit | None:
        """The limit of one level; None: there is none."""
        kind, tenant, class_name, model = key
        return limit_at(self._policy, kind, (tenant, class_name, model))


def _booked(bucket: Bucket) -> Booked:
    """Bookings of the bucket, created if it has none."""
    if bucket.booked is None:
        bucket.booked = Booked(max(SLOT_LEAST, min(SLOT, bucket.burst / bucket.rate / 2)))
    return bucket.booked


def _own(limits: TenantLimits) -> list[AnyLimit]:
    """A tenant's own limits, at every level."""
    return [limits, *limits.classes.values(), *limits.models.values()]


def _limits(limit: AnyLimit) -> bool:
    return isinstance(limit.requests, RateLimit) or _counts_tokens(limit)


def _counts_tokens(limit: AnyLimit) -> bool:
    return isinstance(limit.tokens, RateLimit)
