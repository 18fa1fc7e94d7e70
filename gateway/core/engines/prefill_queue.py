"""Prefill queue of one engine: prompts that it was sent and has yet to read.

The first byte of a stream tells that its prompt is read. A whole answer's first byte comes after its last token, so its
prompt counts as read when predicted (`expect`), or when a sample shows that the engine has begun it. `now` is monotonic
seconds.
"""

from __future__ import annotations

from collections import deque

from gateway.core.engines.hold import Hold

SENT_REMEMBERED = 128  # calls


class PrefillQueue:
    """Prompt tokens that an engine has yet to read."""

    def __init__(self) -> None:
        self.queued = 0  # prompt tokens
        self.queued_telling = 0  # of them, those of calls whose first byte will tell that they are read
        self.awaited = 0  # calls whose first byte has not come
        self.begun = False  # an answer, since the last sample
        self.sent: deque[float] = deque(maxlen=SENT_REMEMBERED)  # when the last holds were taken
        self.unseen: deque[tuple[float, Hold]] = deque()  # in order of their predicted first bytes, roughly

    def add(self, hold: Hold) -> None:
        self.queued += hold.prefill
        self.queued_telling += hold.prefill
        self.awaited += 1
        self.sent.append(hold.taken_at)

    def expect(self, hold: Hold, at: float) -> None:
        """Count a call's prompt as read at `at`, the predicted time, because its first byte will not tell."""
        hold.tells = False
        self.queued_telling -= hold.prefill
        self.unseen.append((at, hold))

    def advance(self, now: float) -> None:
        """Count as read what should be by now."""
        unseen = self.unseen
        while unseen and (unseen[0][0] <= now or not unseen[0][1].prefill):
            unseen.popleft()[1].prefill_done()

    def pass_begun(self, waiting: int, since: float) -> None:
        """Count as read what the engine has begun, whatever was predicted: it reads in order, so only the last
        `waiting` calls wait, those sent after `since` (within its last steps), and the call before them is being
        read."""
        if unseen := self.unseen:
            unread = waiting + 1 + sum(1 for _, hold in unseen if hold.taken_at > since)
            for _ in range(len(unseen) - unread):
                unseen.popleft()[1].prefill_done()

    def sent_after(self, since: float) -> int:
        """Number of calls sent after `since`, of the last SENT_REMEMBERED."""
        return sum(1 for at in self.sent if at > since)

    def ahead(self, now: float) -> int:
        """Prompt tokens that wait to be read on this engine."""
        ahead = self.queued
        for at, hold in self.unseen:
            if at > now and hold.prefill:
                break
            ahead -= hold.prefill
        return ahead

    def reading(self, prefill: int, now: float) -> int:
        """Prompt tokens to read until `prefill` tokens more are read: those that wait to be read included."""
        return (self.ahead(now) if self.unseen else self.queued) + prefill  # asked twice for every call
