"""One sidecar: its last report, what of it makes an engine one of the fleet, and when it could have a model ready.

A model may be given calls only where its report says that it runs and that nothing is being done with it: a call sent
to a sleeping engine hangs.

Synchronous, no I/O; `now` is monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import msgspec

from gateway.core.engines.fleet import engine_id
from gateway.shared.protocol import CapacityReport, ModelReport
from gateway.shared.vllm.answers import ModelCard

STALE = 10.0  # seconds
BOOTS = 8  # earlier starts of one sidecar that are remembered: their last reports may come late
FIRST_PAUSE, LAST_PAUSE = 0.5, 10.0  # seconds before a sidecar that did not answer is asked again


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of a sidecar's, as the fleet is to have it. `open`: it may be given calls. The sizes are hints, None
    where the sidecar does not know them: tokens of KV cache, tokens of context, calls at once."""

    id: str
    url: str
    sidecar: str
    profile: str
    model: str
    open: bool
    kv_tokens: int | None
    context_length: int | None
    max_concurrency: int | None


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """How a model that no engine serves can be had: from this sidecar's profile in `ready_in` seconds. None: nowhere
    now, and then `why`, `message` and `retry_in` (seconds, where it is known) are what the sidecar says of it."""

    sidecar: str
    profile: str
    ready_in: float | None
    why: str = ""
    message: str = ""
    retry_in: float | None = None


class Sidecar:
    """One sidecar: its last report, when that came, and how asking it goes."""

    __slots__ = (
        "_pause_until", "answers", "askable", "boots", "cards", "failures", "heard_at", "key", "local", "members",
        "models", "refused", "report", "used",
    )  # fmt: skip

    def __init__(self, report: CapacityReport, key: bytes, now: float, *, local: bool) -> None:
        self.report = report
        self.key = key  # digest of the one that its reports show
        self.heard_at = now
        self.local = local
        self.boots: deque[str] = deque(maxlen=BOOTS)  # earlier ones
        self.askable = False  # its control address is one we may call
        self.models: dict[str, ModelReport] = {}  # by profile
        self.answers: dict[str, tuple[ModelReport, float]] = {}  # to what was asked since the last report, and when
        self.members: dict[str, Member] = {}  # by engine id
        self.cards: dict[str, ModelCard] = {}  # of the models that can be had from it
        self.refused: dict[str, str] = {}  # address -> why it may not be used
        self.used: dict[str, float] = {}  # profile -> when a call of it last ended or waited
        self.failures = 0  # to answer, in a row
        self._pause_until = -math.inf

    @property
    def load(self) -> tuple[float, float]:
        """How busy its GPUs are, and how full, each a mean 0..1."""
        gpus = self.report.gpus
        total = sum(gpu.total for gpu in gpus)
        busy = sum(gpu.utilization or 0.0 for gpu in gpus) / max(1, len(gpus))
        return round(busy, 1), sum(gpu.used for gpu in gpus) / max(1, total)

    def late(self, report: CapacityReport) -> str:
        """Why a report is not the newest, in words; empty: it is."""
        if report.boot == self.report.boot:
            known = self.report.sequence
            return f"report {report.sequence} after {known}" if report.sequence <= known else ""
        return f"a report of an earlier start, {report.boot}" if report.boot in self.boots else ""

    def stale(self, now: float) -> bool:
        return now - self.heard_at >= STALE

    def failed(self, now: float) -> None:
        """It was asked and did not answer, or not sensibly."""
        self.failures += 1
        self._pause_until = now + min(LAST_PAUSE, FIRST_PAUSE * 2 ** (self.failures - 1))

    def pause(self, now: float) -> float:
        """Seconds until it may be asked again; 0: now."""
        return max(0.0, self._pause_until - now)

    def said(self, profile: str) -> tuple[ModelReport, float]:
        """The last word on a profile, and when it came. Raises KeyError."""
        return self.answers.get(profile) or (self.models[profile], self.heard_at)

    def answered(self, model: ModelReport, now: float) -> None:
        """What it says of a profile when asked. It moves predictions; an engine is opened only by a report, since only
        reports are in order."""
        self.failures = 0
        self._pause_until = -math.inf
        if model.profile in self.models:
            self.answers[model.profile] = (model, now)

    def outlook(self, profile: str, now: float) -> Outlook | None:
        """What can be expected of a profile; None: nothing can be asked of its sidecar, or it is awake already, and its
        engine has joined or will not."""
        if not self.askable or self.stale(now) or awake(self.models[profile]):
            return None
        model, at = self.said(profile)
        ready_in = model.ready_in
        if ready_in is not None:
            passed = now - at if beginning(model) else 0.0  # what is not begun yet does not come nearer
            ready_in = max(0.0, ready_in - passed) + self.pause(now)
        return Outlook(
            sidecar=self.report.sidecar,
            profile=profile,
            ready_in=ready_in,
            why=model.why,
            message=model.message,
            retry_in=model.retry_in,
        )


def awake(model: ModelReport) -> bool:
    """Whether it may be given calls."""
    return model.state == "running" and model.pending is None


def beginning(model: ModelReport) -> bool:
    """Whether its sidecar is about to have it ready, or has: then a report with its engine is on the way."""
    return model.pending in ("start", "wake") or (model.state in ("starting", "running") and model.pending is None)


def members_of(report: CapacityReport) -> Iterator[Member]:
    """Its engines, wanted or not."""
    for model in report.models:
        if model.url:
            yield Member(
                id=engine_id(model.url),
                url=model.url.rstrip("/"),
                sidecar=report.sidecar,
                profile=model.profile,
                model=model.model,
                open=awake(model),
                kv_tokens=model.kv_tokens,
                context_length=model.context_length,
                max_concurrency=model.max_concurrency,
            )


def cards_of(sidecar: Sidecar) -> dict[str, ModelCard]:
    """The models that can be had from it."""
    cards: dict[str, ModelCard] = {}
    open_ = {member.profile for member in sidecar.members.values() if member.open}
    for profile, model in sidecar.models.items():
        if profile in open_ or (sidecar.askable and model.ready_in is not None and not awake(model)):
            context = max(
                model.context_length or 0, cards[model.model].max_model_len or 0 if model.model in cards else 0
            )
            cards[model.model] = ModelCard(id=model.model, max_model_len=context or None)
    return cards
