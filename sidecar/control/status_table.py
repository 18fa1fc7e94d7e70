"""Table of `sidecar status`, which a sidecar also prints when it has started."""

from __future__ import annotations

from gateway.shared.formatting import columns, gibs, seconds, shown
from gateway.shared.protocol import OFF, GPUReport, ModelReport
from sidecar.core.status import GatewayStatus, Status

COLUMNS = ("PROFILE", "STATE", "DOING", "CALLS", "READY IN", "CAN HOLD", "")


def table(status: Status) -> str:
    """The status for a person, without a last newline."""
    lines = [f"sidecar {status.sidecar} (weir {status.version}, pid {status.pid}), up {seconds(status.up_s)}"]
    lines += [f"control API {status.control}", f"file {status.config}", ""]
    lines += [_gpu(gpu) for gpu in status.gpus] or ["no GPU"]
    lines += ["", *columns([COLUMNS, *(_model(model, status) for model in status.models)])]
    if status.gateways:
        lines += ["", *map(_gateway, status.gateways)]
    lines += [f"trouble: {trouble}" for trouble in status.troubles]
    return "\n".join(lines)


def _gpu(gpu: GPUReport) -> str:
    if gpu.refused:
        return f"GPU {gpu.index}  not used: {shown(gpu.refused)}"
    busy = "" if gpu.utilization is None else f", {gpu.utilization:.0%} busy"
    return f"GPU {gpu.index}  {gibs(gpu.used)} of {gibs(gpu.total)} used, {gibs(gpu.free)} free{busy}"


def _model(model: ModelReport, status: Status) -> tuple[str, ...]:
    level = f" (level {model.sleep_level})" if model.state == "sleeping" and model.sleep_level else ""
    level += ", off" if model.why == OFF else ""
    ready = "-" if model.ready_in is None else "now" if model.ready_in == 0 else seconds(model.ready_in)
    tokens = "-" if model.kv_tokens is None else f"{model.kv_tokens:,} tokens"
    told = model.message or model.last_error or (model.url if model.state != "stopped" else "")
    calling = str(status.calls.get(model.profile, 0))
    phase = f", {model.phase}" if model.phase else ""
    copy = ", a copy" if model.copy else ""
    return (
        model.profile,
        model.state + level + copy,
        (model.pending or "-") + phase,
        calling,
        ready,
        tokens,
        shown(told),
    )


def _gateway(gateway: GatewayStatus) -> str:
    if gateway.taken is None:
        return f"gateway {gateway.url}  not answered yet"
    if gateway.taken:
        return f"gateway {gateway.url}  takes reports, since {seconds(gateway.for_s)}"
    return f"gateway {gateway.url}  takes no reports, since {seconds(gateway.for_s)}: {shown(gateway.error)}"
