"""Money that may be spent in one calendar window: a provider's, or the share of one tenant.

The kept amount of a purse, its mark, runs ahead of what is spent. A call may go out only while everything that is spent
and reserved stays within the mark. So a gateway that is killed forgets no money: the next one takes the mark as spent,
which is too much by one LOT at most.
"""

from __future__ import annotations

from gateway.core.admission.quotas import Calendar, QuotaWindow, Span, Used

LOT = 50  # lots in a budget: by one of them a mark is ahead
CALLS = 16  # of the dearest call that a mark has kept out: it is ahead by so many of them at least
NO_WINDOW = -(2**62)


class Purse:
    """Budget of one window, in micro-units. `window.amount` is its budget. `mark`: the amount that is kept as spent in
    the window that begins at `marked`, Unix time."""

    def __init__(self, name: str, span: Span, calendar: Calendar) -> None:
        self.window = QuotaWindow(name, span, calendar)
        self.mark = 0
        self.marked = NO_WINDOW
        self.wanted = 0

    def covers(self, cost: int, now: float) -> bool:
        """Whether a call of this cost stays within the mark. If not, the next mark has room for it."""
        window = self.window
        if window.start_at(now) == self.marked and window.used(now) + window.reserved + cost <= self.mark:
            return True
        self.wanted = max(self.wanted, cost)
        return False

    def is_short(self, now: float) -> bool:
        """Whether the mark is to be raised: half of its lead is used up, or a call did not fit."""
        window, budget = self.window, self.window.amount or 0
        if window.start_at(now) != self.marked:
            return True
        left = self.mark - window.used(now) - window.reserved
        return self.mark < budget and left < max(budget // LOT, CALLS * self.wanted) // 2

    def next_mark(self, now: float) -> int:
        """Return the mark that is to be kept next."""
        window, budget = self.window, self.window.amount or 0
        promised = window.used(now) + window.reserved
        if not self.is_short(now):
            return self.mark
        return max(promised, min(budget, promised + max(budget // LOT, CALLS * self.wanted)))

    def keep(self, mark: int, start: int) -> None:
        """Note that this mark is kept now."""
        self.mark, self.marked = mark, start

    def restore(self, mark: int, start: int, now: float) -> None:
        """Take the mark of an earlier gateway as spent."""
        window = self.window
        window.goes_on(Used(window.tenant, window.span, start, mark), now)
        if start == window.start_at(now):
            self.keep(mark, start)
