"""State of one sidecar: its last report, the engines it adds to the fleet, and when its models will be ready.

A model gets calls only while its sidecar reports that it runs and that no operation on it is pending. A call sent to a
sleeping engine would hang.

Synchronous, no I/O; `now` is monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import msgspec

from gateway.core.engines.origin import engine_id
from gateway.shared.fields import made_of
from gateway.shared.protocol import CapacityReport, ModelReport, Role
from gateway.shared.vllm.answers import ModelCard

STALE = 10.0  # seconds
BOOTS = 8  # earlier starts of one sidecar that are remembered, since their last reports may come late
FIRST_PAUSE, LAST_PAUSE = 0.5, 10.0  # seconds of exponential backoff while a sidecar does not answer
DOUBLINGS = 5  # from the one to the other; two to the power of a thousand failures is no float


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that a sidecar adds to the fleet, and the names that it serves. `open`: it may get calls. `priorities`:
    it runs vLLM's priority scheduling. `transfer` and `role`: as in `Transfers`.

    `kv_tokens`: tokens of KV cache. `context_length`: tokens. `max_concurrency`: calls at once. The sizes are hints,
    None where the sidecar does not know them.
    """

    id: str
    url: str
    sidecar: str
    profile: str
    served: tuple[str, ...]
    open: bool
    kv_tokens: int | None
    context_length: int | None
    max_concurrency: int | None
    priorities: bool = False
    transfer: str = ""
    role: Role = "both"


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction for a model that no engine serves: this sidecar's profile can have it ready in `ready_in` seconds.

    `ready_in` None: it cannot now. Then `why`, `message` and `retry_in` (seconds; None: not known) are the sidecar's
    reasons.
    """

    sidecar: str
    profile: str
    ready_in: float | None
    why: str = ""
    message: str = ""
    retry_in: float | None = None


class Sidecar:
    """Sidecar: its last report with the time of arrival, and the state of requests to the sidecar."""

    def __init__(self, report: CapacityReport, key: bytes, now: float, *, local: bool) -> None:
        self.report = report
        self.key = key  # digest of the key that its reports show
        self.reported_at = now
        self.local = local
        self.boots: deque[str] = deque(maxlen=BOOTS)  # earlier ones
        self.control_allowed = False  # whether the gateway may call its control address
        self.models: dict[str, ModelReport] = {}  # by profile
        self.answers: dict[str, tuple[ModelReport, float]] = {}  # by profile: answer since the last report, and when
        self.members: dict[str, Member] = {}  # by engine id
        self.cards: dict[str, ModelCard] = {}  # by model, of those it has or could have ready
        self.refused: dict[str, str] = {}  # address -> reason why it may not be used
        self.used: dict[str, float] = {}  # profile -> time when a call of it last ended or waited
        self.failures = 0  # requests in a row that it did not answer
        self._pause_until = -math.inf

    @property
    def load(self) -> tuple[float, float]:
        """Mean utilization of its GPUs, and share of their memory in use, each 0..1."""
        gpus = self.report.gpus
        total = sum(gpu.total for gpu in gpus)
        busy = sum(gpu.utilization or 0.0 for gpu in gpus) / max(1, len(gpus))
        return round(busy, 1), sum(gpu.used for gpu in gpus) / max(1, total)

    def late(self, report: CapacityReport) -> str:
        """The reason why a report is not the newest; empty: it is."""
        if report.boot == self.report.boot:
            known = self.report.sequence
            return f"report {report.sequence} after {known}" if report.sequence <= known else ""
        return f"a report of an earlier start, {report.boot}" if report.boot in self.boots else ""

    def stale(self, now: float) -> bool:
        """Whether its last report is STALE seconds old."""
        return now - self.reported_at >= STALE

    def failed(self, now: float) -> None:
        """Count a request that it did not answer, or not sensibly, and back off."""
        self.failures += 1
        self._pause_until = now + min(LAST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures - 1, DOUBLINGS))

    def pause(self, now: float) -> float:
        """Seconds of backoff until the next request to it; 0: none."""
        return max(0.0, self._pause_until - now)

    def latest(self, profile: str) -> tuple[ModelReport, float]:
        """The latest answer or report on a profile, and its arrival. Raises KeyError."""
        return self.answers.get(profile) or (self.models[profile], self.reported_at)

    def answered(self, model: ModelReport, now: float) -> None:
        """Take its answer to a request about a profile. It changes predictions only: an engine is opened by a report,
        since only reports are in order."""
        self.failures = 0
        self._pause_until = -math.inf
        if model.profile in self.models:
            self.answers[model.profile] = (model, now)

    def outlook(self, profile: str, now: float) -> Outlook | None:
        """The prediction for a profile; None: the sidecar may not be asked, or the profile is awake already, and its
        engine has joined or will not."""
        if not self.control_allowed or self.stale(now) or awake(self.models[profile]):
            return None
        model, at = self.latest(profile)
        ready_in = model.ready_in
        if ready_in is not None:
            passed = now - at if beginning(model) else 0.0  # a start that has not begun does not come nearer
            ready_in = max(0.0, ready_in - passed) + self.pause(now)
        return made_of(Outlook, model, sidecar=self.report.sidecar, ready_in=ready_in)


def awake(model: ModelReport) -> bool:
    """Whether the model's engine may get calls."""
    return model.state == "running" and model.pending is None


def beginning(model: ModelReport) -> bool:
    """Whether the model is starting, waking or running. Then a report with its engine is on the way."""
    return model.pending in ("start", "wake") or (model.state in ("starting", "running") and model.pending is None)


def members_of(report: CapacityReport) -> Iterator[Member]:
    """All engines of a report, whether the fleet may have them or not."""
    for model in report.models:
        if model.url:
            yield made_of(
                Member,
                model,
                id=engine_id(model.url),
                url=model.url.rstrip("/"),
                sidecar=report.sidecar,
                open=awake(model),
                transfer=f"{model.transfer}@{report.sidecar}" if model.transfer else "",
                role=model.role if model.transfer else "both",
            )


def cards_of(sidecar: Sidecar) -> dict[str, ModelCard]:
    """The models that a sidecar has or could have ready."""
    cards: dict[str, ModelCard] = {}
    models = {profile: model for profile, model in sidecar.models.items() if model.answers}
    open_ = {member.profile for member in sidecar.members.values() if member.open}
    for profile, model in models.items():
        if profile in open_ or (sidecar.control_allowed and model.ready_in is not None and not awake(model)):
            for name in model.served:
                context = max(model.context_length or 0, cards[name].max_model_len or 0 if name in cards else 0)
                parent = None if name == model.model else model.model
                cards[name] = ModelCard(id=name, max_model_len=context or None, parent=parent)
    return cards
