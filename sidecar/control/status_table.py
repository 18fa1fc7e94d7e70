"""What `sidecar status` shows: the control API's `/status`, and the table a person reads it as."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.shared.protocol import GPUReport, ModelReport

GIB = 1 << 30
COLUMNS = ("PROFILE", "STATE", "DOING", "CALLS", "READY IN", "CAN HOLD", "")


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway. `taken`: whether it takes reports, None: it was not tried yet; `error`: why it does not; `for_s`:
    seconds since that changed."""

    url: str
    taken: bool | None = None
    error: str = ""
    for_s: float = 0.0
    failures: int = 0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A sidecar at one moment. `calls`: in flight by profile; `troubles`: what an operator should know, in words."""

    sidecar: str
    version: str
    pid: int
    boot: str
    config: str
    control: str
    up_s: float
    driver: str = ""
    gpus: tuple[GPUReport, ...] = ()
    models: tuple[ModelReport, ...] = ()
    gateways: tuple[GatewayStatus, ...] = ()
    calls: dict[str, int] = {}
    troubles: tuple[str, ...] = ()


def table(status: Status) -> str:
    """The status for a person, without a last newline."""
    lines = [f"sidecar {status.sidecar} (weir {status.version}, pid {status.pid}), up {seconds(status.up_s)}"]
    lines += [f"control API {status.control}, file {status.config}", ""]
    lines += [_gpu(gpu) for gpu in status.gpus] or ["no GPU"]
    lines += ["", *columns([COLUMNS, *(_model(model, status.calls) for model in status.models)])]
    if status.gateways:
        lines += ["", *map(_gateway, status.gateways)]
    lines += [f"trouble: {trouble}" for trouble in status.troubles]
    return "\n".join(lines)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines, each column as wide as its widest field; the last is not filled up."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, [*widths[:-1], 0])).rstrip() for row in rows]


def seconds(value: float) -> str:
    """A duration as people say it: 0.4 s, 12 s, 3 min, 2.5 h, 3 days."""
    for limit, size, unit in ((9.95, 1.0, "s"), (119.5, 1.0, "s"), (7170.0, 60.0, "min"), (172_000.0, 3600.0, "h")):
        if value < limit:
            return f"{value / size:.{1 if limit < 10 or unit == 'h' else 0}f} {unit}"
    return f"{value / 86_400:.0f} days"


def gibs(size: int) -> str:
    """Bytes in GiB, to one decimal."""
    return f"{size / GIB:.1f} GiB"


def _gpu(gpu: GPUReport) -> str:
    if gpu.refused:
        return f"GPU {gpu.index}  not used: {shown(gpu.refused)}"
    busy = "" if gpu.utilization is None else f", {gpu.utilization:.0%} busy"
    return f"GPU {gpu.index}  {gibs(gpu.used)} of {gibs(gpu.total)} used, {gibs(gpu.free)} free{busy}"


def _model(model: ModelReport, calls: dict[str, int]) -> tuple[str, ...]:
    level = f" (level {model.sleep_level})" if model.state == "sleeping" and model.sleep_level else ""
    ready = "-" if model.ready_in is None else "now" if model.ready_in == 0 else seconds(model.ready_in)
    tokens = "-" if model.kv_tokens is None else f"{model.kv_tokens:,} tokens"
    told = model.message or model.last_error or (model.url if model.state != "stopped" else "")
    calling = str(calls.get(model.profile, 0))
    return (model.profile, model.state + level, model.pending or "-", calling, ready, tokens, shown(told))


def _gateway(gateway: GatewayStatus) -> str:
    if gateway.taken is None:
        return f"gateway {gateway.url}  not answered yet"
    if gateway.taken:
        return f"gateway {gateway.url}  takes reports, since {seconds(gateway.for_s)}"
    return f"gateway {gateway.url}  takes no reports, since {seconds(gateway.for_s)}: {shown(gateway.error)}"


def shown(text: str) -> str:
    """One line of text from elsewhere, without what a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)


def announcement(status: Status) -> str:
    """What a sidecar that has started tells the person at the terminal, without a last newline."""
    usable = [gpu for gpu in status.gpus if not gpu.refused]
    sizes = " and ".join(sorted({gibs(gpu.total) for gpu in usable}))
    gpus = f"{len(usable)} GPU{'s' * (len(usable) != 1)} of {sizes}" if usable else "no GPU"
    lines = [f"sidecar {status.sidecar}: {gpus}", f"control API {status.control}"]
    lines += [f"GPU {gpu.index} is not used: {shown(gpu.refused)}" for gpu in status.gpus if gpu.refused]
    lines += [f"trouble: {shown(trouble)}" for trouble in status.troubles]
    lines += [f"reports to {' '.join(gateway.url for gateway in status.gateways) or 'no gateway'}"]
    lines += columns([("model", model.profile, _now(model)) for model in status.models])
    return "\n".join(lines)


def _now(model: ModelReport) -> str:
    if model.ready_in is None:
        return f"cannot be had: {shown(model.message)}"
    return model.state if model.state != "stopped" else f"ready {seconds(model.ready_in)} after it is wanted"
