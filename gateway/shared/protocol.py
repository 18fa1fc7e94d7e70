"""Protocol between sidecars and gateways: reports, answers and orders, as JSON over HTTP.

A sidecar POSTs a `CapacityReport` to `/sidecars/report` on the control port of each gateway, every second and at every
change. The answer is a `DemandReport`. A gateway that cannot wait for the next report, since a call wants a model that
is not awake, POSTs `/models/PROFILE/ensure` to the sidecar's `control` address.

Sidecars show gateways the report token, gateways show sidecars the order token; both may be the same. A sidecar's
report also shows its own `key`: another holder of the token cannot speak for it. A gateway on another machine is told
the sidecar's relay, as `control` and before `/engines/PROFILE` as the URL of each engine. A gateway in a cluster tells
who its members are, so that the sidecar reports to all of them. A message has at most MAX_BYTES. Unknown fields are
ignored.

Neither side trusts the other: texts and lists are bounded here. Whether an engine's URL may be used at all is the
gateway's decision, by its allowed networks.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

VERSION = 1
MAX_BYTES = 1024 * 1024
REPORT_PATH = "/sidecars/report"
ENGINES_PATH = "/engines/"  # of a sidecar's relay: the profile and an engine's own path follow
# A folder of unix sockets has this file where a sidecar made it for its engines, and is its own user's alone.
SOCKETS_MARK = ".weir-engines"
# `ModelReport.why` where it is more than a sentence for people: callers are told these two.
NO_MEMORY, OFF, FAILED = "no_memory", "off", "error"

MAX_MEMBERS = 16  # of a cluster, as a sidecar is told of them

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Words = Annotated[str, Meta(max_length=2000)]
Url = Annotated[str, Meta(max_length=2048)]
ControlUrl = Annotated[
    str, Meta(max_length=300, pattern=r"^https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}\Z")
]
Size = Annotated[int, Meta(ge=0, le=2**60)]  # bytes or tokens
Count = Annotated[int, Meta(ge=0, le=2**31)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]

State = Literal["stopped", "starting", "running", "sleeping", "error"]
Role = Literal["prefill", "decode", "both"]  # of an engine that exchanges KV caches
Pending = Literal["start", "stop", "sleep", "wake", "drain"]


class GPUReport(msgspec.Struct, frozen=True, kw_only=True):
    """GPU of a machine. Sizes in bytes, `utilization` 0..1 (None: not known). `refused`: why the GPU is not used;
    empty: it is used."""

    index: Count
    total: Size
    used: Size
    free: Size
    utilization: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    refused: Words = ""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Profile of a sidecar. `model`: the name that callers use. `aliases`: other names that callers may use.
    `adapters`: names of LoRA adapters, which the engine serves as models of their own. `priorities`: its engine runs
    vLLM's priority scheduling.

    `url`: of its engine, empty while there is none. `ready_in`: seconds until the profile could serve if it were wanted
    now; 0: it runs; None: it cannot be made ready, and `why` gives the reason in a word (`no_memory`, `error`, `off`),
    `message` in a sentence. `retry_in`: seconds after which that may have changed, if known.

    `copy`: gateways have another engine of the model, too. `copy_in`: seconds until the profile could serve beside that
    engine; None: a warmer model would lose its place, or the profile serves already. `gpus`: indices of the GPUs of its
    engine. `held`: bytes on each of these GPUs that no other engine can use. `phase`: of a start under way, in words.

    `transfer`: name of the model's engines on this machine that exchange KV caches with its engine; empty: it exchanges
    none. `role`: its part in that. Gateways have a `prefill` engine ready for no call.
    """

    profile: Name
    model: Name
    state: State
    pending: Pending | None = None
    url: Url = ""
    ready_in: Seconds | None = None
    why: Annotated[str, Meta(max_length=64)] = ""
    message: Words = ""
    retry_in: Seconds | None = None
    kv_tokens: Size | None = None
    context_length: Count | None = None
    max_concurrency: Count | None = None
    sleep_level: Literal[0, 1, 2] = 0
    last_error: Words = ""
    copy: bool = False
    copy_in: Seconds | None = None
    aliases: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    adapters: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    gpus: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    held: Size = 0
    priorities: bool = False
    phase: Annotated[str, Meta(max_length=64)] = ""
    transfer: Annotated[str, Meta(max_length=128)] = ""
    role: Role = "both"

    @property
    def answers(self) -> bool:
        """Whether its engine answers calls."""
        return not self.transfer or self.role != "prefill"

    @property
    def served(self) -> tuple[str, ...]:
        """Names of all that its engine serves."""
        return (self.model, *self.adapters)


class CapacityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one sidecar. `boot` is another with every start of the sidecar, `sequence` counts its reports: one that
    arrives out of order is dropped. `control` is where it takes orders, as the gateways reach it. `key`: a secret of
    this sidecar's that outlives its restarts; a gateway that hears it takes its name from nobody with another."""

    sidecar: Id
    boot: Id
    key: Annotated[str, Meta(max_length=128)] = ""
    sequence: Annotated[int, Meta(ge=0, le=2**53)]
    control: Url
    gpus: Annotated[tuple[GPUReport, ...], Meta(max_length=64)] = ()
    models: Annotated[tuple[ModelReport, ...], Meta(max_length=256)] = ()
    version: int = VERSION


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand of one gateway for one profile: calls that hold a grant on it, calls that wait for the model,
    seconds since the last of either (None: never), and whether the gateway sends it nothing more (`withdrawn`), so that
    `in_flight` 0 then means that it may be stopped. `copy`: another engine serves the model, so that it runs as a copy,
    or is wanted as one where calls wait."""

    profile: Name
    in_flight: Count = 0
    waiting: Count = 0
    idle: Seconds | None = None
    withdrawn: bool = False
    copy: bool = False


class ClusterMember(msgspec.Struct, frozen=True, kw_only=True):
    """Member of a cluster: its name there, and the URL of its control port."""

    name: Name
    control: ControlUrl


class DemandReport(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's answer to the report `sequence` of `boot`. `member`: its own name in its cluster, empty where it is
    in none; `members`: those of the cluster that sidecars can report to."""

    gateway: Id
    boot: Id
    sequence: Annotated[int, Meta(ge=0, le=2**53)]
    demands: Annotated[tuple[Demand, ...], Meta(max_length=256)] = ()
    member: Annotated[str, Meta(max_length=256)] = ""
    members: Annotated[tuple[ClusterMember, ...], Meta(max_length=MAX_MEMBERS)] = ()
    version: int = VERSION


class Ensured(msgspec.Struct, frozen=True, kw_only=True):
    """A sidecar's answer to `/models/PROFILE/ensure`: what it says of that profile now."""

    model: ModelReport


class ProtocolError(ValueError):
    """A message that is not what it should be; the text says where."""


def encode(message: CapacityReport | DemandReport | Ensured) -> bytes:
    """The JSON of a message."""
    return msgspec.json.encode(message)


def capacity_report(data: bytes) -> CapacityReport:
    """Raises ProtocolError."""
    report = _decoded(data, CapacityReport)
    names = [model.profile for model in report.models]
    if len(set(names)) < len(names):
        raise ProtocolError("models: a profile is there twice")
    return report


def demand_report(data: bytes) -> DemandReport:
    """Raises ProtocolError."""
    report = _decoded(data, DemandReport)
    for member in report.members:
        if not 0 < int(member.control.rpartition(":")[2]) < 65_536:
            raise ProtocolError(f"members: {member.control} has no port from 1 to 65535")
    return report


def ensured(data: bytes) -> Ensured:
    """Raises ProtocolError."""
    return _decoded(data, Ensured)


def _decoded(data: bytes, kind: type[T]) -> T:
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"{len(data)} bytes, expected at most {MAX_BYTES}")
    try:
        message = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from None
    version = getattr(message, "version", VERSION)
    if version != VERSION:
        raise ProtocolError(f"version {version}, expected {VERSION}: upgrade the older of the two")
    return message
