"""Hold: KV tokens reserved on one engine for one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from gateway.core.engines.engine import Engine


class Hold(msgspec.Struct, eq=False):
    """KV tokens reserved on one engine for one call. `release` gives them back, once; more calls change nothing."""

    engine: Engine
    tokens: int
    prefill: int  # prompt tokens the engine has yet to read for this call; 0 after the first byte
    taken_at: float
    class_name: str
    output: int  # of the tokens; the others are the prompt's
    reading: int  # `PrefillQueue.reading` of the call when its hold was taken
    awaited: bool = True  # its first byte
    tells: bool = True  # its first byte tells that its prompt is read
    live: bool = True

    def first_byte(self, now: float, *, teach: bool) -> None:
        """Take the call from the prefill queue, because the engine has read its prompt. `teach`: the call is streamed,
        so its first byte also teaches the engine's prefill rate; a whole answer's comes after its last token."""
        if self.prefill:
            if teach:
                self.engine.speed.learn_first_byte(self.reading, now - self.taken_at)
            self.prefill_done()
        if self.awaited:
            self.engine.prefills.begun = True
            self.answered()

    def reads(self, prefill: int) -> None:
        """Count so many prompt tokens as yet to be read, in place of those known so far."""
        self._queue(prefill - self.prefill)
        self.prefill = prefill

    def answered(self) -> None:
        """Note that the first byte, which was awaited, is here."""
        self.awaited = False
        self.engine.prefills.awaited -= 1

    def prefill_done(self) -> None:
        self._queue(-self.prefill)
        self.prefill = 0

    def _queue(self, tokens: int) -> None:
        prefills = self.engine.prefills
        prefills.queued += tokens
        if self.tells:
            prefills.queued_telling += tokens

    def release(self) -> None:
        if self.live:
            self.live = False
            engine = self.engine
            engine.ledger.give_back(self)
            if self.prefill:
                self.prefill_done()
            if self.awaited:
                self.answered()
            if not engine.ledger.in_flight:
                engine.prefills.unseen.clear()
