"""Checkpoint of a decider's soft state: what the next decider would otherwise learn anew, in MessagePack.

It has learned rates, estimates, levels of limits, places kept and breakers, and never a hold: relays tell those. It
knows no clock: every time in it is an age or a time to come, from the moment it was taken. Whoever restores it says how
long ago that was. Each component makes and takes its own part (`checkpoint`, `restore`); `then`, in those, is the
moment it was taken, by the restoring decider's clock.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.core.admission.levels import Kind
from gateway.core.admission.quotas import Used

VERSION = 2
MOST_BYTES = 8 * 1024**2
MOST_ENGINES = 4096
MOST_MODELS = 1024
MOST_BUCKETS = 16_384  # the fullest
MOST_VERDICTS = 1024
MOST_PLACES = 4096  # of the queues, and as many of the limits: those due first
MOST_ESTIMATES = 1024  # of prompts, and as many of outputs: those used last
MOST_PREFIXES = 65_536  # blocks of all engines' prefix indexes, 512 KiB: those used last, as many of each engine
GROUP = 64  # blocks that share an age
BLOCK = 8  # bytes of a block's hash

Number = Annotated[float, Meta(ge=0.0, le=1e300)]  # finite
Positive = Annotated[float, Meta(gt=0.0, le=1e300)]
Offset = Annotated[float, Meta(ge=-1e300, le=1e300)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Hash = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class CheckpointError(ValueError):
    """Bytes are no checkpoint that this version can read. The message gives the reason."""


class SavedBreaker(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """`age`: seconds since it last changed; None: it never has. `failures` in a row, good `probes`, relapses."""

    state: Literal["closed", "open", "half_open"]
    age: Number | None
    failures: Count
    probes: Count
    reopened: Count


class SavedPrefixes(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Hashes of prompts' blocks that an engine has read, the latest first, and an age in seconds of each GROUP."""

    blocks: Annotated[bytes, Meta(max_length=MOST_PREFIXES * BLOCK)] = b""
    ages: list[Number] = []

    def __post_init__(self) -> None:
        count, rest = divmod(len(self.blocks), BLOCK)
        if rest or len(self.ages) != -(-count // GROUP):
            raise ValueError(f"{len(self.blocks)} bytes of blocks have {len(self.ages)} ages")


class SavedEngine(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """State that an Engine has learned. `full_at`: its slots when it last had a queue; None: it had none. `drained`: an
    operator wants no new calls for it."""

    id: str
    prefill_rate: Positive
    ttft_spread: Positive
    tpot: Number
    pace: Positive
    trim: Annotated[float, Meta(ge=0.5, le=4.0)]
    slots: Annotated[int, Meta(ge=1, le=2**31)]
    full_at: Number | None
    breaker: SavedBreaker
    prefixes: SavedPrefixes = SavedPrefixes()
    drained: bool = False


class SavedPrompt(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Tokens per unit of each feature of a prompt."""

    model: str
    kind: str
    weights: tuple[Number, Number, Number, Number, Number]


class SavedOutput(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A quantile of actual over requested output tokens. `size`: power of two of the client's limit."""

    model: str
    class_name: str
    size: Count
    log: Annotated[float, Meta(ge=-12.0, le=0.0)]
    largest: Annotated[float, Meta(ge=0.0, le=1.0)]
    samples: Count


class SavedCosts(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The estimates of a CostModel, the most recently used last."""

    prompts: Annotated[list[SavedPrompt], Meta(max_length=MOST_ESTIMATES)] = []
    outputs: Annotated[list[SavedOutput], Meta(max_length=MOST_ESTIMATES)] = []


class SavedBucket(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Level of one limit. `key`: kind, tenant, class, model."""

    key: tuple[Kind, str, str, str]
    level: Number


class SavedLimitPlace(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A booking in limits. `parts`: a bucket's place in the list of buckets, and the amount."""

    key: Hash
    due_in: Offset
    parts: list[tuple[Count, Count]]


class SavedLimits(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The state of a LimitBook."""

    buckets: Annotated[list[SavedBucket], Meta(max_length=MOST_BUCKETS)] = []
    places: Annotated[list[SavedLimitPlace], Meta(max_length=MOST_PLACES)] = []
    quotas: Annotated[list[Used], Meta(max_length=MOST_BUCKETS)] = []


class SavedPlace(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A booking in a queue. `age`: seconds since its call first came."""

    key: Hash
    age: Offset
    deadline_in: Offset
    due_in: Offset
    tokens: Count


class SavedDrain(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A drain rate, in tokens per second, in all and by class; and means over holds: tokens x seconds, tokens."""

    rate: Number = 0.0
    by_class: dict[str, Number] = {}
    lasted: Number = 0.0
    tokens: Number = 0.0


class SavedTraffic(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The traffic of one model. `places`: by class."""

    model: str
    drain: SavedDrain
    places: dict[str, list[SavedPlace]]


class SavedVerdict(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A canary that was taken out of its model route. `definition`: hash of the route; of another one it is no verdict.
    `why`: the figure, in words."""

    name: str
    definition: Hash
    model: str
    why: Annotated[str, Meta(min_length=1, max_length=400)]


class Checkpoint(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The whole. `hashes` stands for the key of Python's hashes: by another key no call would find its place."""

    hashes: Hash
    engines: Annotated[list[SavedEngine], Meta(max_length=MOST_ENGINES)]
    costs: SavedCosts
    limits: SavedLimits
    traffic: Annotated[list[SavedTraffic], Meta(max_length=MOST_MODELS)]
    canaries: Annotated[list[SavedVerdict], Meta(max_length=MOST_VERDICTS)] = []


class _Envelope(msgspec.Struct, array_like=True):
    version: int
    state: msgspec.Raw


def encoded(checkpoint: Checkpoint) -> bytes:
    return msgspec.msgpack.encode(_Envelope(VERSION, msgspec.Raw(msgspec.msgpack.encode(checkpoint))))


def decoded(data: bytes) -> Checkpoint:
    """Raises CheckpointError."""
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"it has {len(data)} bytes, and {MOST_BYTES} is the most")
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
        if envelope.version != VERSION:
            raise CheckpointError(f"it is of version {envelope.version}, and this gateway reads version {VERSION}")
        return msgspec.msgpack.decode(envelope.state, type=Checkpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"it is no checkpoint: {error}") from error
