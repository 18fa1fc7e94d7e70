"""Token quotas of tenants over calendar windows, the day and the month in UTC, as far as they are used.

What an engine has counted is `used` in the window in which the call ends. A call under way holds its estimate as
`reserved`, and is let in where both together stay within the quota. So no window's quota is exceeded by more than calls
under way turn out to be above their estimates. A new window begins with nothing used; what is reserved goes on.

Times are monotonic seconds, as everywhere in core; `Calendar.offset` makes them Unix time. A clock that is set back by
less than LEEWAY stays in its window, so that a correction at midnight empties none twice. The last OTHERS windows are
remembered, so that a clock that ran days ahead, and is set right, empties none either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import TokenQuota

Span = Literal["day", "month"]
SPANS: tuple[Span, Span] = ("day", "month")
DAY = 86_400
LEEWAY = 3_600.0  # seconds
HELD = 5.0  # seconds, by which calls under way may have ended
OTHERS = 4  # windows of one quota that are remembered beside now's


class Calendar:
    """`offset`: Unix time less monotonic seconds, kept true by whoever has both clocks."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset


class Used(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Tokens used in one window. `start`: its first second, Unix time."""

    tenant: str
    span: Span
    start: Annotated[int, Meta(ge=-(2**53), le=2**53)]
    tokens: Annotated[int, Meta(ge=0, le=2**53)]


class QuotaWindow:
    """The window of one tenant that is now. `amount`: its quota; None: it is only counted. `base`: what was used as
    far as others have told, `since` what was used here."""

    def __init__(self, tenant: str, span: Span, calendar: Calendar) -> None:
        self.tenant = tenant
        self.span: Span = span
        self.amount: int | None = None
        self._calendar = calendar
        self.base = self.since = self.reserved = 0
        self.start = self.ends = 0
        self._others: dict[int, int] = {}  # tokens used in other windows, by their start

    def used(self, now: float) -> int:
        """Tokens used in the window of `now`."""
        wall = now + self._calendar.offset
        return self._others.get(bounds(self.span, wall)[0], 0) if self._over(wall) else self.base + self.since

    def allows(self, tokens: int, now: float) -> bool:
        """Whether a call of so many tokens is within the quota."""
        return self.amount is None or self.used(now) + self.reserved + tokens <= self.amount

    def resets_in(self, now: float) -> float:
        """Seconds until the next window begins."""
        wall = now + self._calendar.offset
        return (bounds(self.span, wall)[1] if self._over(wall) else self.ends) - wall

    def frees_in(self, tokens: int, now: float) -> float:
        """Seconds until so many tokens, which the quota has no room for now, may have room; infinite: they never have.
        Of calls under way it is not known when they end: HELD at most."""
        amount = self.amount or 0
        if tokens > amount:
            return math.inf
        return min(self.resets_in(now), HELD) if self.used(now) + tokens <= amount else self.resets_in(now)

    def start_at(self, now: float) -> int:
        """The first second of the window of `now`, Unix time."""
        wall = now + self._calendar.offset
        return bounds(self.span, wall)[0] if self._over(wall) else self.start

    def reserve(self, tokens: int, now: float) -> None:
        """A call is let in, at its estimate."""
        self._roll(now)
        self.reserved += tokens

    def carry(self, tokens: int) -> None:
        """Reserve for a call that began before the window was counted."""
        self.reserved += tokens

    def settle(self, reserved: int, tokens: int, now: float) -> None:
        """Replace the reservation of an ended call by the tokens that it used."""
        self._roll(now)
        self.reserved -= reserved
        self.since += tokens

    def release(self, reserved: int) -> None:
        """Remove the reservation of an ended call that used no tokens."""
        self.reserved -= reserved

    def told(self, used: Used, now: float) -> None:
        """Take the window as it was kept last for its base. Tokens used here come on top."""
        self._roll(now)
        if used.start == self.start:
            self.base = max(self.base, used.tokens)
        else:
            self._remember(used.start, used.tokens)

    def goes_on(self, used: Used, now: float) -> None:
        """Go on from an earlier decider's window, which has the tokens used here in it."""
        self._roll(now)
        self.raise_to(used.start, used.tokens)

    def raise_to(self, start: int, tokens: int) -> None:
        """Take at least so many tokens as used in the window that begins at `start`."""
        if start != self.start:
            self._remember(start, tokens)
        elif tokens > self.base + self.since:
            self.base, self.since = tokens, 0

    @property
    def counted(self) -> int:
        """Tokens used in the window, as far as they are counted."""
        return self.base + self.since

    def state(self) -> Used:
        return Used(self.tenant, self.span, self.start, self.counted)

    def _over(self, wall: float) -> bool:
        return not (self.start <= wall < self.ends or 0.0 < self.start - wall < LEEWAY)

    def _roll(self, now: float) -> None:
        wall = now + self._calendar.offset
        if self._over(wall):
            self._remember(self.start, self.base + self.since)
            self.start, self.ends = bounds(self.span, wall)
            self.base, self.since = self._others.pop(self.start, 0), 0

    def _remember(self, start: int, tokens: int) -> None:
        """Note what was used in a window that is not now's: a clock that was wrong is set right again."""
        if tokens > self._others.get(start, 0):
            self._others[start] = tokens
            if len(self._others) > OTHERS:
                del self._others[min(self._others)]


Windows = tuple[QuotaWindow, ...]


class QuotaBook:
    """The windows of every tenant; none where the policy keeps nothing. `calendar` is shared with whoever sets it."""

    def __init__(self, policy: Policy, calendar: Calendar | None = None) -> None:
        self.calendar = calendar or Calendar()
        self._windows: dict[str, Windows] = {}  # those of tenants that are gone too: they may come back
        self._of: dict[str, Windows] = {}
        self.apply(policy)

    def apply(self, policy: Policy) -> None:
        """Apply another policy. Windows keep the tokens used."""
        self._of = {}
        if policy.storage is None:
            return
        for name in policy.tenants:
            windows, quota = self._windows_of(name), quota_of(policy, name)
            for window in windows:
                amount = getattr(quota, window.span)
                window.amount = amount if isinstance(amount, int) else None
            self._of[name] = windows

    def __bool__(self) -> bool:
        """Whether any tenant's tokens are counted."""
        return bool(self._of)

    def __iter__(self) -> Iterator[QuotaWindow]:
        """Iterate over the windows of the policy's quotas, for reading."""
        return (window for windows in self._of.values() for window in windows)

    def of(self, tenant: str) -> Windows:
        return self._of.get(tenant, ())

    def states(self) -> list[Used]:
        """All that something was used of."""
        return [
            window.state() for windows in self._windows.values() for window in windows if window.base or window.since
        ]

    def told(self, kept: Iterable[Used], now: float) -> None:
        """Take the windows that were kept before this gateway began for the bases of its own."""
        for window, used in self._of_each(kept):
            window.told(used, now)

    def goes_on(self, saved: Iterable[Used], now: float) -> None:
        """Go on from the states of a decider before."""
        for window, used in self._of_each(saved):
            window.goes_on(used, now)

    def _windows_of(self, tenant: str) -> Windows:
        """The windows of a tenant, made if there are none."""
        windows = self._windows.get(tenant)
        if windows is None:
            windows = self._windows[tenant] = tuple([QuotaWindow(tenant, span, self.calendar) for span in SPANS])
        return windows

    def _of_each(self, states: Iterable[Used]) -> Iterator[tuple[QuotaWindow, Used]]:
        """Each state with its window, also of a tenant that a reload may bring back."""
        for used in states:
            yield from ((window, used) for window in self._windows_of(used.tenant) if window.span == used.span)


def quota_of(policy: Policy, tenant: str) -> TokenQuota:
    """The quota of a tenant: its own, and where that says nothing the default."""
    own, default = policy.tenants[tenant].limits.quota, policy.limits.quota
    return TokenQuota(
        day=default.day if own.day is None else own.day, month=default.month if own.month is None else own.month
    )


def tightest(windows: Windows, tokens: int, now: float) -> QuotaWindow | None:
    """The window that keeps a call of so many tokens out for longest; None: they let it in."""
    found = [window for window in windows if not window.allows(tokens, now)]
    return max(found, key=lambda window: (window.frees_in(tokens, now), window.resets_in(now)), default=None)


def bounds(span: Span, wall: float) -> tuple[int, int]:
    """The first second of the window with this Unix time, and that of the next."""
    day = int(wall // DAY)
    if span == "day":
        return day * DAY, (day + 1) * DAY
    year, month, _ = civil(day)
    return days(year, month) * DAY, days(year + month // 12, month % 12 + 1) * DAY


def civil(day: int) -> tuple[int, int, int]:
    """Year, month and day of the month of a day since 1970-01-01, in the Gregorian calendar.

    The algorithm is Howard Hinnant's civil_from_days, "chrono-Compatible Low-Level Date Algorithms".
    """
    era, of_era = divmod(day + 719_468, 146_097)
    year = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    shifted = (5 * of_year + 2) // 153  # months since March
    month = shifted + 3 if shifted < 10 else shifted - 9
    return year + era * 400 + (month <= 2), month, of_year - (153 * shifted + 2) // 5 + 1


def days(year: int, month: int) -> int:
    """Days from 1970-01-01 to the first of a month: Hinnant's days_from_civil."""
    year -= month <= 2
    era, of_era = divmod(year, 400)
    of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def day_text(start: int) -> str:
    """The first day of a window, as 2026-11-23."""
    year, month, day = civil(start // DAY)
    return f"{year:04}-{month:02}-{day:02}"
