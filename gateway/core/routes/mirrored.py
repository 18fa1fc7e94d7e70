"""Answers of one side of a mirror, added up: the members' to calls that were copied, or those to the copies."""

from __future__ import annotations

from collections import Counter

from msgspec import UNSET

from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.routes.canary import ERRORS


class Answers:
    """`results` counts calls: ok, error (the engine's fault, or refused by it), dropped (no room, or the caller left).
    `tokens`, `ttft` (seconds) and `finishes` are of those that are ok."""

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
